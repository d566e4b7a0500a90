"""Take the large initializers out of a model, so that a pass costs milliseconds whatever the model weighs.

A stand-in (`stand_ins.py`) replaces a detached tensor: it has the same name, shape and dtype, but only a few elements.
Stand-ins are for tools that never compute with the data (onnxoptimizer does not: its Conv + BatchNormalization fusion
writes the arithmetic as nodes). Other tools get the attached model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import onnx
from onnx import TensorProto

from passes.errors import ModelError
from passes.graph.index import GraphIndex, copy_of
from passes.graph.inference import refuse_contradictions
from passes.graph.layer_calls import layer_functions
from passes.graph.traversal import bodies_of, every_node, inline_functions, put_in_order
from passes.load import check_model, check_payload, free_dims, load_model, to_path
from passes.suggest import plural
from passes.weights.mapped import ExternalFiles, find_file_range, release
from passes.weights.stand_ins import (
    DETACH_FROM_BYTES,
    TYPED_FIELDS,
    Key,
    Weight,
    clear_data,
    derived_digest,
    digest_of,
    digest_of_bytes,
    digest_of_texts,
    inline,
    key_of,
    stand_in_elements,
)

MOST_READ_BYTES: Final = 2**20
"""The largest tensor without a stand-in that is read even where weights are to stay unread."""
PARALLEL_BYTES: Final = 2**25
"""Weights of this size are hashed in threads: 20 ms of one core."""

UNREAD: Final = "onnxline.unread"
"""The metadata key of a model whose weights stay unread: they are identified by their range in a file."""
PROTOBUF_LIMIT: Final = 2**31 - 2**20
"""Bytes that one protobuf message may hold, less a margin for its own framing."""

WeightStore = Mapping[Key, Weight]


@dataclass(frozen=True)
class DetachedModel:
    """A model whose large initializers are stand-ins, with the store of their weights.

    Its graph does not change; names of nodes and metadata may. A pass changes `copy_proto()`, and makes a new model.
    """

    proto: onnx.ModelProto
    weights: WeightStore

    @cached_property
    def index(self) -> GraphIndex:
        """Producers, consumers and constants of its graph."""
        return GraphIndex(self.proto.graph)

    def __getstate__(self) -> dict[str, object]:
        return {"proto": self.proto, "weights": self.weights}  # the index is made again where it is needed

    def __repr__(self) -> str:
        return f"DetachedModel({plural(len(self.proto.graph.node), 'node')})"

    def with_proto(self, proto: onnx.ModelProto) -> DetachedModel:
        """Another graph on the weights of this model.

        Args:
            proto: the graph, with stand-ins of this model.

        Returns:
            The new model.
        """
        return DetachedModel(proto, self.weights)

    def with_arrays(self, arrays: Mapping[str, np.ndarray]) -> DetachedModel:
        """The model with other values of stored tensors.

        Args:
            arrays: initializer → its values, of its shape.

        Returns:
            The new model; itself where there are none.
        """
        if not arrays:
            return self
        proto = self.copy_proto()
        for tensor in proto.graph.initializer:
            if tensor.name in arrays:
                tensor.CopyFrom(onnx.numpy_helper.from_array(arrays[tensor.name], tensor.name))
        return detach(proto, known=self.weights, checked=True)

    def without_functions(self) -> DetachedModel:
        """The model with its functions inlined; itself where it has none. The values of its graph keep their names."""
        return self.with_proto(inline_functions(self.proto)) if self.proto.functions else self

    def has_layers(self) -> bool:
        """Whether equal layers are calls of one function."""
        return bool(layer_functions(self.proto))

    def copy_proto(self) -> onnx.ModelProto:
        """A copy of the proto, to change and give to `with_proto`: this model stays as it is."""
        copy = copy_of(self.proto)
        return copy

    def weight(self, tensor: TensorProto) -> Weight | None:
        """The detached weight of an initializer.

        Args:
            tensor: an initializer of this model.

        Returns:
            The weight, its bytes mapped from a file; None if the initializer holds its own data.
        """
        key = key_of(tensor)
        return None if key is None else self.weights.get(key)

    def array(self, tensor: TensorProto) -> np.ndarray:
        """An initializer's values, whether detached or not.

        Args:
            tensor: an initializer of this model.

        Returns:
            An array of the tensor's shape and dtype (bfloat16 as `ml_dtypes.bfloat16`); a detached weight is not
            copied. Bytes of a text that are no UTF-8 are lone surrogates.
        """
        if tensor.data_type == TensorProto.STRING:  # not by onnx, which refuses such bytes
            texts = [text.decode("utf-8", "surrogateescape") for text in tensor.string_data]
            return np.array(texts, object).reshape(tuple(tensor.dims))
        weight = self.weight(tensor)
        return onnx.numpy_helper.to_array(tensor) if weight is None else weight.array()

    def digest(self, tensor: TensorProto) -> str:
        """128 bits of an initializer's bytes, the same whether it is detached or not.

        Args:
            tensor: an initializer of this model.

        Returns:
            32 hex digits.
        """
        weight = self.weight(tensor)
        if tensor.data_type == TensorProto.STRING:  # not through numpy, which decodes them as UTF-8
            return digest_of_texts(tensor.string_data)
        return weight.digest if weight else digest_of(onnx.numpy_helper.to_array(tensor))

    def transposed_digest(self, tensor: TensorProto, axes: Sequence[int]) -> str:
        """`digest` of an initializer with its axes in another order.

        Args:
            tensor: an initializer of this model, detached or inline.
            axes: the order, as `np.transpose` takes it.

        Returns:
            32 hex digits.
        """
        weight, order = self.weight(tensor), tuple(axes)
        if weight is None:
            return digest_of(self.array(tensor).transpose(order))
        if order not in weight.digests_by_order:
            weight.digests_by_order[order] = (
                derived_digest(weight.digest, "Transpose", order)
                if weight.unread
                else digest_of(weight.array().transpose(order))
            )
            release(weight.data)
        return weight.digests_by_order[order]

    def is_unread(self, tensor: TensorProto) -> bool:
        weight = self.weight(tensor)
        return weight is not None and weight.unread

    def unread(self) -> list[str]:
        """The names of the unread initializers."""
        return [tensor.name for tensor in self.proto.graph.initializer if self.is_unread(tensor)]

    def release(self) -> None:
        """Give the memory of weights in files back; the next access reads them again."""
        for weight in self.weights.values():
            release(weight.data)

    def nbytes(self) -> int:
        """Bytes of the attached model, as one protobuf message would hold it."""
        stored = (self.weight(tensor) for tensor in self.proto.graph.initializer)
        return self.proto.ByteSize() + sum(weight.data.nbytes for weight in stored if weight is not None)


def detach(
    model: onnx.ModelProto,
    base_dir: Path | None = None,
    known: WeightStore | None = None,
    *,
    unread: bool = False,
    checked: bool = False,
) -> DetachedModel:
    """Move every initializer of 1 KiB or more out of `model`, which is changed in place.

    Args:
        model: with inline or external data.
        base_dir: the folder of the external data; it is memory-mapped, not read.
        known: a store whose weights are reused where they are equal, so that nothing is held twice.
        unread: identify external data of 1 KiB or more by its file range, without reading it.
        checked: `passes.load` has checked that each tensor's data fills its shape.

    Raises:
        ModelError: a tensor's data does not fill its shape; external data is missing, or outside `base_dir`; or it is
            to stay unread, and its dtype has no stand-in.
    """
    known = known or {}
    store: dict[Key, Weight] = {}
    large: list[tuple[TensorProto, np.ndarray]] = []
    files = ExternalFiles(base_dir)
    for tensor in inner_tensors(model):
        if not checked:
            check_payload(tensor)
        if tensor.data_location == TensorProto.EXTERNAL:
            inline(tensor, files.bytes_of(tensor))
    for tensor in model.graph.initializer:
        key = key_of(tensor)
        if key is not None and key in known:  # already a stand-in, returned by a tool that got stand-ins
            store[key] = known[key]
            continue
        if not checked:
            check_payload(tensor)
        data = _bytes_of(tensor, files)
        if data is None:
            continue
        if tensor.data_type in TYPED_FIELDS:
            large.append((tensor, data))
            continue
        if unread and data.nbytes > MOST_READ_BYTES:
            dtype = TensorProto.DataType.Name(tensor.data_type).lower()
            raise ModelError(
                f"initializer {tensor.name!r} has {data.nbytes} bytes of {dtype}, which no stand-in can be made for; "
                "it would have to be read into the model, and weights are to stay unread"
            )
        inline(tensor, data)
    for (tensor, data), (weight, elements) in zip(large, _weights_of(large, unread=unread), strict=True):
        if elements is None:
            inline(tensor, data)
            continue
        key = (weight.dims, weight.data_type, elements)
        store[key] = known.get(key, weight)
        clear_data(tensor)
        getattr(tensor, TYPED_FIELDS[tensor.data_type]).extend(elements)
    return DetachedModel(model, store)


def _weights_of(
    tensors: Sequence[tuple[TensorProto, np.ndarray]], *, unread: bool
) -> list[tuple[Weight, tuple[float, ...] | None]]:
    """`_weight` of each tensor with its data, on all cores where there is much to hash."""
    found = partial(_weight, unread=unread)
    if sum(data.nbytes for _, data in tensors) < PARALLEL_BYTES:
        return [found(*pair) for pair in tensors]
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        return list(pool.map(found, *zip(*tensors, strict=True)))


def _weight(tensor: TensorProto, data: np.ndarray, *, unread: bool) -> tuple[Weight, tuple[float, ...] | None]:
    """The weight, and the elements of its stand-in."""
    file_range = find_file_range(data) if unread and data.nbytes >= DETACH_FROM_BYTES else None
    if file_range is not None:
        digest = derived_digest(file_range.path, "place", (file_range.offset, file_range.nbytes))
        weight = Weight(tuple(tensor.dims), tensor.data_type, data, digest, unread=True)
        return weight, stand_in_elements(weight)
    weight = Weight(tuple(tensor.dims), tensor.data_type, data, digest_of_bytes(data.data))
    elements = stand_in_elements(weight)
    release(data)
    return weight, elements


def attach(model: DetachedModel, *, limit: int | None = PROTOBUF_LIMIT) -> onnx.ModelProto:
    """The whole model in one message, with its data inline.

    Args:
        model: the model to put together.
        limit: bytes; None for a message that stays in memory, where it may be larger than any file.

    Raises:
        ModelError: the model does not fit into one protobuf message (2 GiB); write it with `passes.weights.files.save`.
    """
    if limit is not None and model.nbytes() > limit:
        raise ModelError(
            f"the model holds {model.nbytes() / 2**30:.1f} GiB and one protobuf message at most 2 GiB; "
            "save it to a file with external data instead"
        )
    whole = model.copy_proto()
    for tensor in whole.graph.initializer:
        weight = model.weight(tensor)
        if weight is not None:
            inline(tensor, weight.data)
    return whole


class ResultWithModel(Protocol):
    """A result that has a model, such as the PassRun of `optimize`, or the file of a model, such as a RunResult."""

    @property
    def model(self) -> DetachedModel | Path: ...


OpenableModel = onnx.ModelProto | DetachedModel | str | PathLike[str] | ResultWithModel
"""What `open_model` takes."""


def open_model(model: OpenableModel) -> DetachedModel:
    """Open a model in any form.

    Args:
        model: a detached model, which is returned as it is; a message, which does not change; the path of a file; or a
            result that has one of these as its `model`.

    Returns:
        The detached model.

    Raises:
        ModelError: it is none of these, or the model is broken.
    """
    if isinstance(model, DetachedModel):
        return model
    if not isinstance(model, onnx.ModelProto):
        held = getattr(model, "model", model)
        return held if isinstance(held, DetachedModel) else read_model(to_path(held))
    check_model(model)
    copy = copy_of(model)
    put_in_order(copy)
    free_dims(copy)
    return detach(copy, checked=True)


def read_model(
    path: Path,
    known: WeightStore | None = None,
    *,
    unread: bool | None = None,
    folder: Path | None = None,
    may_lack_outputs: bool = False,
) -> DetachedModel:
    """Read an ONNX file as a detached model. External data is memory-mapped; nodes are sorted, and no two
    have one name.

    Args:
        path: the file.
        known: see `detach`.
        unread: see `detach`; None: as the file's metadata (`UNREAD`) says.
        folder: where its external data lies; its own folder by default.
        may_lack_outputs: see `passes.load.load_model`.

    Raises:
        ModelError: no such file, not ONNX, truncated, or external data that is missing or leaves the folder.
    """
    path = to_path(path)
    # The external data of a linked model is next to the file that the link points to.
    folder = folder or (path.resolve().parent if path.is_symlink() else path.parent)
    model = load_model(path, folder, may_lack_outputs=may_lack_outputs)
    put_in_order(model)
    refuse_contradictions(model)
    marked = any(entry.key == UNREAD for entry in model.metadata_props)
    try:
        return detach(model, folder, known, unread=marked if unread is None else unread, checked=True)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def inner_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Tensors in attributes, and in the subgraphs of If, Loop and Scan, of the graph and of functions: too few and too
    small to detach."""
    for part in (model.graph, *model.functions):
        for node in every_node(part):
            for attribute in node.attribute:
                yield from (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors)
                for inner in bodies_of(attribute):
                    yield from inner.initializer


def _bytes_of(tensor: TensorProto, files: ExternalFiles) -> np.ndarray | None:
    """The tensor's bytes as a uint8 view, or None when it is small and stays."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return files.bytes_of(tensor)
    if tensor.HasField("raw_data"):
        raw = tensor.raw_data  # protobuf returns a copy each time
        return None if len(raw) < DETACH_FROM_BYTES else np.frombuffer(raw, dtype=np.uint8)
    field = TYPED_FIELDS.get(tensor.data_type)
    if field is None or 4 * len(getattr(tensor, field)) < DETACH_FROM_BYTES:
        return None
    return np.frombuffer(onnx.numpy_helper.to_array(tensor).tobytes(), dtype=np.uint8)
