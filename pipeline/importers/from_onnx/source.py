"""Read a model: its functions are inlined, and its initializers reference their bytes, which are never copied."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper

from passes.errors import ModelError
from passes.load import load_model
from passes.load.tensors import entry_of, file_in
from passes.suggest import nearest_names
from passes.weights.detached import inner_tensors
from passes.weights.mapped import ExternalFiles, FileMaps, FileRange
from passes.weights.stand_ins import inline
from pipeline.errors import SourceError, Unsupported, UsageError
from pipeline.importers.from_onnx.attributes import op_key, schema_of
from pipeline.importers.from_onnx.specs import ir_dtype
from pipeline.ir.graph import Payload, TensorSpec

__all__ = ["ArrayPayload", "ReadModel", "Stored", "read_initializers", "read_source"]

OLDEST_OPSET = 7
"""The first opset with numpy's broadcasting; before it, Add and Mul mean something else."""


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model without local functions, the opset of the default domain, and the folder of its external data."""

    model: onnx.ModelProto
    opset: int
    folder: Path | None


def read_source(
    model: onnx.ModelProto | str | Path, base_dir: str | Path | None, known: Collection[str] = ()
) -> ReadModel:
    """Read `model` if it is a path; external data stays on disk, in `base_dir` or else in the folder of the path.

    An operator that is not `known` is replaced by its function body, where ONNX defines one.

    Raises:
        SourceError: no such file, or a broken model.
        Unsupported: an opset before `OLDEST_OPSET`, or sparse initializers.
    """
    folder = Path(base_dir) if base_dir is not None else None
    if not isinstance(model, onnx.ModelProto):
        if not isinstance(model, str | PathLike):
            found = type(model).__name__
            raise SourceError(f"found {found}, expected an onnx.ModelProto or the path of an ONNX file")
        path = Path(model)
        # The data file is beside the model that a symbolic link points to.
        folder = folder or (path.resolve().parent if path.is_symlink() else path.parent)
        model = path
    try:
        model = load_model(model, folder, may_be_empty=True)
    except ModelError as mistake:
        raise SourceError(str(mistake)) from mistake
    opset = next((entry.version for entry in model.opset_import if op_key(entry.domain, "") == ""), None)
    if opset is None and any(op_key(node.domain, "") for node in model.graph.node):
        domains = ", ".join(sorted({node.domain for node in model.graph.node if node.domain}))
        raise Unsupported(
            f"the model {model.graph.name!r} imports no opset of the ONNX domain, and has operators of {domains}; "
            "onnxline runs operators of the ONNX domain"
        )
    if opset is None:
        raise SourceError(f"the model {model.graph.name!r} imports no opset of the ONNX domain; is it a whole model?")
    if opset < OLDEST_OPSET:
        raise Unsupported(
            f"the model {model.graph.name!r} has opset {opset}, expected {OLDEST_OPSET} or later; "
            "convert it with onnx.version_converter.convert_version"
        )
    if model.graph.sparse_initializer:
        names = ", ".join(repr(tensor.values.name) for tensor in model.graph.sparse_initializer[:5])
        raise Unsupported(f"found sparse initializers ({names}), expected dense ones; make them dense first")
    if model.functions:
        model = inliner.inline_local_functions(model)
    model = _with_inner_data(model, folder)
    for name in sorted({node.op_type for node in model.graph.node if _is_function(node, opset, known)}):
        model = _without_function(model, name, opset)
    return ReadModel(model, opset, folder)


def _with_inner_data(model: onnx.ModelProto, folder: Path | None) -> onnx.ModelProto:
    """`model` with the external data of Constants and of bodies of If, Loop and Scan inside of it.

    Raises:
        SourceError: it is missing, or outside of `folder`.
    """
    if all(tensor.data_location != TensorProto.EXTERNAL for tensor in inner_tensors(model.graph)):
        return model
    whole, files = onnx.ModelProto(), ExternalFiles(folder)
    whole.CopyFrom(model)
    try:
        for tensor in inner_tensors(whole.graph):
            if tensor.data_location == TensorProto.EXTERNAL:
                inline(tensor, files.bytes_of(tensor))
    except ModelError as mistake:
        raise SourceError(str(mistake)) from mistake
    return whole


def _is_function(node: onnx.NodeProto, opset: int, known: Collection[str]) -> bool:
    kind = op_key(node.domain, node.op_type)
    if kind in known or kind in KEPT or op_key(node.domain, ""):
        return False
    schema = schema_of(node.op_type, node.domain, opset)
    # The stubs of onnx 1.23 lack both.
    return any(getattr(schema, name, False) for name in ("has_function", "has_context_dependent_function"))


def _without_function(model: onnx.ModelProto, name: str, opset: int) -> onnx.ModelProto:
    """`model` with calls of the function `name` inlined; the same model where ONNX cannot do so."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    schema = schema_of(name, "", opset)
    for node in copy.graph.node:
        if schema is not None and op_key(node.domain, node.op_type) == name:
            # The inliner drops an attribute that the node does not have, even if it has a default (onnx 1.23).
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(
                attribute.default_value
                for attribute in schema.attributes.values()
                if attribute.name not in given and attribute.default_value.type
            )
    try:
        return inliner.inline_selected_functions(copy, [("", name)], False, True)
    # The inliner needs types, which omitted optional inputs and results of unknown operators lack. Its native code
    # raises errors of any type then; the operator is refused where it is imported.
    except Exception:
        return model


