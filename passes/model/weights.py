"""Take the large initializers out of a model, so that a pass costs milliseconds whatever the model weighs.

A detached tensor leaves a **stand-in**: the same name, shape and dtype, but a few numbers spelled from the digest of
its content instead of its data. Optimizers compare and hash tensors by those numbers, so two stand-ins look equal
exactly when their tensors are equal, and one of a tensor that is all 0 or all 1 still looks all 0 or all 1. They are
numbers that no format reads as NaN, 0 or 1, since a NaN would make a tensor unequal to itself.

Weights that are **unread** are known by the place where they lie instead: their digest is that of file, offset and
length. Equal places are equal tensors, so what is taken for equal is equal; two copies of one tensor are not seen to be
the same, nor that one is all 0 or all 1. So a model of terabytes is detached without a look at any of its numbers.

Stand-ins are only for tools that never compute with the data (onnxoptimizer computes nothing: its Conv +
BatchNormalization fusion writes the arithmetic as nodes). Others get the attached model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from blake3 import blake3
from onnx import TensorProto, helper

from passes.errors import ModelMistake
from passes.model.bodies import bodies_of
from passes.model.external_data import ExternalFiles
from passes.model.mapped import place_of, release
from passes.model.order import sort_nodes
from passes.model.payload import check_payload

__all__ = [
    "DETACH_FROM_BYTES",
    "PROTOBUF_LIMIT",
    "TYPED_FIELDS",
    "UNREAD",
    "DetachedModel",
    "Key",
    "Weight",
    "WeightStore",
    "attach",
    "clear_data",
    "derived_digest",
    "detach",
    "digest_of",
    "initializer_of",
    "inline",
    "key_of",
    "read_model",
]

DETACH_FROM_BYTES: Final = 1024
MOST_READ_BYTES: Final = 2**20
"""Of a tensor without a stand-in that is read all the same where weights are to stay unread."""
UNREAD: Final = "onnxline.unread"
"""The key in a model's metadata that says: its weights may be large, so know them by their places."""
PROTOBUF_LIMIT: Final = 2**31 - 2**20
"""Bytes that one protobuf message may hold, less a margin for its own framing."""

Key = tuple[tuple[int, ...], int, tuple[float, ...]]
"""Shape, ONNX dtype and stand-in numbers: what identifies a detached tensor wherever a pass has moved or renamed it."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor's bytes as in ONNX `raw_data`: row-major, little-endian. A view; what lies behind it owns them."""

    dims: tuple[int, ...]
    data_type: int
    data: np.ndarray
    digest: str
    unread: bool = False
    """Its digest says where it comes from, and not what it holds."""

    def array(self) -> np.ndarray:
        """The tensor as numpy, without copying (bfloat16 as `ml_dtypes.bfloat16`)."""
        return self.data.view(helper.tensor_dtype_to_np_dtype(self.data_type)).reshape(self.dims)


WeightStore = Mapping[Key, Weight]


@dataclass(frozen=True, slots=True)
class DetachedModel:
    """A model whose large initializers are stand-ins, with the store that they stand for."""

    proto: onnx.ModelProto
    weights: WeightStore

    def with_proto(self, proto: onnx.ModelProto) -> DetachedModel:
        return DetachedModel(proto, self.weights)

    def weight(self, tensor: TensorProto) -> Weight | None:
        """The detached weight that this initializer stands for; None if it holds its own data."""
        key = key_of(tensor)
        return None if key is None else self.weights.get(key)

    def array(self, tensor: TensorProto) -> np.ndarray:
        """An initializer's values, whether detached or not."""
        weight = self.weight(tensor)
        return onnx.numpy_helper.to_array(tensor) if weight is None else weight.array()

    def digest(self, tensor: TensorProto) -> str:
        """128 bits of an initializer's bytes, the same whether it is detached or not."""
        weight = self.weight(tensor)
        if tensor.data_type == TensorProto.STRING:  # not through numpy, which takes them for UTF-8
            return _digest_of_texts(tensor.string_data)
        return weight.digest if weight else digest_of(onnx.numpy_helper.to_array(tensor))

    def turned_digest(self, tensor: TensorProto, axes: Sequence[int]) -> str:
        """`digest` of a detached or inline initializer with its axes in another order."""
        weight = self.weight(tensor)
        if weight is not None and weight.unread:
            return derived_digest(weight.digest, "Transpose", axes)
        return digest_of(self.array(tensor).transpose(axes))

    def is_unread(self, tensor: TensorProto) -> bool:
        weight = self.weight(tensor)
        return weight is not None and weight.unread

    def unread(self) -> list[str]:
        """The names of the initializers that are."""
        return [tensor.name for tensor in self.proto.graph.initializer if self.is_unread(tensor)]

    def nbytes(self) -> int:
        """Bytes of the attached model, as one protobuf message would hold it."""
        stored = (self.weight(tensor) for tensor in self.proto.graph.initializer)
        return self.proto.ByteSize() + sum(weight.data.nbytes for weight in stored if weight is not None)


