"""Initializers as params and consts with payloads that reference their bytes, never copy them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from passes.load.tensors import entry_of, file_in
from pipeline.errors import SourceError, UsageError
from pipeline.importers.from_onnx.specs import ir_dtype
from pipeline.ir.graph import Payload, TensorSpec

__all__ = ["ArrayPayload", "FilePayload", "ProtoPayload", "Stored", "read_initializers"]


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


@dataclass(slots=True)
class FilePayload:
    """A tensor in a data file beside the model, mapped into memory at the first call: pages load as they are read."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    _array: np.ndarray | None = field(default=None, init=False)

    def numpy(self) -> np.ndarray:
        if self._array is None:
            empty = 0 in self.shape
            self._array = (
                np.empty(self.shape, self.dtype)  # a map of no bytes cannot be made
                if empty
                else np.memmap(self.path, self.dtype, "r", self.offset, self.shape).view(np.ndarray)
            )
        return self._array


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
        near = get_close_matches(pattern, names, 3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {len(names)}, e.g. {names[:3]}"
        raise UsageError(f"trainable: found no initializer that {pattern!r} names or matches; {hint}")
    stored = {}
    for proto in graph.initializer:
        name = proto.name
        spec = TensorSpec(tuple(proto.dims), ir_dtype(proto.data_type, f"initializer {name!r}"))
        learns = name in trainable or any(fnmatchcase(name, pattern) for pattern in trainable)
        stored[name] = Stored(name, spec, payload_of(proto, folder), learns)
    return stored


def payload_of(proto: TensorProto, folder: Path | None) -> Payload | None:
    """None where the model names a tensor without its numbers, and where its data file is not there."""
    if proto.data_location == TensorProto.EXTERNAL:
        return external_payload(proto, folder)
    typed = (proto.float_data, proto.int32_data, proto.int64_data, proto.double_data, proto.uint64_data)
    if math.prod(proto.dims) and not proto.HasField("raw_data") and not any(typed):
        return None
    return ProtoPayload(proto)


def external_payload(proto: TensorProto, folder: Path | None) -> FilePayload | None:
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
    return FilePayload(path, entry.offset, tuple(proto.dims), dtype)
