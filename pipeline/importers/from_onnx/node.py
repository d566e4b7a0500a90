"""One ONNX node as the family files see it: operands, constants and attributes in; IR ops out.

A NameScope maps names to vids. A stored value is added to the graph when an op first reads it, so a stored value that
only gives a shape or a bound is not in the graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from passes.provenance.annotations import module_of
from pipeline.errors import InternalError, SourceError, Unsupported
from pipeline.importers.from_onnx.replacements import PendingNode
from pipeline.importers.from_onnx.resolve import Resolved
from pipeline.importers.from_onnx.source import Attributes, schema_of
from pipeline.ir.builder import Builder
from pipeline.ir.graph import ArrayPayload, Attr, TensorSpec, TorchConst
from pipeline.ops.aten import call_attrs, is_call


class NameScope:
    """Names → vids, over one Builder."""

    def __init__(self, builder: Builder, resolved: Resolved, labels: Mapping[str, str], taken: set[str]) -> None:
        self.resolved = resolved
        self._builder = builder
        self._labels = labels
        """{value: its name in the graph}, where a graph output is an Identity of the value."""
        self._taken = taken
        self.counted: dict[tuple[int, int], int] = {}
        """(places that may be negative, size of their axis) → the places counted from the front."""
        self._vids: dict[str, int] = {}
        self._names: list[str] = []

    def input(self, name: str) -> None:
        self._declare(name, self._builder.input(name, self.resolved.specs[name]), name)

    def name_value(self, name: str, vid: int) -> None:
        """Let `name` mean the value `vid`."""
        self._vids[name] = vid

    def vid(self, name: str) -> int:
        """The vid of the value that `name` means; a param or const is added to the graph here.

        Raises:
            InternalError: no importer has bound the name.
        """
        name = self.resolved.root(name)
        if name in self._vids:
            return self._vids[name]
        if name in self.resolved.stored:
            item = self.resolved.stored[name]
            add = self._builder.param if item.trainable else self._builder.const
            return self._declare(name, add(name, item.spec, item.payload), name)
        if name in self.resolved.constants:
            return self.constant(name, self.resolved.constants[name])
        raise InternalError(f"{name!r} is read, but the node that makes it was not imported")

    def knows(self, name: str) -> bool:
        """Whether `name` means a value so far."""
        name = self.resolved.root(name)
        if not name or name in self.resolved.sequences:
            return True
        return name in self._vids or name in self.resolved.stored or name in self.resolved.constants

    def stand_in(self, names: Iterable[str]) -> None:
        """Let the outputs of a node that was refused mean values without data, so that later nodes can be tried."""
        for name in names:
            if name and name not in self._vids and name in self.resolved.specs:
                self._declare(name, self._builder.const(name, self.resolved.specs[name]), name)

    def constant(self, name: str, array: np.ndarray) -> int:
        """Add a const that the importer made."""
        spec = TensorSpec(array.shape, array.dtype.name)
        return self._declare(name, self._builder.const(name, spec, ArrayPayload(array)), name)

    def emit(
        self,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[tuple[str, TensorSpec]],
        attrs: Mapping[str, Attr],
        *,
        name: str = "",
        node_type: str = "",
        origin: str = "",
    ) -> tuple[int, ...]:
        """Add an op. An output whose name is a value of the model is bound to it.

        Args:
            name, node_type, origin: the fields of Op with these names.
        """
        if is_call(kind):
            attrs = call_attrs(kind, len(inputs), attrs)
        labelled = [(self._labels.get(label, label), spec) for label, spec in outputs]
        try:
            made = self._builder.emit(kind, inputs, labelled, attrs, name=name, node_type=node_type, origin=origin)
        except InternalError as error:  # a rule of the kind that ONNX's inference does not check
            first = name or outputs[0][0]
            raise SourceError(f"node {first!r} cannot be a {error}; check its inputs and attributes") from error
        for (label, _), (written, _), vid in zip(outputs, labelled, made, strict=True):
            self._declare(label, vid, written)
        return made

    def spec(self, vid: int) -> TensorSpec:
        return self._builder.spec(vid)

    def name(self, vid: int) -> str:
        """The name of a value in the graph."""
        return self._names[vid]

    def fresh(self, base: str) -> str:
        """A name that no value of the model or of the graph has."""
        name, count = base, 0
        while name in self._taken:
            name, count = f"{base}.{count}", count + 1
        self._taken.add(name)
        return name

    def _declare(self, name: str, vid: int, written: str) -> int:
        if vid != len(self._names):
            raise InternalError(f"value {written!r} has vid {vid}, expected {len(self._names)}")
        self._vids[name] = vid
        self._names.append(written)
        self._taken.update((name, written))
        return vid


class Node:
    """A node and the scope that its ops go to.

    `input_names` and `output_names` end at the last nonempty name; one left out before it is "". `read` are the
    names that some node or the graph reads.
    """

    def __init__(self, node: PendingNode, scope: NameScope, read: Collection[str]) -> None:
        proto, opset = node.proto, node.opset
        self.kind = node.key
        self.name = proto.name
        self.opset = opset
        self.attributes = Attributes(proto)
        self.input_names = drop_trailing_empty(proto.input)
        specs, sequences = scope.resolved.specs, scope.resolved.sequences
        # An output that nothing reads may have no shape; it counts as left out.
        self.output_names = drop_trailing_empty(
            [name if name in read or name in specs or name in sequences else "" for name in proto.output]
        )
        self.scope = scope
        self._read = read
        self._read_inputs: set[int] = set()
        """Indices of the inputs that were read."""
        self._schema = schema_of(proto.op_type, proto.domain, opset)
        self._origin = module_of(proto)

    @property
    def label(self) -> str:
        """How messages name the node."""
        return self.name or next(filter(None, self.output_names), "")

    def has(self, index: int) -> bool:
        """Whether the optional input `index` is given."""
        return index < len(self.input_names) and self.input_names[index] != ""

    def settle_inputs(self, *indices: int) -> None:
        """Mark inputs as read: static shapes say the same, or they have no effect on the result."""
        self._read_inputs.update(indices)

    def settle_by_shape(self, *attributes: str) -> None:
        """Mark these attributes and input 1 as read: they only give sizes, and all shapes are known."""
        self.attributes.settle(*attributes)
        self.settle_inputs(1)

    def refuse_leftovers(self) -> None:
        """Refuse whatever the importer of this node has not read, so that nothing in a node is ignored.

        Raises:
            Unsupported: an unread attribute without its default, an unread input, or a read output that is not made.
        """
        if unread := self.attributes.unread(self._schema):
            raise self.refusal(f"its attribute {unread[0]!r} is not handled")
        if left := [
            index for index in range(len(self.input_names)) if self.has(index) and index not in self._read_inputs
        ]:
            raise self.refusal(f"its input {left[0]}, {self.input_names[left[0]]!r}, is not handled")
        for name in self.output_names:
            if name in self._read and not self.scope.knows(name):
                raise self.refusal(f"its output {name!r} is read, and it is not made")

    def operand(self, index: int) -> int:
        """The vid of input `index`.

        Raises:
            Unsupported: it is left out.
        """
        if not self.has(index):
            raise self.refusal(f"it has no input {index}, which it needs")
        self._read_inputs.add(index)
        return self.scope.vid(self.input_names[index])

    def operands(self, *indices: int) -> list[int]:
        """The vids of the inputs that are given: all, or those at `indices`."""
        return [self.operand(index) for index in (indices or range(len(self.input_names))) if self.has(index)]

    def spec_of(self, name: str) -> TensorSpec:
        """Shape and dtype of the value called `name`."""
        return self.scope.resolved.specs[name]

    def element(self, index: int) -> str:
        """The type of input `index` as the model has it, where the graph holds it in a wider one."""
        name = self.input_names[index] if self.has(index) else ""
        return self.scope.resolved.narrow.get(self.scope.resolved.root(name), "")

    def spec(self, index: int) -> TensorSpec:
        """Shape and dtype of input `index`."""
        self._read_inputs.add(index)
        return self.scope.resolved.specs[self.input_names[index]]

    def output(self, index: int = 0) -> TensorSpec:
        """Shape and dtype of output `index`."""
        return self.scope.resolved.specs[self.output_names[index]]

    def constant(self, index: int) -> np.ndarray | None:
        """The elements of input `index`; None if it is left out, or known only at run time."""
        self._read_inputs.add(index)
        return self.scope.resolved.constant(self.input_names[index]) if self.has(index) else None

    def need_constant(self, index: int, what: str) -> np.ndarray:
        """The elements of input `index`; `what` describes the input in the error.

        Raises:
            Unsupported: the elements are known only at run time.
        """
        array = self.constant(index)
        if array is None:
            name = self.input_names[index] if self.has(index) else "nothing"
            raise self.refusal(f"{what} is {name!r}, which is not a constant")
        return array

    def integers(self, index: int, name: str) -> tuple[int, ...] | None:
        """A list that newer opsets give as input `index` and older ones as the attribute `name`; None if absent."""
        if self.has(index):
            return tuple(int(item) for item in self.need_constant(index, name).reshape(-1))
        return self.attributes.integers(name)

    def check_length(self, name: str, entries: Sized, expected: int) -> None:
        """Refuse a list that does not fit the rank, or the length of another list.

        Raises:
            SourceError: the length is wrong; the message names the node and the list.
        """
        if len(entries) != expected:
            raise SourceError(
                f"node {self.label!r} ({self.kind}): {name} has {len(entries)} entries, "
                f"expected {expected}; check the model with onnx.checker.check_model(…, full_check=True)"
            )

    def axis(self, default: int, of: int = 0) -> int:
        """The attribute `axis`, counted from the front of input `of`."""
        return self.attributes.integer("axis", default) % max(self.spec(of).rank, 1)

    def emit(self, kind: str, inputs: Sequence[int], attrs: Mapping[str, Attr] | None = None) -> None:
        """Add the op that makes every output of this node."""
        specs = self.scope.resolved.specs
        last = self.output_names[-1]
        outputs = [(name or self.fresh(f"{last}.{place}"), specs[name]) for place, name in enumerate(self.output_names)]
        self.make(kind, inputs, outputs, attrs)

    def emit_first(self, kind: str, inputs: Sequence[int], attrs: Mapping[str, Attr] | None = None) -> None:
        """Add the op that makes output 0.

        Raises:
            Unsupported: something reads a later output.
        """
        for name in self.output_names[1:]:
            if name in self._read:
                raise self.refusal(f"its output {name!r} is read, and only the first one is made")
        self.make(kind, inputs, [(self.output_names[0], self.output())], attrs)

    def step(self, kind: str, inputs: Sequence[int], spec: TensorSpec, attrs: Mapping[str, Attr] | None = None) -> int:
        """Add an intermediate op, and return the vid of its output."""
        name = kind.split(".")[1] if is_call(kind) else kind
        return self.make(kind, inputs, [(self.fresh(f"{self.output_names[0]}.{name}"), spec)], attrs)[0]

    def convert(self, vid: int, dtype: str) -> int:
        """The value `vid` in another dtype; itself where it has this one."""
        spec = self.vid_spec(vid)
        if spec.dtype == dtype:
            return vid
        return self.step(CONVERSION, [vid], TensorSpec(spec.shape, dtype), {"dtype": TorchConst("dtype", dtype)})

    def emit_conversion(self, vid: int, *, saturates: bool = True) -> None:
        """Add the op that makes output 0 of `vid`, in the output's dtype.

        Args:
            saturates: a value that a float8 type cannot hold becomes the largest value of the type, as ONNX asks by
                default.
        """
        dtype = self.output().dtype
        if dtype.startswith("float8"):
            self.emit("onnxline.cast_float8.default", [vid], {"to": dtype, "saturate": saturates})
        else:
            self.emit(CONVERSION, [vid], {"dtype": TorchConst("dtype", dtype)})

    def emit_clamp(self, vid: int, low: float, high: float) -> None:
        """Add the op that makes output 0 of `vid`, limited to `low` and `high`; torch refuses a limit out of range."""
        if limits := self.limits(low, high):
            self.emit("aten.clamp.default", [vid], limits)
        else:
            self.alias(vid)

    def limits(self, low: float, high: float) -> dict[str, Attr]:
        """The limits, without those that no value of the output's dtype can reach: these limit nothing."""
        least, most = range_of(self.output().dtype)
        return {**({"min": low} if low >= least else {}), **({"max": high} if high <= most else {})}

    def make(
        self,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[tuple[str, TensorSpec]],
        attrs: Mapping[str, Attr] | None = None,
    ) -> tuple[int, ...]:
        """Add an op with the given outputs (name, spec), and return their vids."""
        return self.scope.emit(kind, inputs, outputs, attrs or {}, **self._source(kind))

    def _source(self, kind: str) -> dict[str, str]:
        """The fields of an op that describe this node: name, type, origin."""
        return {"name": self.name, "node_type": "" if kind == self.kind else self.kind, "origin": self._origin}

    def constant_operand(self, array: np.ndarray) -> int:
        """The vid of a new const that holds `array`."""
        return self.scope.constant(self.fresh(f"{self.output_names[0]}.value"), array)

    def alias(self, vid: int) -> None:
        """Output 0 is the value `vid`; no op is added."""
        self.scope.name_value(self.output_names[0], vid)

    def vid_spec(self, vid: int) -> TensorSpec:
        return self.scope.spec(vid)

    def fresh(self, base: str) -> str:
        return self.scope.fresh(base)

    def is_read(self, index: int) -> bool:
        """Whether something reads output `index`."""
        return index < len(self.output_names) and self.output_names[index] in self._read

    def refusal(self, why: str) -> Unsupported:
        """The error to raise when this case of a known kind cannot be imported."""
        place = f" in {self._origin}" if self._origin else ""
        return Unsupported(
            f"node {self.label!r} ({self.kind}){place}: {why}; "
            "rewrite the node, or extend its function in pipeline/importers/from_onnx"
        )