def detach(
    model: onnx.ModelProto, base_dir: Path | None = None, known: WeightStore | None = None, *, unread: bool = False
) -> DetachedModel:
    """Move every initializer of 1 KiB or more out of `model`, which is changed in place.

    Args:
        model: with inline or external data.
        base_dir: the folder of the external data; it is memory-mapped, not read.
        known: a store whose weights are used again where they are equal, so that nothing is held twice.
        unread: know external data of 1 KiB or more by its place, and do not look at it.

    Raises:
        ModelMistake: a tensor's data does not fill its shape; external data is missing, or outside `base_dir`; or it is
            to stay unread, and its dtype has no stand-in.
    """
    known = known or {}
    store: dict[Key, Weight] = {}
    large: list[tuple[TensorProto, np.ndarray]] = []
    files = ExternalFiles(base_dir)
    for tensor in _inner_tensors(model.graph):
        check_payload(tensor)
        if tensor.data_location == TensorProto.EXTERNAL:
            inline(tensor, files.bytes_of(tensor))
    for tensor in model.graph.initializer:
        key = key_of(tensor)
        if key is not None and key in known:  # a stand-in already, from a tool that was given stand-ins
            store[key] = known[key]
            continue
        check_payload(tensor)
        data = _bytes_of(tensor, files)
        if data is None:
            continue
        if tensor.data_type in TYPED_FIELDS:
            large.append((tensor, data))
            continue
        if unread and data.nbytes > MOST_READ_BYTES:
            dtype = TensorProto.DataType.Name(tensor.data_type).lower()
            raise ModelMistake(
                f"initializer {tensor.name!r} has {data.nbytes} bytes of {dtype}, which no stand-in can be made for; "
                "it would have to be read into the model, and weights are to stay unread"
            )
        inline(tensor, data)
    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter free
        found = partial(_weight, unread=unread)
        weights = list(pool.map(found, *zip(*large, strict=True))) if large else []
    for (tensor, data), (weight, numbers) in zip(large, weights, strict=True):
        if numbers is None:
            inline(tensor, data)
            continue
        key = (weight.dims, weight.data_type, numbers)
        store[key] = known.get(key, weight)
        clear_data(tensor)
        getattr(tensor, TYPED_FIELDS[tensor.data_type]).extend(numbers)
    return DetachedModel(model, store)


def _weight(tensor: TensorProto, data: np.ndarray, *, unread: bool) -> tuple[Weight, tuple[float, ...] | None]:
    """The weight, and the numbers of its stand-in."""
    place = place_of(data) if unread and data.nbytes >= DETACH_FROM_BYTES else None
    if place is not None:
        digest = derived_digest(place.path, "place", (place.offset, place.nbytes))
        weight = Weight(tuple(tensor.dims), tensor.data_type, data, digest, unread=True)
        return weight, _spelled(digest)
    digest = _digest_of_bytes(data.data)
    weight = Weight(tuple(tensor.dims), tensor.data_type, data, digest)
    numbers = _stand_in(weight)
    release(data)
    return weight, numbers


