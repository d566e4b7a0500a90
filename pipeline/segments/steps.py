"""The two kinds of steps: a plan, and one node that no plan can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from pipeline.errors import SourceError
from pipeline.importers.from_onnx.model import PlanSegment
from pipeline.importers.from_onnx.replacements import PendingNode
from pipeline.importers.from_onnx.source import Stored
from pipeline.ops import Kind
from pipeline.runtime import compile_graph
from pipeline.runtime.onnx_op import ForeignNode, type_of
from pipeline.runtime.tensors import to_numpy
from pipeline.segments.control import BODIES, MakeStage
from pipeline.segments.host_ops import HOST_OPS, HostNode

Values = MutableMapping[str, Any]


class PlanStep:
    """Runs a plan, and names the constants that its nodes make."""

    def __init__(self, segment: PlanSegment, *, native: bool = False) -> None:
        self._constants = segment.constants
        self._program = compile_graph(segment.graph, native=native) if segment.graph.outputs else None
        self._fallbacks = [str(op.attrs["op"]) for op in segment.graph.ops if op.kind == Kind.OnnxNode.name]
        self.calls = len(segment.graph.ops)
        self.native_calls = 0 if self._program is None else self._program.native_calls

    def run(self, values: Values) -> None:
        values.update(self._constants)
        if self._program is not None:
            feed = {entry.name: values[entry.name] for entry in self._program.feed_signature}
            made = self._program.run(feed)
            values.update({name: to_numpy(tensor) for name, tensor in made.items()})

    def stages(self) -> Iterator[Any]:
        return iter(())

    def fallbacks(self) -> Iterator[str]:
        return iter(self._fallbacks)


class HostStep:
    """Runs one node: a loop over a body, an operation of our own on values of any kind, or another runtime."""

    calls = 1
    native_calls = 0

    def __init__(
        self, node: PendingNode, stored: Mapping[str, Stored], values: Mapping[str, Any], make_stage: MakeStage
    ) -> None:
        self._node, self._stored = node, stored
        self._bodies = BODIES[node.key](node, stored, make_stage) if node.key in BODIES else None
        operation = HOST_OPS.get(node.key)
        self._operation = operation if operation and operation.takes(HostNode(node, self._inputs(values))) else None
        self._foreign: ForeignNode | None = None

    def run(self, values: Values) -> None:
        inputs = self._inputs(values)
        if self._bodies is not None:
            outputs = self._bodies.run(inputs, values)
        elif self._operation is not None:
            outputs = self._operation.compute(HostNode(self._node, inputs))
        else:
            outputs = self._by_another_runtime(inputs)
        proto = self._node.proto
        values.update({name: value for name, value in zip(proto.output, outputs, strict=False) if name})

    def stages(self) -> Iterator[Any]:
        return iter(()) if self._bodies is None else iter(self._bodies.stages())

    def fallbacks(self) -> Iterator[str]:
        return iter(() if self._bodies or self._operation else (self._node.key,))

    def _inputs(self, values: Mapping[str, Any]) -> list[Any]:
        return [self._value(name, values) if name else None for name in self._node.proto.input]

    def _value(self, name: str, values: Mapping[str, Any]) -> Any:
        return values[name] if name in values else stored_value(self._stored, name)

    def _by_another_runtime(self, inputs: list[Any]) -> list[Any]:
        # The types may change between runs: an optional may have a value or none.
        proto, given = self._node.proto, [bool(name) for name in self._node.proto.input]
        types = [type_of(value) if there else None for value, there in zip(inputs, given, strict=True)]
        if self._foreign is None or types != self._foreign.types:
            self._foreign = ForeignNode(proto, dict(self._node.opsets), types, outputs=len(proto.output))
        return self._foreign.run(inputs)


def stored_value(stored: Mapping[str, Stored], name: str) -> np.ndarray:
    """The numbers of an initializer.

    Raises:
        SourceError: nothing makes the value, or the file has no numbers for it.
    """
    if name not in stored or (payload := stored[name].payload) is None:
        raise SourceError(f"the value {name!r} is read, and nothing makes it; check the model")
    return payload.numpy()
