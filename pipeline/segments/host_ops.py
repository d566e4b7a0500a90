"""Operations on values that no plan can hold: sequences, optionals, and results as long as the numbers say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.importers.from_onnx.attributes import Attributes
from pipeline.importers.from_onnx.replacements import PendingNode


@dataclass(frozen=True, slots=True)
class HostNode:
    """A node with the values of its inputs; None stands for one that is left out, or for an empty optional."""

    node: PendingNode
    inputs: Sequence[Any]

    @property
    def attributes(self) -> Attributes:
        return Attributes(self.node.proto)

    def operand(self, place: int) -> Any:
        return self.inputs[place] if place < len(self.inputs) else None

    def array(self, place: int) -> np.ndarray:
        return np.asarray(self.inputs[place])

    def integer(self, place: int, default: int) -> int:
        value = self.operand(place)
        return default if value is None else int(np.asarray(value).item())


@dataclass(frozen=True, slots=True)
class HostOp:
    """An operation, and the nodes that it takes."""

    compute: Callable[[HostNode], list[Any]]
    takes: Callable[[HostNode], bool] = lambda _: True


def identity(node: HostNode) -> list[Any]:
    return [node.inputs[0]]


def text_constant(node: HostNode) -> list[Any]:
    found = {attribute.name: attribute for attribute in node.node.proto.attribute}
    if "value_string" in found:
        return [np.array(found["value_string"].s.decode(), object)]
    if "value_strings" in found:
        return [np.array([text.decode() for text in found["value_strings"].strings], object)]
    return [node.attributes.constant()]


def sequence_construct(node: HostNode) -> list[Any]:
    return [list(node.inputs)]


def sequence_empty(_: HostNode) -> list[Any]:
    return [[]]


def sequence_length(node: HostNode) -> list[Any]:
    return [np.array(len(node.inputs[0]), np.int64)]


def sequence_at(node: HostNode) -> list[Any]:
    return [node.inputs[0][node.integer(1, 0)]]


def sequence_insert(node: HostNode) -> list[Any]:
    items = list(node.inputs[0])
    items.insert(node.integer(2, len(items)), node.inputs[1])
    return [items]


def sequence_erase(node: HostNode) -> list[Any]:
    items = list(node.inputs[0])
    del items[node.integer(1, -1)]
    return [items]


def concat_from_sequence(node: HostNode) -> list[Any]:
    axis = node.attributes.integer("axis")
    join = np.stack if node.attributes.flag("new_axis") else np.concatenate
    return [join(node.inputs[0], axis)]


def split_to_sequence(node: HostNode) -> list[Any]:
    data, axis, sizes = node.array(0), node.attributes.integer("axis"), node.operand(1)
    total = data.shape[axis]
    if sizes is None or np.ndim(sizes) == 0:
        step = node.integer(1, 1)
        places = list(range(step, total, step))
    else:
        places = list(np.cumsum(sizes)[:-1])
    pieces = np.split(data, places, axis)
    if sizes is None and not node.attributes.flag("keepdims", True):
        pieces = [np.squeeze(piece, axis) for piece in pieces]
    return [pieces]


def optional(node: HostNode) -> list[Any]:
    return [node.operand(0)]


def optional_has_element(node: HostNode) -> list[Any]:
    return [np.array(node.operand(0) is not None)]


def nonzero(node: HostNode) -> list[Any]:
    array = node.array(0)
    return [np.array(np.nonzero(np.atleast_1d(array)), np.int64).reshape(max(array.ndim, 1), -1)]


def compress(node: HostNode) -> list[Any]:
    data, condition = node.array(0), node.array(1)
    axis = node.attributes.integer("axis") if "axis" in node.attributes else None
    return [np.compress(condition, data, axis)]


def unique(node: HostNode) -> list[Any]:
    """Sorted, or in the order of their first occurrence."""
    data = node.array(0)
    axis = node.attributes.integer("axis") if "axis" in node.attributes else None
    values, first, inverse, counts = np.unique(data, True, True, True, axis=axis)
    if not node.attributes.flag("sorted", True):
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        values = np.take(values, order, 0 if axis is None else axis)
        first, counts, inverse = first[order], counts[order], place[inverse]
    integers = (np.asarray(array, np.int64).reshape(-1) for array in (first, inverse, counts))
    return [values, *integers]


def non_max_suppression(node: HostNode) -> list[Any]:
    """For each picture and class the best boxes, of which none overlaps a better one by more than the threshold."""
    boxes, scores = node.array(0).astype(np.float64), node.array(1)
    most, overlap = node.integer(2, 0), node.operand(3)
    limit = 0.0 if overlap is None else float(np.asarray(overlap).item())
    least = node.operand(4)
    corners = corners_of(boxes, centred=node.attributes.flag("center_point_box"))
    rows: list[tuple[int, int, int]] = []
    for picture, kind in np.ndindex(*scores.shape[:2]):
        ranked = np.argsort(-scores[picture, kind], kind="stable")
        if least is not None:
            ranked = ranked[scores[picture, kind][ranked] > np.asarray(least).item()]
        taken: list[int] = []
        for box in ranked:
            if len(taken) >= most:
                break
            if all(shared_part(corners[picture, box], corners[picture, better]) <= limit for better in taken):
                taken.append(int(box))
        rows += [(picture, kind, box) for box in taken]
    return [np.array(rows, np.int64).reshape(-1, 3)]


def corners_of(boxes: np.ndarray, *, centred: bool) -> np.ndarray:
    """Boxes as (top, left, bottom, right), from any two opposite corners, or from centre, width and height."""
    if centred:
        x, y, width, height = np.moveaxis(boxes, -1, 0)
        return np.stack([y - height / 2, x - width / 2, y + height / 2, x + width / 2], -1)
    first, second = boxes[..., :2], boxes[..., 2:]
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], -1)


def shared_part(one: np.ndarray, other: np.ndarray) -> float:
    """The intersection of two boxes over their union."""
    sides = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    shared = float(np.prod(np.maximum(sides, 0)))
    whole = float(np.prod(one[2:] - one[:2]) + np.prod(other[2:] - other[:2])) - shared
    return shared / whole if whole > 0 else 0.0


HOST_OPS: Mapping[str, HostOp] = {
    "Compress": HostOp(compress),
    "ConcatFromSequence": HostOp(concat_from_sequence),
    "Constant": HostOp(text_constant),
    "Identity": HostOp(identity),
    "NonMaxSuppression": HostOp(non_max_suppression),
    "NonZero": HostOp(nonzero),
    "Optional": HostOp(optional),
    "OptionalGetElement": HostOp(identity),
    "OptionalHasElement": HostOp(optional_has_element),
    "SequenceAt": HostOp(sequence_at),
    "SequenceConstruct": HostOp(sequence_construct),
    "SequenceEmpty": HostOp(sequence_empty),
    "SequenceErase": HostOp(sequence_erase),
    "SequenceInsert": HostOp(sequence_insert),
    "SequenceLength": HostOp(sequence_length),
    "SplitToSequence": HostOp(split_to_sequence),
    "Unique": HostOp(unique),
}
