"""Loop and Scan: each body is a remainder of its own, whose plans serve all iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx

from pipeline.importers.from_onnx.attributes import Attributes
from pipeline.importers.from_onnx.model import NodeList
from pipeline.importers.from_onnx.replacements import PendingNode
from pipeline.importers.from_onnx.source import Stored, read_initializers


class BodyNodes(Protocol):
    """A remainder, as a loop sees it."""

    def run(self, values: MutableMapping[str, Any]) -> None: ...


MakeRemainder = Callable[[NodeList], BodyNodes]


class Body:
    """A subgraph that is run many times, with what its own inputs mean, and all that is known around it."""

    def __init__(
        self, graph: onnx.GraphProto, node: PendingNode, stored: Mapping[str, Stored], make_remainder: MakeRemainder
    ) -> None:
        own = read_initializers(graph, None)
        self.inputs = [value.name for value in graph.input if value.name not in own]
        self.outputs = [value.name for value in graph.output]
        self.input_types = {value.name: value.type for value in graph.input}
        self.output_types = [value.type for value in graph.output]
        nodes = [node.with_proto(proto) for proto in graph.node]
        self.remainder = make_remainder(NodeList(graph.name or "body", nodes, self.outputs, {**stored, **own}))

    def run(self, inputs: Sequence[Any], around: Mapping[str, Any]) -> list[Any]:
        values = {**around, **dict(zip(self.inputs, inputs, strict=False))}
        self.remainder.run(values)
        return [values[name] for name in self.outputs]


class LoopNode:
    """ONNX's Loop: runs the body until the count or the condition says stop; stacks what each iteration adds."""

    def __init__(self, node: PendingNode, stored: Mapping[str, Stored], make_remainder: MakeRemainder) -> None:
        graph = next(attribute.g for attribute in node.proto.attribute if attribute.name == "body")
        self._body = Body(graph, node, stored, make_remainder)
        self._states = len(node.proto.input) - 2

    def remainders(self) -> Iterator[BodyNodes]:
        yield self._body.remainder

    def run(self, inputs: Sequence[Any], around: Mapping[str, Any]) -> list[Any]:
        most, condition, *states = inputs
        limit = None if most is None else int(np.asarray(most).item())
        goes_on = True if condition is None else bool(np.asarray(condition).item())
        rows: list[list[np.ndarray]] = [[] for _ in self._body.outputs[1 + self._states :]]
        count = 0
        while goes_on and (limit is None or count < limit):
            goes_on_again, *made = self._body.run([np.array(count, np.int64), np.array(goes_on), *states], around)
            states = made[: self._states]
            for row, value in zip(rows, made[self._states :], strict=True):
                row.append(np.asarray(value))
            goes_on, count = bool(np.asarray(goes_on_again).item()), count + 1
        types = self._body.output_types[1 + self._states :]
        return [*states, *(stack(row, kind, 0) for row, kind in zip(rows, types, strict=True))]


class ScanNode:
    """ONNX's Scan: the body reads one slice of each sequence at a time."""

    def __init__(self, node: PendingNode, stored: Mapping[str, Stored], make_remainder: MakeRemainder) -> None:
        graph = next(attribute.g for attribute in node.proto.attribute if attribute.name == "body")
        read = Attributes(node.proto)
        self._body = Body(graph, node, stored, make_remainder)
        self._batched = node.opset < 9
        self._scans = read.integer("num_scan_inputs")
        self._states = len(self._body.inputs) - self._scans
        outs = len(self._body.outputs) - self._states
        self._in_axes = read.integers("scan_input_axes") or (0,) * self._scans
        self._out_axes = read.integers("scan_output_axes") or (0,) * outs
        directions = "directions" if self._batched else "scan_input_directions"
        self._in_back = read.integers(directions) or (0,) * self._scans
        self._out_back = read.integers("scan_output_directions") or (0,) * outs

    def remainders(self) -> Iterator[BodyNodes]:
        yield self._body.remainder

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
            np.stack([value if place < self._states else lengthen(value, size[0]) for value in column])
            for place, (column, size) in enumerate(zip(zip(*rows, strict=True), longest, strict=True))
        ]

    def _scan(self, inputs: Sequence[Any], around: Mapping[str, Any], length: int | None) -> list[Any]:
        states, sequences = list(inputs[: self._states]), inputs[self._states :]
        slices = [np.moveaxis(each, axis, 0) for each, axis in zip(sequences, self._in_axes, strict=True)]
        count = len(slices[0]) if length is None else length
        rows: list[list[np.ndarray]] = [[] for _ in self._out_axes]
        for at in range(count):
            now = [each[count - 1 - at if back else at] for each, back in zip(slices, self._in_back, strict=True)]
            made = self._body.run([*states, *(np.array(part, order="C") for part in now)], around)
            states = made[: self._states]
            for row, value in zip(rows, made[self._states :], strict=True):
                row.append(np.asarray(value))
        types = self._body.output_types[self._states :]
        turned = [row[::-1] if back else row for row, back in zip(rows, self._out_back, strict=True)]
        return states + [stack(row, kind, axis) for row, kind, axis in zip(turned, types, self._out_axes, strict=True)]


class SequenceMapNode:
    """ONNX's SequenceMap: the body runs once for each item of a sequence, and gives an item of each result."""

    def __init__(self, node: PendingNode, stored: Mapping[str, Stored], make_remainder: MakeRemainder) -> None:
        graph = next(attribute.g for attribute in node.proto.attribute if attribute.name == "body")
        self._body = Body(graph, node, stored, make_remainder)

    def remainders(self) -> Iterator[BodyNodes]:
        yield self._body.remainder

    def run(self, inputs: Sequence[Any], around: Mapping[str, Any]) -> list[Any]:
        results: list[list[Any]] = [[] for _ in self._body.outputs]
        for at in range(len(inputs[0])):
            items = [value[at] if isinstance(value, list) else value for value in inputs]
            for result, item in zip(results, self._body.run(items, around), strict=True):
                result.append(item)
        return results


def stack(rows: Sequence[np.ndarray], kind: onnx.TypeProto, axis: int) -> np.ndarray:
    """The rows along a new axis; of none, an array without elements as the body declares it."""
    if rows:
        return np.stack(rows, axis)
    sizes = [dim.dim_value for dim in kind.tensor_type.shape.dim]
    sizes.insert(axis % (len(sizes) + 1), 0)
    return np.empty(sizes, onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))


def lengthen(rows: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])


BODIES: Mapping[str, Callable[[PendingNode, Mapping[str, Stored], MakeRemainder], Any]] = {
    "Loop": LoopNode,
    "Scan": ScanNode,
    "SequenceMap": SequenceMapNode,
}
