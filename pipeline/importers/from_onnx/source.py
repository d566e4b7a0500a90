"""Read a model and its nodes. Functions are inlined, and initializers reference their bytes, which are never copied.

For a node: its attributes by type, its kind, its torch module. For an element type: its name in the IR.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from passes.errors import ModelError
from passes.graph.index import copy_of
from passes.graph.traversal import inline_functions, is_in_order, put_in_order, without_sparse
from passes.load import load_model
from passes.load.nodes import KINDS, VALUE_FIELD, describe_node
from passes.load.tensors import entry_of, file_in
from passes.suggest import is_named, nearest_names
from passes.weights.detached import inner_tensors
from passes.weights.mapped import ExternalFiles, FileMaps, FileRange
from passes.weights.stand_ins import inline
from pipeline.errors import SourceError, Unsupported, UsageError
from pipeline.ir.graph import DTYPE_BITS, ArrayPayload, Payload, TensorSpec


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model without local functions, and the folder of its external data."""

    model: onnx.ModelProto
    folder: Path | None


def read_source(model: onnx.ModelProto | str | Path, base_dir: str | Path | None) -> ReadModel:
    """Read `model` if it is a path; external data stays on disk, in `base_dir` or else in the folder of the path.

    Raises:
        SourceError: no such file, or a broken model.
    """
    folder = Path(base_dir) if base_dir is not None else None
    if not isinstance(model, onnx.ModelProto):
        if not isinstance(model, str | PathLike):
            found = type(model).__name__
            raise SourceError(f"found {found}, expected an onnx.ModelProto or the path of an ONNX file")
        path = Path(model)
        # The data file is in the folder of the model that a symbolic link points to.
        folder = folder or (path.resolve().parent if path.is_symlink() else path.parent)
        model = path
    try:
        model = without_sparse(inline_functions(_in_order(load_model(model, folder, may_be_empty=True))))
    except ModelError as mistake:
        raise SourceError(str(mistake)) from mistake
    if not model.opset_import:
        raise SourceError(f"the model {model.graph.name!r} imports no opset; is it a whole model?")
    return ReadModel(_with_inner_data(model, folder), folder)


def _in_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with sorted nodes and one name of ONNX's own domain; a copy where it has not."""
    if is_in_order(model):
        return model
    copy = copy_of(model)
    put_in_order(copy)
    return copy


def _with_inner_data(model: onnx.ModelProto, folder: Path | None) -> onnx.ModelProto:
    """`model` with the external data of Constants and of bodies of If, Loop and Scan inside of it.

    Raises:
        SourceError: it is missing, or outside of `folder`.
    """
    if all(tensor.data_location != TensorProto.EXTERNAL for tensor in inner_tensors(model)):
        return model
    whole, files = onnx.ModelProto(), ExternalFiles(folder)
    whole.CopyFrom(model)
    try:
        for tensor in inner_tensors(whole):
            if tensor.data_location == TensorProto.EXTERNAL:
                inline(tensor, files.bytes_of(tensor))
    except ModelError as mistake:
        raise SourceError(str(mistake)) from mistake
    return whole


@dataclass(slots=True)
class ProtoPayload:
    """A tensor inside the model. The array is a view of `raw_data`, made at the first call and kept.

    Protobuf returns new bytes at every access, so two readers would hold two copies without it.
    """

    proto: TensorProto
    _array: np.ndarray | None = field(default=None, init=False)

    def numpy(self) -> np.ndarray:
        if self._array is None:
            self._array = numpy_helper.to_array(self.proto)
        return self._array


@dataclass(frozen=True, slots=True)
class FilePayload:
    """A tensor in a data file of the model; pages load as they are read. `files` maps each file once for all."""

    place: FileRange
    shape: tuple[int, ...]
    dtype: np.dtype
    files: FileMaps = field(compare=False)

    def numpy(self) -> np.ndarray:
        return self.files.view(self.place).view(np.ndarray).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Stored:
    """One initializer. `payload` is None in a weight-free model."""

    name: str
    spec: TensorSpec
    payload: Payload | None
    trainable: bool
    narrow: str = ""
    """Its type in the model, if that is below a byte: then the payload has one element in each byte."""

    def constant(self) -> np.ndarray | None:
        """The elements, if they are known and may not change."""
        return None if self.trainable or self.payload is None else self.payload.numpy()