Importer = Callable[..., None]
"""An entry of a family file for an op type: a function of the node, which adds the ops that make the node's outputs.
Its keyword parameters are attributes of the node, by their names, types and defaults in ONNX."""


def import_by(importer: Importer, node: Node) -> None:
    """Call the importer of a node with the attributes that it asks for."""
    importer(node, **{name: read_attribute(node, name, default) for name, default in _attributes_of(importer).items()})


@cache
def _attributes_of(importer: Importer) -> Mapping[str, Any]:
    parameters = inspect.signature(importer).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def read_attribute(node: Node, name: str, default: Any) -> Any:
    """An attribute of the type of its default."""
    return READERS[type(default)](node.attributes, name, default)


READERS: Mapping[type, Callable[[Attributes, str, Any], Any]] = {
    bool: Attributes.flag,
    int: Attributes.integer,
    float: Attributes.number,
    str: Attributes.text,
}


def call(operator: str) -> Importer:
    """An importer for a call of torch's `operator` on the node's inputs."""
    return lambda node: node.emit(operator, node.operands())


def range_of(dtype: str) -> tuple[float, float]:
    """The least and the largest number of a dtype."""
    if "int" in dtype:
        info = np.iinfo(dtype)
        return int(info.min), int(info.max)
    limits = ml_dtypes.finfo(getattr(ml_dtypes, dtype, dtype))
    return float(limits.min), float(limits.max)


def drop_trailing_empty(names: Sequence[str]) -> tuple[str, ...]:
    """`names` up to the last one that is not empty."""
    end = next((index for index in range(len(names), 0, -1) if names[index - 1]), 0)
    return tuple(names[:end])


CONVERSION = "aten._to_copy.default"
