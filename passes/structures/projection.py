"""A projection: a product of data with a constant matrix, and the way back to it from where attention uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from onnx import NodeProto, TensorProto

from passes.structures.view import GraphView

__all__ = ["Projection", "computed_from", "projections_behind"]


@dataclass(frozen=True, slots=True)
class Projection:
    """`node` multiplies `data` with `matrix`, a value that is `weight` but for its layout and its type."""

    node: NodeProto
    data: str
    matrix: str
    weight: TensorProto

    @property
    def value(self) -> str:
        return self.node.output[0]


def projections_behind(view: GraphView, name: str) -> list[Projection]:
    """The projections that `name` is made from, heads and norms aside; the nearest first.

    Behind a norm there may be a residual sum, whose terms are computed one from the other: then `name` is no
    projection, but a hidden state, and nothing is found.
    """
    found = _reached(view, name, HEAD_OPS)
    return _reached(view, name, HEAD_OPS - NORM_OPS) if _is_chain(view, found) else found


def computed_from(view: GraphView, node: NodeProto, source: NodeProto) -> bool:
    """Whether something of `source` goes into `node`. Looks no further up than `source` stands in the graph."""
    limit = view.position[source.output[0]]
    seen: set[str] = set()
    front = list(node.input)
    while front:
        name = front.pop()
        if name in source.output:
            return True
        if name not in seen and view.position.get(name, -1) > limit:
            seen.add(name)
            front.extend(view.producers[name].input)
    return False


def _reached(view: GraphView, name: str, through: frozenset[str]) -> list[Projection]:
    reached = (_as_projection(view, node) for node in view.upstream(name, through))
    return [one for one in reached if one is not None]


def _is_chain(view: GraphView, found: list[Projection]) -> bool:
    return any(computed_from(view, one.node, other.node) for one in found for other in found if one is not other)


def _as_projection(view: GraphView, node: NodeProto) -> Projection | None:
    rule = PRODUCTS.get(node.op_type)
    if rule is None or node.domain or len(node.input) < 2:
        return None
    for at in (1, 0):
        weight = view.weight_behind(node.input[at])
        if weight is not None and node.input[1 - at] not in view.folded and rule(node, at, [*weight.dims]):
            return Projection(node, node.input[1 - at], node.input[at], weight)
    return None


def _of_matrix(node: NodeProto, at: int, dims: list[int]) -> bool:
    """A matrix, or a stack of them: torch keeps the heads of an Einsum's weight apart."""
    return len(dims) in (2, 3) and sum(dim > 1 for dim in dims) > 1


def _of_pointwise(node: NodeProto, at: int, dims: list[int]) -> bool:
    """A 1×1 Conv, which mixes channels at each place; all of them, or those of each group."""
    return at == 1 and len(dims) > 2 and set(dims[2:]) == {1} and dims[1] > 1


PRODUCTS: Final[dict[str, Callable[[NodeProto, int, list[int]], bool]]] = {
    "MatMul": _of_matrix,
    "Gemm": _of_matrix,
    "Einsum": _of_matrix,
    "Conv": _of_pointwise,
}
"""Op → whether its operand at a place, of these dims, is a matrix for the other operand to be projected with."""

NORM_OPS: Final = frozenset(
    {
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "LpNormalization"),
        *("Pow", "ReduceMean", "ReduceL2", "Sqrt", "Reciprocal"),
    }
)
"""What a norm is, whole or spelled out. Q and K may have norms of their own; a block begins with one too."""

HEAD_OPS: Final = NORM_OPS | {
    *("Reshape", "Transpose", "Identity", "Cast", "CastLike", "Squeeze", "Unsqueeze", "Expand", "Tile", "Flatten"),
    *("Add", "Sub", "Mul", "Div", "Neg", "Concat", "Slice", "Split", "Gather", "Where", "Pad"),
    *("SequenceAt", "SplitToSequence", "Clip", "RotaryEmbedding"),
}
"""What may stand between a projection and its place in attention: heads, rotary embedding, norms, KV cache."""
