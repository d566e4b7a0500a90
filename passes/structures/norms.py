"""Find batch norm, layer norm and RMS norm: as one op each, the latter two also as several ops.

As several ops, both divide by the root of a mean square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from onnx import NodeProto

from passes.structures.axes import axes_of
from passes.structures.candidates import Candidate, find_fused
from passes.structures.view import GraphView

__all__ = ["find_batch_norms", "find_layer_norms", "find_rms_norms"]

BATCH_NORM_OPS: Final = ("BatchNormalization",)
LAYER_NORM_OPS: Final = ("LayerNormalization", "com.microsoft.SkipLayerNormalization")
RMS_NORM_OPS: Final = (
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "com.microsoft.SkipSimplifiedLayerNormalization",
)
"""onnxruntime's SimplifiedLayerNormalization is an RMS norm, and is in the default domain."""


def find_batch_norms(view: GraphView) -> Iterator[Candidate]:
    yield from find_fused(view, BATCH_NORM_OPS)


def find_layer_norms(view: GraphView) -> Iterator[Candidate]:
    yield from find_fused(view, LAYER_NORM_OPS)
    yield from _spelled_out(view, centred=True)


def find_rms_norms(view: GraphView) -> Iterator[Candidate]:
    yield from find_fused(view, RMS_NORM_OPS)
    yield from _spelled_out(view, centred=False)


def _spelled_out(view: GraphView, *, centred: bool) -> Iterator[Candidate]:
    for norm in find_norm_patterns(view):
        if norm.centred == centred:
            yield Candidate(norm.last, norm.nodes, (norm.quotient, norm.last.output[0]))


@dataclass(frozen=True, slots=True)
class NormPattern:
    """x / √(mean(x²) + ε) over the last axis, or over the channels; with `centred`, of x - mean(x).

    `nodes` begin with the mean and end with the `last`: the scale and the bias if there are any.
    """

    x: str
    centred: bool
    nodes: tuple[NodeProto, ...]
    quotient: str
    """The value before the scale."""

    @property
    def last(self) -> NodeProto:
        return self.nodes[-1]


def find_norm_patterns(view: GraphView) -> Iterator[NormPattern]:
    """Every such division in the graph, in all its forms."""
    for root in (*view.by_op.get("Sqrt", ()), *view.by_op.get("Pow", ())):
        under = _mean_square(view, root)
        if under is None:
            continue
        squared, nodes = under
        for division in _divisions(view, root, squared):
            x, differences = _without_mean(view, squared)
            ends = _scale_and_bias(view, division[-1])
            yield NormPattern(
                x, bool(differences), (*differences, *nodes, root, *division, *ends), division[-1].output[0]
            )


def _mean_square(view: GraphView, root: NodeProto) -> tuple[str, list[NodeProto]] | None:
    """The value whose mean square plus ε is under `root`, and the nodes that compute this."""
    plus = view.maker(root.input[0], "Add")
    if plus is None or (root.op_type == "Pow" and view.scalar(root.input[1]) not in (0.5, -0.5)):
        return None
    for lifted, epsilon in (plus.input, reversed(plus.input)):
        mean = view.maker(lifted, "ReduceMean")
        if mean is None or view.scalar(epsilon) is None or not _is_over_features(view, mean):
            continue
        square = view.maker(mean.input[0], "Pow", "Mul")
        if square is None:
            continue
        base, other = (view.source(name) for name in square.input)
        if base == other if square.op_type == "Mul" else view.scalar(other) == 2.0:
            return base, [square, mean, plus]
    return None


def _divisions(view: GraphView, root: NodeProto, squared: str) -> Iterator[list[NodeProto]]:
    """The nodes that divide `squared` by `root`: Div, or Reciprocal and Mul; after a power of -½ just Mul."""
    if root.op_type == "Pow" and view.scalar(root.input[1]) == -0.5:
        yield from ([node] for node in _products_with(view, root, squared))
        return
    for node in view.readers(root.output[0], "Div"):
        if _is_same(view, node.input[0], squared):
            yield [node]
    inverses = view.readers(root.output[0], "Reciprocal")
    inverses += [node for node in view.readers(root.output[0], "Div") if view.scalar(node.input[0]) == 1.0]
    for inverse in inverses:
        yield from ([inverse, node] for node in _products_with(view, inverse, squared))


def _products_with(view: GraphView, inverse: NodeProto, squared: str) -> Iterator[NodeProto]:
    for node in view.readers(inverse.output[0], "Mul"):
        if any(_is_same(view, name, squared) for name in node.input):
            yield node


def _is_same(view: GraphView, name: str, other: str) -> bool:
    """Whether both are one value, or one difference computed twice."""
    name = view.source(name)
    first, second = view.maker(name, "Sub"), view.maker(other, "Sub")
    if name == other or first is None or second is None:
        return name == other
    return list(map(view.source, first.input)) == list(map(view.source, second.input))


def _without_mean(view: GraphView, squared: str) -> tuple[str, list[NodeProto]]:
    """The x behind x - mean(x), and the nodes of that difference; otherwise `squared` itself."""
    difference = view.maker(squared, "Sub")
    mean = view.maker(difference.input[1], "ReduceMean") if difference is not None else None
    if difference is None or mean is None:
        return squared, []
    x = view.source(difference.input[0])
    if view.source(mean.input[0]) != x:
        return squared, []
    twins = [node for node in view.readers(x, "Sub") if list(node.input) == list(difference.input)]
    return x, [mean, *(twins or [difference])]


def _scale_and_bias(view: GraphView, last: NodeProto) -> list[NodeProto]:
    """The product with a weight, and the sum with one, that are the only readers."""
    ends = []
    for op in ("Mul", "Add"):
        readers = view.readers(last.output[0])
        if len(readers) != 1 or readers[0].op_type != op:
            continue
        node = readers[0]
        if not any(name in view.folded and view.scalar(name) is None for name in node.input):
            continue
        ends.append(node)
        last = node
    return ends


def _is_over_features(view: GraphView, mean: NodeProto) -> bool:
    """Whether the mean is over the last axes, or over axis 1, the channels of an image; not as in an instance norm."""
    axes = axes_of(view, mean)
    dims = view.dims(mean.input[0])
    if not axes:
        return False
    rank = len(dims) if dims is not None else None
    placed = {axis - rank if rank is not None and axis >= 0 else axis for axis in axes}
    if rank == 4 and placed == {-1, -2}:  # each channel of an image by itself
        return False
    return placed == set(range(-len(placed), 0)) or (rank == 4 and placed == {-3}) or axes == [1]
