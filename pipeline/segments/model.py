"""An ONNX model that runs on whatever it is fed: arrays of any shape, sequences, optionals, strings.

The model, and each body of a loop, is a remainder: nodes that run in steps. A step is a plan for some nodes, or one
node that no plan can hold. It is made at the first run, for the types and shapes of what the remainder reads, and for
the values that decide shapes (the input 1 of a Reshape) or branches (the condition of an If). A later run with the same
types, shapes and deciding values takes the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.errors import SourceError
from pipeline.importers.from_onnx.model import NodeList, StaticPart, import_static_part
from pipeline.importers.from_onnx.replacements import PendingNode, pending_nodes
from pipeline.importers.from_onnx.source import Stored, is_ir_type, read_initializers, read_source
from pipeline.ops import Kind
from pipeline.runtime import compile_graph
from pipeline.runtime.kernels.fallback import ForeignNode, type_of
from pipeline.runtime.tensors import to_numpy
from pipeline.segments.host_ops import BODIES, HOST_OPS, BodyNodes, FallbackCount, HostNode, MakeRemainder

Values = MutableMapping[str, Any]
"""By name: arrays, lists of arrays for sequences, None for an optional without a value."""


class PlanStep:
    """Runs a plan, and names the constants that its nodes make."""

    def __init__(self, part: StaticPart, options: Mapping[str, Any]) -> None:
        self._constants = part.constants
        self._program = compile_graph(part.graph, **options) if part.graph.outputs else None
        self._fallbacks = [str(op.attrs["op"]) for op in part.graph.ops if op.kind == Kind.OnnxNode.name]
        self.calls = len(part.graph.ops)
        self.native_calls = 0 if self._program is None else self._program.native_calls

    def run(self, values: Values) -> None:
        values.update(self._constants)
        if self._program is not None:
            feed = {entry.name: values[entry.name] for entry in self._program.feed_signature}
            made = self._program.run(feed)
            values.update({name: to_numpy(tensor) for name, tensor in made.items()})

    def remainders(self) -> Iterator[BodyNodes]:
        return iter(())

    def fallbacks(self) -> Iterator[str]:
        return iter(self._fallbacks)


class HostStep:
    """Runs one node: a loop over a body, an operation of our own on values of any kind, or another runtime."""

    calls = 1
    native_calls = 0

    def __init__(self, node: PendingNode, stored: Mapping[str, Stored], make_remainder: MakeRemainder) -> None:
        self._node, self._stored = node, stored
        self._loop = BODIES[node.key](node, stored, make_remainder) if node.key in BODIES else None
        self._operation = HOST_OPS.get(node.key)
        self._foreign: ForeignNode | None = None

    def run(self, values: Values) -> None:
        inputs = self._inputs(values)
        if self._loop is not None:
            outputs = self._loop.run(inputs, values)
        elif self._operation is not None:
            outputs = self._operation(HostNode(self._node, inputs))
        else:
            outputs = self._run_elsewhere(inputs)
        proto = self._node.proto
        values.update({name: value for name, value in zip(proto.output, outputs, strict=False) if name})

    def remainders(self) -> Iterator[BodyNodes]:
        return iter(() if self._loop is None else (self._loop.remainder,))

    def fallbacks(self) -> Iterator[str]:
        return iter(() if self._loop or self._operation else (self._node.key,))

    def _inputs(self, values: Mapping[str, Any]) -> list[Any]:
        return [self._value(name, values) if name else None for name in self._node.proto.input]

    def _value(self, name: str, values: Mapping[str, Any]) -> Any:
        return values[name] if name in values else stored_value(self._stored, name)

    def _run_elsewhere(self, inputs: list[Any]) -> list[Any]:
        # The types may change between runs: an optional may have a value or none.
        proto, given = self._node.proto, [bool(name) for name in self._node.proto.input]
        types = [type_of(value) if there else None for value, there in zip(inputs, given, strict=True)]
        if self._foreign is None or types != self._foreign.types:
            self._foreign = ForeignNode(proto, dict(self._node.opsets), types, outputs=len(proto.output))
        return self._foreign.run(inputs)


def stored_value(stored: Mapping[str, Stored], name: str) -> np.ndarray:
    """The elements of an initializer.

    Raises:
        SourceError: nothing makes the value, or the file has no elements for it.
    """
    if name not in stored or (payload := stored[name].payload) is None:
        raise SourceError(f"the value {name!r} is read, and nothing makes it; check the model")
    return payload.numpy()


MOST_VARIANTS = 16
"""Steps of one remainder that are kept, the latest; a model that needs more makes some again."""


class RemainderStep(Protocol):
    """What is run for the first nodes of a remainder."""

    @property
    def calls(self) -> int: ...

    @property
    def native_calls(self) -> int: ...

    def run(self, values: Values) -> None: ...

    def remainders(self) -> Iterator[BodyNodes]: ...

    def fallbacks(self) -> Iterator[str]: ...


@dataclass(frozen=True, slots=True)
class Variant:
    """A step for one feed, and the remainder after it."""

    signature: tuple[object, ...]
    fixed: Mapping[str, np.ndarray]
    step: RemainderStep
    following: Remainder | None

    def fits(self, signature: tuple[object, ...], values: Values) -> bool:
        if signature != self.signature:
            return False
        return all(np.array_equal(array, np.asarray(values[name])) for name, array in self.fixed.items())


@dataclass(slots=True)
class Remainder:
    """Nodes that are left; `variants` grows as runs bring other shapes."""

    part: NodeList
    variants: list[Variant] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of `compile_graph`."""
    _reads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reads = self.part.reads()

    def run(self, values: Values) -> None:
        """Run all nodes, and put what they make among `values`."""
        remainder: Remainder | None = self
        while remainder is not None and remainder.part.nodes:
            variant = remainder.variant_for(values)
            variant.step.run(values)
            remainder = variant.following
        for name in self.part.outputs:
            if name not in values:
                values[name] = stored_value(self.part.stored, name)

    def variant_for(self, values: Values) -> Variant:
        signature = tuple(_describe_type(values[name]) if name in values else None for name in self._reads)
        for variant in self.variants:
            if variant.fits(signature, values):
                return variant
        variant = self._make(signature, values)
        del self.variants[: max(len(self.variants) - MOST_VARIANTS + 1, 0)]
        self.variants.append(variant)
        return variant

    def count(self) -> FallbackCount:
        """What the steps that are kept hold, in this remainder, in those after it, and in bodies."""
        steps, calls, native, names = 0, 0, 0, []
        for variant in self.variants:
            inner = [item.count() for item in filter(None, (*variant.step.remainders(), variant.following))]
            steps += 1 + sum(count.steps for count in inner)
            calls += variant.step.calls + sum(count.calls for count in inner)
            native += variant.step.native_calls + sum(count.native_calls for count in inner)
            names += [*variant.step.fallbacks(), *(name for count in inner for name in count.fallbacks)]
        return FallbackCount(steps, calls, tuple(names), native)

    def _make(self, signature: tuple[object, ...], values: Values) -> Variant:
        """The first step: as many nodes as one plan can hold, or one node."""
        read = {name: values[name] for name in self._reads if name in values}
        first = import_static_part(self.part, read)
        rest = list(first.rest)
        if first.begins:
            step: RemainderStep = PlanStep(first, self.options)
        else:
            step = HostStep(rest.pop(0), self.part.stored, partial(Remainder, options=self.options))
        following = Remainder(self.part.after(rest), options=self.options) if rest else None
        return Variant(signature, first.fixed, step, following)