def attach(model: DetachedModel) -> onnx.ModelProto:
    """The whole model in one message, with its data inline.

    Raises:
        ModelMistake: the model does not fit into one protobuf message (2 GiB); write it with `passes.model.files.save`.
    """
    if model.nbytes() > PROTOBUF_LIMIT:
        raise ModelMistake(
            f"the model holds {model.nbytes() / 2**30:.1f} GiB and one protobuf message at most 2 GiB; "
            "save it to a file with external data instead"
        )
    whole = onnx.ModelProto()
    whole.CopyFrom(model.proto)
    for tensor in whole.graph.initializer:
        weight = model.weight(tensor)
        if weight is not None:
            inline(tensor, weight.data)
    return whole


def key_of(tensor: TensorProto) -> Key | None:
    """What identifies `tensor` if it is a stand-in; None for a dtype that is never detached."""
    field = TYPED_FIELDS.get(tensor.data_type)
    return None if field is None else (tuple(tensor.dims), tensor.data_type, tuple(getattr(tensor, field)))


def digest_of(array: np.ndarray) -> str:
    """128 bits of a tensor's row-major bytes, in hex; strings are told apart by their length and their UTF-8."""
    if array.dtype.kind in "OUS":
        items = array.ravel().tolist()
        return _digest_of_texts(item if isinstance(item, bytes) else str(item).encode() for item in items)
    return _digest_of_bytes(np.ascontiguousarray(array).view(np.uint8).data)


def derived_digest(source: str, how: str, numbers: Iterable[int]) -> str:
    """128 bits, in hex, for what is known by where it comes from; no content has the same."""
    return _digest_of_bytes(repr(("unread", source, how, tuple(numbers))).encode())


def clear_data(tensor: TensorProto) -> None:
    """Drop whatever says what the values of `tensor` are, or where."""
    for field in ("raw_data", "external_data", "data_location", *dict.fromkeys(TYPED_FIELDS.values())):
        tensor.ClearField(field)


def inline(tensor: TensorProto, data: np.ndarray) -> None:
    """Give `tensor` its bytes back.

    Raises:
        ModelMistake: it stands for several tensors (`passes.model.joined`), and has no bytes of its own.
    """
    if not data.flags.c_contiguous:
        raise ModelMistake(f"{tensor.name!r} is joined from weights that are to stay unread")
    clear_data(tensor)
    tensor.raw_data = data.tobytes()


def initializer_of(name: str, weight: Weight) -> tuple[TensorProto, Key | None]:
    """An initializer that stands for `weight`, with its key; one that holds the data, and None, if nothing can."""
    tensor = TensorProto(name=name, data_type=weight.data_type, dims=weight.dims)
    numbers = None
    if weight.data_type in TYPED_FIELDS:
        numbers = _spelled(weight.digest) if weight.unread else _stand_in(weight)
    if numbers is None:
        inline(tensor, weight.data)
        return tensor, None
    getattr(tensor, TYPED_FIELDS[weight.data_type]).extend(numbers)
    return tensor, (weight.dims, weight.data_type, numbers)


def read_model(
    path: Path, known: WeightStore | None = None, *, unread: bool | None = None, folder: Path | None = None
) -> DetachedModel:
    """Read an ONNX file, detached. External data is memory-mapped; nodes come in an order that ONNX allows.

    Args:
        known: see `detach`.
        unread: see `detach`; None: as the file says of itself (`UNREAD`).
        folder: where its external data lies; its own folder by default.

    Raises:
        ModelMistake: no such file, not ONNX, truncated, or external data that is missing or leaves the folder.
    """
    if not path.is_file():
        raise ModelMistake(f"no ONNX file at {path}; expected an .onnx file, or the folder of a run that has ended")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:
        raise ModelMistake(f"{path} is not a readable ONNX file ({error}); is it complete?") from error
    if not model.graph.node and not model.graph.output:
        raise ModelMistake(f"{path} holds no graph; is it an ONNX file, and complete?")
    sort_nodes(model.graph)
    marked = any(entry.key == UNREAD for entry in model.metadata_props)
    # A link to a model stands for the model, beside which its data lies.
    folder = folder or (path.resolve().parent if path.is_symlink() else path.parent)
    try:
        return detach(model, folder, known, unread=marked if unread is None else unread)
    except ModelMistake as mistake:
        raise ModelMistake(f"{path}: {mistake}") from mistake


