"""The axes along which a product reads its weight, which layout operators may have moved on the way to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import GraphProto, NodeProto

from passes.graph.op_facts import LAYOUT_OPS, ONNX_DOMAINS, RESHAPES, attribute_of

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MovedConstant:
    """A value that holds the elements of the stored tensor `source`, each once; `source` itself is such a value too.

    axes: for each axis of the value, the source axis with the same elements; None for a merged, split or new axis.
    """

    source: str
    axes: tuple[int | None, ...]

    def axis_of_source(self, axis: int | None) -> int | None:
        return None if axis is None else self.axes[axis]


def find_moved_constants(
    graph: GraphProto, sources: Mapping[str, Shape], shapes: Mapping[str, Shape | None]
) -> dict[str, MovedConstant]:
    """Values of `graph` that are a source tensor, or a source tensor followed only by layout operators.

    Args:
        sources: stored tensors with their shapes.
        shapes: of computed values, where they are known; a dim that is open is negative.
    """
    found = {name: MovedConstant(name, tuple(range(len(shape)))) for name, shape in sources.items()}
    known: dict[str, Shape] = dict(sources)
    for node in graph.node:
        if node.op_type not in LAYOUT_OPS or node.domain not in ONNX_DOMAINS or node.input[0] not in found:
            continue
        source, name = node.input[0], node.output[0]
        shape = shapes.get(name)
        if shape is None or any(size < 0 for size in shape):
            continue
        before = found[source]
        places = _places(node, known[source], shape)
        found[name] = MovedConstant(before.source, tuple(before.axis_of_source(place) for place in places))
        known[name] = shape
    return found


def _places(node: NodeProto, shape: Shape, result: Shape) -> list[int | None]:
    """For each axis of the result of a layout operator the axis of its input that it is."""
    if node.op_type == "Transpose":
        return [*attribute_of(node, "perm", range(len(shape))[::-1])]
    if node.op_type in RESHAPES:
        return [axis_in_shape(result, shape, axis) for axis in range(len(result))]
    return [*range(len(shape))]


def axis_in_shape(shape: Sequence[int], other: Sequence[int], axis: int) -> int | None:
    """The axis of `other` with the same elements as `axis` of `shape`, where both are shapes of one sequence of
    elements; None where that axis is merged or split."""
    wanted = math.prod(shape[:axis]), shape[axis]
    return next((place for place in range(len(other)) if (math.prod(other[:place]), other[place]) == wanted), None)
