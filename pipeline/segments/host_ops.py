"""Operators that no plan can hold: on sequences and optionals, with result sizes that depend on elements, and loops.

The body of a Loop, a Scan or a SequenceMap is a remainder of its own, whose plans serve all iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx

from pipeline.importers.from_onnx.model import NodeList
from pipeline.importers.from_onnx.replacements import PendingNode
from pipeline.importers.from_onnx.source import Attributes, Stored, read_initializers


@dataclass(frozen=True, slots=True)
class HostNode:
    """A node with the values of its inputs; None stands for one that is left out, or for an empty optional."""

    node: PendingNode
    inputs: Sequence[Any]

    @property
    def attributes(self) -> Attributes:
        return Attributes(self.node.proto)

    def operand(self, index: int) -> Any:
        return self.inputs[index] if index < len(self.inputs) else None

    def array(self, index: int) -> np.ndarray:
        return np.asarray(self.inputs[index])

    def integer(self, index: int, default: int) -> int:
        value = self.operand(index)
        return default if value is None else int(np.asarray(value).item())


def text_constant(node: HostNode) -> list[Any]:
    found = {attribute.name: attribute for attribute in node.node.proto.attribute}
    if "value_string" in found:
        return [np.array(found["value_string"].s.decode(), object)]
    if "value_strings" in found:
        return [np.array([text.decode() for text in found["value_strings"].strings], object)]
    return [node.attributes.constant()]


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
        bounds = list(range(step, total, step))
    else:
        bounds = list(np.cumsum(sizes)[:-1])
    pieces = np.split(data, bounds, axis)
    if sizes is None and not node.attributes.flag("keepdims", True):
        pieces = [np.squeeze(piece, axis) for piece in pieces]
    return [pieces]


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
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        values = np.take(values, order, 0 if axis is None else axis)
        first, counts, inverse = first[order], counts[order], rank[inverse]
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


def shared_part(first: np.ndarray, second: np.ndarray) -> float:
    """The intersection of two boxes over their union."""
    sides = np.minimum(first[2:], second[2:]) - np.maximum(first[:2], second[:2])
    shared = float(np.prod(np.maximum(sides, 0)))
    whole = float(np.prod(first[2:] - first[:2]) + np.prod(second[2:] - second[:2])) - shared
    return shared / whole if whole > 0 else 0.0


HOST_OPS: Mapping[str, Callable[[HostNode], list[Any]]] = {
    "Compress": compress,
    "ConcatFromSequence": concat_from_sequence,
    "Constant": text_constant,
    "Identity": lambda node: [node.inputs[0]],
    "NonMaxSuppression": non_max_suppression,
    "NonZero": nonzero,
    "Optional": lambda node: [node.operand(0)],
    "OptionalGetElement": lambda node: [node.inputs[0]],
    "OptionalHasElement": lambda node: [np.array(node.operand(0) is not None)],
    "SequenceAt": lambda node: [node.inputs[0][node.integer(1, 0)]],
    "SequenceConstruct": lambda node: [list(node.inputs)],
    "SequenceEmpty": lambda _: [[]],
    "SequenceErase": sequence_erase,
    "SequenceInsert": sequence_insert,
    "SequenceLength": lambda node: [np.array(len(node.inputs[0]), np.int64)],
    "SplitToSequence": split_to_sequence,
    "Unique": unique,
}
"""The outputs of a node, by its operator."""


@dataclass(frozen=True, slots=True)
class FallbackCount:
    """How many steps and calls there are, and which operators another runtime computes, each as often as it occurs."""

    steps: int
    calls: int
    fallbacks: tuple[str, ...]
    native_calls: int = 0
    """The calls that kernels in C++ compute."""


class BodyNodes(Protocol):
    """A remainder, as a loop sees it."""

    def run(self, values: MutableMapping[str, Any]) -> None: ...

    def count(self) -> FallbackCount: ...


MakeRemainder = Callable[[NodeList], BodyNodes]


class BodyNode:
    """A node that runs its attribute `body` many times; with nothing else to know, ONNX's SequenceMap.

    `outputs` and `inputs` are the names of the body; what it reads in addition is all that is known around the node.
    """

    def __init__(self, node: PendingNode, stored: Mapping[str, Stored], make_remainder: MakeRemainder) -> None:
        graph = next(attribute.g for attribute in node.proto.attribute if attribute.name == "body")
        own = read_initializers(graph, None)
        self.inputs = [value.name for value in graph.input if value.name not in own]
        self.outputs = [value.name for value in graph.output]
        self.output_types = [value.type for value in graph.output]
        nodes = [node.with_proto(proto) for proto in graph.node]
        self.remainder = make_remainder(NodeList(graph.name or "body", nodes, self.outputs, {**stored, **own}))

    def run_body(self, inputs: Sequence[Any], around: Mapping[str, Any]) -> list[Any]:
        values = {**around, **dict(zip(self.inputs, inputs, strict=False))}
        self.remainder.run(values)
        return [values[name] for name in self.outputs]

    def run(self, inputs: Sequence[Any], around: Mapping[str, Any]) -> list[Any]:
        """The body runs once for each item of a sequence, and gives an item of each result."""
        results: list[list[Any]] = [[] for _ in self.outputs]
        for at in range(len(inputs[0])):
            items = [value[at] if isinstance(value, list) else value for value in inputs]
            for result, item in zip(results, self.run_body(items, around), strict=True):
                result.append(item)
        return results


class LoopNode(BodyNode):
    """ONNX's Loop: runs the body until the count or the condition says stop; stacks what each iteration adds."""

    def run(self, inputs: Sequence[Any], around: Mapping[str, Any]) -> list[Any]:
        most, condition, *states = inputs
        kept = len(states)
        limit = None if most is None else int(np.asarray(most).item())
        goes_on = True if condition is None else bool(np.asarray(condition).item())
        rows: list[list[np.ndarray]] = [[] for _ in self.outputs[1 + kept :]]
        count = 0
        while goes_on and (limit is None or count < limit):
            goes_on_again, *made = self.run_body([np.array(count, np.int64), np.array(goes_on), *states], around)
            states = made[:kept]
            for row, value in zip(rows, made[kept:], strict=True):
                row.append(np.asarray(value))
            goes_on, count = bool(np.asarray(goes_on_again).item()), count + 1
        types = self.output_types[1 + kept :]
        return [*states, *(stack(row, kind, 0) for row, kind in zip(rows, types, strict=True))]