def _digest_of_texts(texts: Iterable[bytes]) -> str:
    return _digest_of_bytes(b"".join(len(text).to_bytes(8, "little") + text for text in texts))


def _digest_of_bytes(data: bytes | memoryview) -> str:
    """128 bits of BLAKE3: twice as fast as SHA-256 where processors compute that, and weights are gigabytes."""
    return blake3(data).hexdigest(length=16)


def _inner_tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Tensors in attributes, and in the subgraphs of If, Loop and Scan: too few and too small to detach."""
    for node in graph.node:
        for attribute in node.attribute:
            yield from (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors)
            for inner in bodies_of(attribute):
                yield from inner.initializer
                yield from _inner_tensors(inner)


def _bytes_of(tensor: TensorProto, files: ExternalFiles) -> np.ndarray | None:
    """The tensor's bytes as a uint8 view, or None when it is small and stays."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return files.bytes_of(tensor)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) < DETACH_FROM_BYTES:
            return None
        return np.frombuffer(tensor.raw_data, dtype=np.uint8)
    field = TYPED_FIELDS.get(tensor.data_type)
    if field is None or 4 * len(getattr(tensor, field)) < DETACH_FROM_BYTES:
        return None
    return np.frombuffer(onnx.numpy_helper.to_array(tensor).tobytes(), dtype=np.uint8)


def _stand_in(weight: Weight) -> tuple[float, ...] | None:
    """The numbers to leave in a tensor's place; None if it cannot be told apart by numbers and has to stay."""
    if weight.data.nbytes < DETACH_FROM_BYTES:
        return None
    array = weight.array()
    for unit in (0, 1):
        if array.flat[0] == unit and (array == unit).all():
            # -0.0 among zeros: equal to a pass, not equal as bytes, so it may not share a stand-in with plain zeros.
            uniform = not weight.data.reshape(array.size, -1).view(np.uint8).any() if unit == 0 else True
            return _unit_number(weight, unit) if uniform else None
    return _spelled(weight.digest)


def _spelled(digest: str) -> tuple[float, ...]:
    """Numbers that no format reads as NaN, 0 or 1, as values or as bits."""
    return tuple(2 + int(digit, 16) for digit in digest)


def _unit_number(weight: Weight, unit: int) -> tuple[float, ...]:
    """0 or 1 as the dtype's typed field stores it: small floats keep bit patterns there."""
    if unit == 1 and weight.data_type in SMALL_FLOATS:
        return (int.from_bytes(weight.data[: weight.array().itemsize].tobytes(), "little"),)
    return (unit,)


TYPED_FIELDS: Final[Mapping[int, str]] = {
    TensorProto.FLOAT: "float_data",
    TensorProto.DOUBLE: "double_data",
    TensorProto.FLOAT16: "int32_data",
    TensorProto.BFLOAT16: "int32_data",
    TensorProto.FLOAT8E4M3FN: "int32_data",
    TensorProto.FLOAT8E5M2: "int32_data",
    TensorProto.INT8: "int32_data",
    TensorProto.UINT8: "int32_data",
    TensorProto.INT16: "int32_data",
    TensorProto.UINT16: "int32_data",
    TensorProto.INT32: "int32_data",
    TensorProto.INT64: "int64_data",
    TensorProto.UINT32: "uint64_data",
    TensorProto.UINT64: "uint64_data",
}
"""The dtypes that can be detached, with the field of TensorProto that their stand-in's numbers go to. A bool stand-in
could only say "all true"."""

SMALL_FLOATS: Final = frozenset(
    {TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2}
)
