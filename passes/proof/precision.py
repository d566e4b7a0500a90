"""In which floating type a value was computed at its least precise: that type's tolerance is the value's own.

A float64 that is made of float32 is no better than float32. What counts is where numbers are rounded, so a type counts
where a node *computes* in it: an input or a weight that is stored in half precision is given, and moving its elements
rounds nothing. Constants that are computed from constants count no more, since every program computes the same from
them, nor do integers and bools, which are equal or wrong; those that stand for floats (QuantizeLinear) pass theirs on.

What depends on random numbers has no precision at all, and is `DRAWN`.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Final

from onnx import GraphProto, NodeProto, TensorProto, helper, inliner, numpy_helper

from passes.graph.op_facts import RANDOM_OPS, SIZES, has_body, moved_inputs
from passes.graph.traversal import bodies_in, infer_types, reads_of
from passes.proof.numbers import DRAWN, least_precise
from passes.weights.detached import DetachedModel

__all__ = ["Precisions", "computed_types"]

Precisions = Mapping[str, str]
"""Value → the least precise floating type on its way, by numpy's name; or `DRAWN`."""

Known = MutableMapping[str, str | None]
"""Value → the least precise type so far; empty where nothing was rounded yet, None for a constant."""


def computed_types(
    model: DetachedModel, names: Iterable[str], computed_in: Collection[str] | None = None
) -> Precisions:
    """The least precise floating type on the way of each of `names`, but for those on whose way nothing is rounded.

    Args:
        computed_in: the types that the source of `model` computes in, where that is known: a detour through another
            one, which an exporter has added, counts not.
    """
    proto = model.proto
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    graph = infer_types(proto)
    known: Known = dict.fromkeys((tensor.name for tensor in graph.initializer), None)
    known |= dict.fromkeys((info.name for info in graph.input if info.name not in known), "")
    _PrecisionWalk(computed_in).through(graph, known, {})
    return {name: dtype for name in names if (dtype := known.get(name))}


class _PrecisionWalk:
    """Follows values through graphs and their bodies; nodes are in order, as in every model that was read."""

    def __init__(self, computed_in: Collection[str] | None) -> None:
        self._computed_in = computed_in
        self._false: set[str] = set()
        """Constants that say no, such as the `training_mode` of a Dropout."""

    def through(self, graph: GraphProto, known: Known, outer: Mapping[str, int]) -> None:
        """Add to `known` what the nodes of `graph` make; `outer` are the element types of what is visible there."""
        types = {**outer, **_element_types(graph)}
        self._false.update(_false_constants(graph))
        for node in graph.node:
            self._node(node, known, types)

    def _node(self, node: NodeProto, known: Known, types: Mapping[str, int]) -> None:
        if has_body(node):
            self._body_node(node, known, types)
            return
        read = [name for name in _data_of(node) if name]
        if self._draws(node) or (node.op_type not in SIZES and _has_drawn(known, read)):
            known.update(dict.fromkeys(node.output, DRAWN))
            return
        if all(known.get(name) is None for name in read) and node.op_type not in RANDOM_OPS:
            known.update(dict.fromkeys(node.output, None))
            return
        moved = moved_inputs(node)
        worst = least_precise(*(known.get(name) for name in (moved or read)))
        stands_for_floats = node.op_type in QUANTIZING or any(
            known.get(name) and types.get(name) not in FLOATS for name in read
        )
        for name in node.output:
            dtype = types.get(name, 0)
            if dtype in FLOATS:
                known[name] = worst if moved else least_precise(worst, self._rounding_type(dtype))
            elif dtype:
                known[name] = worst if stands_for_floats and dtype != TensorProto.BOOL else ""
            else:  # the result has no known type: it is computed in those of its inputs
                known[name] = least_precise(worst, *(self._rounding_type(types.get(one, 0)) for one in read))

    def _draws(self, node: NodeProto) -> bool:
        """Whether `node` draws numbers: a Dropout does so in training mode only."""
        if node.op_type == "Dropout":
            return len(node.input) > 2 and node.input[2] not in ("", *self._false)
        return node.op_type in RANDOM_OPS

    def _rounding_type(self, dtype: int) -> str:
        name = FLOATS.get(dtype, "")
        return name if self._computed_in is None or name in self._computed_in else ""

    def _body_node(self, node: NodeProto, known: Known, types: Mapping[str, int]) -> None:
        """If, Loop and Scan: their results are those of their bodies, which may read what they have made before."""
        found = [""] * len(node.output)
        first, carried, result = _places(node)
        for body in bodies_in(node):
            inner: Known = dict.fromkeys((tensor.name for tensor in body.initializer), None)
            fed = [known.get(name) or "" for name in node.input]
            while True:
                before = list(fed)
                for place, info in enumerate(body.input):
                    inner[info.name] = fed[place] if place < len(fed) else ""
                self.through(body, ChainMap(inner, known), types)
                made = [inner.get(info.name, known.get(info.name)) or "" for info in body.output][result:]
                for place in range(carried):
                    fed[first + place] = _worst(fed[first + place], made[place])
                if fed == before:
                    break
            found = [_worst(*pair) for pair in zip(found, made, strict=False)]
        # A condition, or a number of rounds, that is drawn decides on all results.
        if _has_drawn(known, () if node.op_type == "Scan" else node.input[: 2 if node.op_type == "Loop" else 1]):
            found = [DRAWN] * len(found)
        is_constant = all(known.get(name) is None for name in reads_of(node))
        for name, dtype in zip(node.output, found, strict=True):
            known[name] = None if is_constant and dtype != DRAWN else dtype


def _has_drawn(known: Known, names: Iterable[str]) -> bool:
    return any(known.get(name) == DRAWN for name in names)


def _worst(*dtypes: str) -> str:
    return DRAWN if DRAWN in dtypes else least_precise(*dtypes)


def _false_constants(graph: GraphProto) -> Iterable[str]:
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            tensors.update((node.output[0], one.t) for one in node.attribute if one.name == "value")
    for name, tensor in tensors.items():
        if tensor.data_type == TensorProto.BOOL and not tensor.dims and not numpy_helper.to_array(tensor).any():
            yield name


def _places(node: NodeProto) -> tuple[int, int, int]:
    """Of what a body gives back to itself: the first of the node's inputs, and how many; and the body's first output
    that is one of the node's."""
    if node.op_type == "Loop":
        return 2, len(node.input) - 2, 1
    if node.op_type == "Scan":
        return 0, len(node.input) - next(one.i for one in node.attribute if one.name == "num_scan_inputs"), 0
    return 0, 0, 0


def _data_of(node: NodeProto) -> Iterable[str]:
    """The inputs whose numbers go into the result."""
    return node.input[: 1 if node.op_type in ("CastLike", *SIZES) else None]


def _element_types(graph: GraphProto) -> dict[str, int]:
    found = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for info in (*graph.input, *graph.value_info, *graph.output):
        found[info.name] = info.type.tensor_type.elem_type
    return found


FLOATS: Final[Mapping[int, str]] = {
    dtype: helper.tensor_dtype_to_np_dtype(dtype).name
    for dtype in (
        *(TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16),
        *(TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ),
        *(TensorProto.FLOAT4E2M1, TensorProto.COMPLEX64, TensorProto.COMPLEX128),
    )
}
"""Without FLOAT8E8M0, which holds scales: what is divided by a scale is multiplied by it again."""

QUANTIZING: Final = frozenset(
    {
        *("QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"),
        *("QLinearMatMul", "QLinearConv"),
    }
)
"""Ops whose integers stand for floats."""