class ScanNode(BodyNode):
    """ONNX's Scan: the body reads one slice of each sequence at a time."""

    def __init__(self, node: PendingNode, stored: Mapping[str, Stored], make_remainder: MakeRemainder) -> None:
        super().__init__(node, stored, make_remainder)
        read = Attributes(node.proto)
        self._batched = node.opset < 9
        self._scans = read.integer("num_scan_inputs")
        self._states = len(self.inputs) - self._scans
        outs = len(self.outputs) - self._states
        self._in_axes = read.integers("scan_input_axes") or (0,) * self._scans
        self._out_axes = read.integers("scan_output_axes") or (0,) * outs
        directions = "directions" if self._batched else "scan_input_directions"
        self._in_back = read.integers(directions) or (0,) * self._scans
        self._out_back = read.integers("scan_output_directions") or (0,) * outs

    def run(self, inputs: Sequence[Any], around: Mapping[str, Any]) -> list[Any]:
        if not self._batched:
            return self._scan(inputs, around, None)
        lengths, *rest = inputs  # before opset 9 axis 0 is a batch, each row of which has a length
        rows = []
        for row in range(rest[0].shape[0]):
            length = None if lengths is None else int(lengths[row])
            rows.append(self._scan([value[row] for value in rest], around, length))
        longest = [max(value.shape[:1] for value in column) for column in zip(*rows, strict=True)]
        return [
            np.stack([value if index < self._states else lengthen(value, size[0]) for value in column])
            for index, (column, size) in enumerate(zip(zip(*rows, strict=True), longest, strict=True))
        ]

    def _scan(self, inputs: Sequence[Any], around: Mapping[str, Any], length: int | None) -> list[Any]:
        states, sequences = list(inputs[: self._states]), inputs[self._states :]
        slices = [np.moveaxis(sequence, axis, 0) for sequence, axis in zip(sequences, self._in_axes, strict=True)]
        count = len(slices[0]) if length is None else length
        rows: list[list[np.ndarray]] = [[] for _ in self._out_axes]
        for at in range(count):
            now = [
                sequence[count - 1 - at if back else at] for sequence, back in zip(slices, self._in_back, strict=True)
            ]
            made = self.run_body([*states, *(np.array(part, order="C") for part in now)], around)
            states = made[: self._states]
            for row, value in zip(rows, made[self._states :], strict=True):
                row.append(np.asarray(value))
        types = self.output_types[self._states :]
        rows = [row[::-1] if back else row for row, back in zip(rows, self._out_back, strict=True)]
        return states + [stack(row, kind, axis) for row, kind, axis in zip(rows, types, self._out_axes, strict=True)]


def stack(rows: Sequence[np.ndarray], kind: onnx.TypeProto, axis: int) -> np.ndarray:
    """The rows along a new axis; of none, an array without elements as the body declares it."""
    if rows:
        return np.stack(rows, axis)
    sizes = [dim.dim_value for dim in kind.tensor_type.shape.dim]
    sizes.insert(axis % (len(sizes) + 1), 0)
    return np.empty(sizes, onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))


def lengthen(rows: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])


BODIES: Mapping[str, type[BodyNode]] = {"Loop": LoopNode, "Scan": ScanNode, "SequenceMap": BodyNode}