def _describe_type(value: Any) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape)
    return (type(value), tuple(map(_describe_type, value))) if isinstance(value, list) else type(value)


class SegmentedModel:
    """Runs a model in segments, which are made at the first run for a feed of some shapes, and kept.

    Args:
        model: a model or the path of its file.
        base_dir: the folder of the data files of a ModelProto; a path brings its own.
        options: arguments of `compile_graph`, for each plan.

    Raises:
        SourceError: the model cannot be read, is not valid, or its data files are outside its folder or cut short.
        Unsupported: sparse initializers.
    """

    def __init__(
        self, model: onnx.ModelProto | str | Path, *, base_dir: str | Path | None = None, **options: Any
    ) -> None:
        source = read_source(model, base_dir)
        graph = source.model.graph
        self._stored = read_initializers(graph, source.folder, takes_all=True)
        self._odd = read_odd_initializers(graph)
        self.inputs = tuple(value.name for value in graph.input if value.name not in {*self._stored, *self._odd})
        self.outputs = tuple(value.name for value in graph.output)
        nodes = pending_nodes(graph.node, source.model.opset_import)
        self._remainder = Remainder(NodeList(graph.name or "graph", nodes, self.outputs, self._stored), options=options)

    def run(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model.

        Args:
            feed: input → an array, a list of arrays for a sequence, or None for an optional without a value.

        Returns:
            Output → its value, in the same forms.

        Raises:
            Unsupported: an operator that neither a plan nor another runtime has.
            UsageError: the feed does not suit the model.
        """
        values = {**self._odd, **{name: _to_arrays(value) for name, value in feed.items()}}
        self._remainder.run(values)
        return {name: values[name] for name in self.outputs}

    def count(self) -> FallbackCount:
        """How many calls the kept segments have, and which operators among them another runtime computes."""
        return self._remainder.count()


def read_odd_initializers(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Initializers of types that the IR does not have, such as strings and four-bit integers."""
    return {
        tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if not is_ir_type(tensor.data_type)
    }


def _to_arrays(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_to_arrays(item) for item in value]
    return None if value is None else np.asarray(value)