def read_initializers(
    graph: onnx.GraphProto, folder: Path | None, trainable: Collection[str] = (), *, takes_all: bool = False
) -> Mapping[str, Stored]:
    """The initializers of `graph` by name; those that an entry of `trainable` names or matches as a glob are params.

    With `takes_all` initializers of types that the IR does not have are left out, instead of refused.

    Raises:
        UsageError: an entry of `trainable` fits no initializer.
        SourceError: external data outside the model's folder, or too short.
        Unsupported: a dtype that the IR does not have.
    """
    names = [proto.name for proto in graph.initializer]
    for pattern in trainable:
        if any(is_named(name, pattern) for name in names):
            continue
        near = nearest_names(pattern, names, 3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {len(names)}, e.g. {names[:3]}"
        raise UsageError(f"trainable: found no initializer that {pattern!r} names or matches; {hint}")
    files, stored = DataFiles(folder and folder.resolve()), {}
    for proto in graph.initializer:
        name = proto.name
        if takes_all and not is_ir_type(proto.data_type):
            continue
        if (wide := wider_type(proto.data_type)) and proto.data_location != TensorProto.EXTERNAL:
            array = numpy_helper.to_array(proto)
            spec = TensorSpec(tuple(proto.dims), wide)
            stored[name] = Stored(name, spec, ArrayPayload(array.astype(wide)), False, array.dtype.name)
            continue
        spec = TensorSpec(tuple(proto.dims), ir_dtype(proto.data_type, f"initializer {name!r}"))
        learns = any(is_named(name, pattern) for pattern in trainable)
        stored[name] = Stored(name, spec, payload_of(proto, files), learns)
    return stored


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The data files in the folder of a model, each found once: a checkpoint has 70,000 tensors in 62 of them."""

    folder: Path | None
    """With no link in its path."""
    maps: FileMaps = field(default_factory=FileMaps)
    paths: dict[str, Path] = field(default_factory=dict)
    """By the location that tensors give."""


def payload_of(proto: TensorProto, files: DataFiles) -> Payload | None:
    """The payload of a tensor; None if the model has no data for it, or its data file is missing."""
    if proto.data_location == TensorProto.EXTERNAL:
        return external_payload(proto, files)
    typed = (proto.float_data, proto.int32_data, proto.int64_data, proto.double_data, proto.uint64_data)
    if math.prod(proto.dims) and not proto.HasField("raw_data") and not any(typed):
        return None
    return ProtoPayload(proto)


def external_payload(proto: TensorProto, files: DataFiles) -> FilePayload | None:
    """The payload of a tensor whose data is in a file; None if the file is missing.

    Raises:
        SourceError: the folder of the model is not known.
    """
    if files.folder is None:
        raise SourceError(
            f"initializer {proto.name!r} is in a file of its own, and the model came without a path; "
            "pass base_dir=, the folder of the model"
        )
    entry = entry_of(proto)
    path = files.paths.get(entry.location)
    if path is None:
        path = files.paths[entry.location] = file_in(files.folder, proto, entry.location)
    if not path.is_file():
        return None
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(proto.data_type))
    place = FileRange(str(path), entry.offset, math.prod(proto.dims) * dtype.itemsize)
    return FilePayload(place, tuple(proto.dims), dtype, files.maps)


class Attributes:
    """Reads attributes of one NodeProto; an absent one is its default. It remembers which were read."""

    def __init__(self, proto: onnx.NodeProto) -> None:
        self._node = proto
        self._protos = {attribute.name: attribute for attribute in proto.attribute}
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self._read.add(name)
        return name in self._protos

    def settle(self, *names: str) -> None:
        """Mark attributes as read: static shapes say the same, or they have no effect on the result."""
        self._read.update(names)

    def unread(self, schema: onnx.defs.OpSchema | None) -> list[str]:
        """Attributes that were not read and do not have the default of `schema`."""
        return [
            name for name, proto in self._protos.items() if name not in self._read and not _is_default(proto, schema)
        ]

    def _value(self, name: str, kind: int) -> Any:
        """What the field of this type holds; None where the node has no such attribute.

        Raises:
            SourceError: it has another type, in a node without a schema, such as onnxruntime's.
        """
        if name not in self:
            return None
        attribute = self._protos[name]
        if attribute.type not in (kind, AttributeProto.UNDEFINED):
            raise SourceError(
                f"{describe_node(self._node)} has an attribute {name!r} of type {KINDS[attribute.type]}; "
                f"{self._node.op_type} takes {KINDS[kind]}"
            )
        return getattr(attribute, VALUE_FIELD[kind])

    def integer(self, name: str, default: int = 0) -> int:
        value = self._value(name, AttributeProto.INT)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.integer(name, default))

    def number(self, name: str, default: float = 0.0) -> float:
        """A float32 attribute as its shortest decimal: 1e-05, as the author wrote it, not 9.999999747378752e-06."""
        value = self._value(name, AttributeProto.FLOAT)
        return default if value is None else float(str(np.float32(value)))

    def text(self, name: str, default: str = "") -> str:
        value = self._value(name, AttributeProto.STRING)
        return default if value is None else value.decode()

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(text.decode() for text in self._value(name, AttributeProto.STRINGS) or ())

    def numbers(self, name: str) -> tuple[float, ...]:
        return tuple(float(str(np.float32(number))) for number in self._value(name, AttributeProto.FLOATS) or ())

    def integers(self, name: str) -> tuple[int, ...] | None:
        value = self._value(name, AttributeProto.INTS)
        return None if value is None else tuple(value)

    def constant(self) -> np.ndarray | None:
        """The value of a Constant node, in any of its spellings; None for strings and sparse tensors."""
        for name, proto in self._protos.items():
            self._read.add(name)
            match name:
                case "value":
                    return numpy_helper.to_array(proto.t)
                case "value_float":
                    return np.array(proto.f, np.float32)
                case "value_floats":
                    return np.array(proto.floats, np.float32)
                case "value_int":
                    return np.array(proto.i, np.int64)
                case "value_ints":
                    return np.array(proto.ints, np.int64)
        return None


def _is_default(proto: onnx.AttributeProto, schema: onnx.defs.OpSchema | None) -> bool:
    known = schema.attributes.get(proto.name) if schema is not None else None
    if known is None or not known.default_value.type:
        return False
    return helper.get_attribute_value(proto) == helper.get_attribute_value(known.default_value)


def schema_of(kind: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """ONNX's schema of an operator; None where ONNX has none, as for other domains."""
    try:
        return onnx.defs.get_schema(kind, opset, domain)
    except onnx.defs.SchemaError:
        return None


def op_key(domain: str, op_type: str) -> str:
    """How tables and messages name an op: "Conv", "com.microsoft::Attention"."""
    return op_type if domain in ("", "ai.onnx") else f"{domain}::{op_type}"


def ir_dtype(element: int, where: str) -> str:
    """The IR's name of an ONNX element type, e.g. 1 → "float32"; `where` is for the message.

    Raises:
        Unsupported: strings, and types of less than a byte.
    """
    if element not in NAMES:
        found = TensorProto.DataType.Name(element) if element in TensorProto.DataType.values() else str(element)
        raise Unsupported(
            f"{where} has the ONNX element type {found}, expected one of {', '.join(NAMES.values())}; cast or drop it"
        )
    return NAMES[element]


def is_ir_type(element: int) -> bool:
    """Whether the IR has the ONNX element type."""
    return element in NAMES


def wider_type(element: int) -> str:
    """The IR's type that holds a type below a byte, one element in each byte; empty for other types."""
    return WIDER.get(element, "")


def element_type(dtype: str) -> int:
    """The ONNX element type of one of the IR's dtype names."""
    return ELEMENTS[dtype]


def numpy_type(dtype: str) -> np.dtype:
    """numpy's type, or that of ml_dtypes, of one of the IR's dtype names."""
    return helper.tensor_dtype_to_np_dtype(element_type(dtype))


NAMES: dict[int, str] = {
    element: name
    for element in TensorProto.DataType.values()
    if element != TensorProto.UNDEFINED and (name := helper.tensor_dtype_to_np_dtype(element).name) in DTYPE_BITS
}
"""ONNX's element types that the IR has, and its names of them."""

WIDER: dict[int, str] = {
    TensorProto.INT4: "int8",
    TensorProto.UINT4: "uint8",
    TensorProto.INT2: "int8",
    TensorProto.UINT2: "uint8",
}

ELEMENTS: dict[str, int] = {name: element for element, name in NAMES.items()}