KEPT = frozenset({"Range"})
"""Functions that are folded, and whose body is a loop."""


@dataclass(frozen=True, slots=True)
class ArrayPayload:
    """An array that the importer made: a Constant node, or a folded value."""

    array: np.ndarray

    def numpy(self) -> np.ndarray:
        return self.array


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
    """A tensor in a data file beside the model; pages load as they are read. `files` maps each file once for all."""

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

    def constant(self) -> np.ndarray | None:
        """The numbers, if they are known and may not change."""
        return None if self.trainable or self.payload is None else self.payload.numpy()


def read_initializers(
    graph: onnx.GraphProto, folder: Path | None, trainable: Collection[str] = ()
) -> Mapping[str, Stored]:
    """The initializers of `graph` by name; those that an entry of `trainable` names or matches as a glob are params.

    Raises:
        UsageError: an entry of `trainable` fits no initializer.
        SourceError: external data outside the model's folder, or too short.
        Unsupported: a dtype that the IR does not have.
    """
    names = [proto.name for proto in graph.initializer]
    for pattern in trainable:
        if pattern in names or any(fnmatchcase(name, pattern) for name in names):
            continue
        near = nearest_names(pattern, names, 3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {len(names)}, e.g. {names[:3]}"
        raise UsageError(f"trainable: found no initializer that {pattern!r} names or matches; {hint}")
    files, stored = FileMaps(), {}
    for proto in graph.initializer:
        name = proto.name
        spec = TensorSpec(tuple(proto.dims), ir_dtype(proto.data_type, f"initializer {name!r}"))
        learns = name in trainable or any(fnmatchcase(name, pattern) for pattern in trainable)
        stored[name] = Stored(name, spec, payload_of(proto, folder, files), learns)
    return stored


def payload_of(proto: TensorProto, folder: Path | None, files: FileMaps) -> Payload | None:
    """None where the model names a tensor without its numbers, and where its data file is not there."""
    if proto.data_location == TensorProto.EXTERNAL:
        return external_payload(proto, folder, files)
    typed = (proto.float_data, proto.int32_data, proto.int64_data, proto.double_data, proto.uint64_data)
    if math.prod(proto.dims) and not proto.HasField("raw_data") and not any(typed):
        return None
    return ProtoPayload(proto)


def external_payload(proto: TensorProto, folder: Path | None, files: FileMaps) -> FilePayload | None:
    if folder is None:
        raise SourceError(
            f"initializer {proto.name!r} is in a file of its own, and the model came without a path; "
            "pass base_dir=, the folder of the model"
        )
    entry = entry_of(proto)
    path = file_in(folder.resolve(), proto, entry.location)
    if not path.is_file():
        return None
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(proto.data_type))
    place = FileRange(str(path), entry.offset, math.prod(proto.dims) * dtype.itemsize)
    return FilePayload(place, tuple(proto.dims), dtype, files)
