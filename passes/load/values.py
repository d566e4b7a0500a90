"""Checks of text and types: string fields in UTF-8, dtypes and dims that ONNX has, and the memory that a model may ask
for by the sizes that it declares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from onnx import NodeProto, StringStringEntryProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto

from passes.errors import ModelError
from passes.worker.platforms import memory_limit

DTYPES: Final[Mapping[int, str]] = {number: name for name, number in TensorProto.DataType.items() if number}
"""Number of a dtype → its name in ONNX; 0, a dtype that is not declared, is not in the table."""

OPEN_DIM: Final = -1
"""How Paddle's exporter writes a dim without a size."""

MOST_NESTED: Final = 16
"""How deep sequences may lie in sequences."""


def check_text(text: object, where: str) -> None:
    """Refuse a string field whose bytes are no UTF-8: protobuf hands those out as bytes, which compare with no string.

    Raises:
        ModelError: the message names the place, `where`, and the bytes.
    """
    if type(text) is not str:
        shown = repr(text[:40]) if isinstance(text, bytes) else repr(text)
        raise ModelError(f"{where} is {shown}, which is no UTF-8 text; is the file damaged?")


def check_entries(entries: Iterable[StringStringEntryProto], owner: str | NodeProto) -> None:
    """Refuse keys and values of metadata, or of external data, that are no text.

    Args:
        entries: the keys and values.
        owner: how messages call the entries, or the node whose metadata they are.

    Raises:
        ModelError: a key or a value is no text.
    """
    for entry in entries:
        key, value = entry.key, entry.value
        if type(key) is not str or type(value) is not str:
            where = owner if isinstance(owner, str) else f"the metadata of node {owner.name!r} ({owner.op_type})"
            check_text(key, f"a key of {where}")
            check_text(value, f"the value of {key!r} of {where}")


def check_value(info: ValueInfoProto, what: str, *, typed: bool) -> None:
    """Check name and type of an input, an output or a value between.

    Args:
        info: the declared value.
        what: how messages call it, such as `input`.
        typed: the type has to be there.

    Raises:
        ModelError: the name is missing; the type is missing, or none of ONNX's.
    """
    name = info.name
    check_text(name, f"the name of an {what}" if what != "value" else "the name of a value")
    if not name:
        raise ModelError(f"{what} without a name; expected one for each {what}")
    if info.metadata_props:
        check_entries(info.metadata_props, f"{what} {name!r}")
    kind = info.type.WhichOneof("value") if info.HasField("type") else None
    if kind is None:
        if typed:
            raise ModelError(f"{what} {name!r} has no type; expected a dtype, and a shape where it is known")
        return
    check_type(info.type, kind, f"{what} {name!r}", typed=typed)


def check_type(declared: TypeProto, kind: str, where: str, *, typed: bool, depth: int = 0) -> None:
    """Check a type, and the types of its items.

    Args:
        declared: the type.
        kind: the field of `declared` that is set, such as `tensor_type`.
        where: how messages call the value that has the type.
        typed: a dtype has to be there.
        depth: how many sequences or maps `declared` is inside of.

    Raises:
        ModelError: a dtype that ONNX does not have, dims that cannot be, or a sequence or map of nothing.
    """
    if depth > MOST_NESTED:
        raise ModelError(f"{where} is a sequence of sequences, {MOST_NESTED} deep; expected fewer")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = declared.tensor_type if kind == "tensor_type" else declared.sparse_tensor_type
        if tensor.elem_type not in DTYPES and (typed or tensor.elem_type):
            raise ModelError(f"{where} has the dtype {tensor.elem_type}, which ONNX does not know")
        if tensor.HasField("shape"):
            _check_shape(tensor.shape, where)
        return
    if kind == "opaque_type":
        return
    if kind == "map_type" and declared.map_type.key_type not in DTYPES:
        raise ModelError(
            f"{where} is a map with keys of the dtype {declared.map_type.key_type}, which ONNX does not know"
        )
    inner = declared.map_type.value_type if kind == "map_type" else getattr(declared, kind).elem_type
    inner_kind = inner.WhichOneof("value")
    if inner_kind is None:
        raise ModelError(f"{where} is a {kind.removesuffix('_type')} of nothing; expected the type of its items")
    check_type(inner, inner_kind, where, typed=typed, depth=depth + 1)


def _check_shape(shape: TensorShapeProto, where: str) -> None:
    sizes = []
    for dim in shape.dim:
        name = dim.dim_param
        if name:
            check_text(name, f"a dim of {where}")
        elif dim.dim_value < OPEN_DIM:
            raise ModelError(f"{where} has a dim of {dim.dim_value}; expected a size of 0 or more, or none")
        else:
            sizes.append(max(dim.dim_value, 0))
    if len(shape.dim) > MOST_DIMS:
        raise ModelError(f"{where} has {len(shape.dim)} dims; expected {MOST_DIMS} at most")
    if element_count(sizes) > MOST_ELEMENTS:
        raise ModelError(f"{where} has the shape {sizes}, which no machine can hold; is a dim wrong?")


MOST_ELEMENTS: Final = 2**60
"""Elements of one tensor, on any machine: beyond it sizes in bytes overflow 64 bits, in numpy and in native code."""

MOST_DIMS: Final = 64
"""Dims of one tensor: numpy has no more."""

MOST_DRAWN: Final = 2**27
"""Elements of all inputs that are drawn for one run: half a GiB of floats. A volume of 512 × 512 × 512 has as many."""

LEAST_SECONDS: Final = 45.0
SECONDS_PER_MIB: Final = 20.0
"""The time limit of a run, per MiB of weights and inputs that the model declares."""


def memory_budget() -> int:
    """Bytes: nine tenths of the machine's memory, or of the process's limit if that is less."""
    return memory_limit() * 9 // 10


def seconds_to_run(nbytes: int) -> float:
    """The time limit for one run of a model that declares `nbytes` of weights and inputs; a longer run is taken for an
    endless loop."""
    return LEAST_SECONDS + SECONDS_PER_MIB * nbytes / 2**20


def element_count(dims: Sequence[int]) -> int:
    """The product of `dims`, without a dim of 0: numpy and native code multiply the other dims too, and overflow."""
    return math.prod(dim for dim in dims if dim)


def check_bytes(what: str, dims: Sequence[int], itemsize: int) -> None:
    """Refuse to make an array that does not fit into this machine.

    Args:
        what: how the message calls the array.
        dims: its shape.
        itemsize: bytes of an element.

    Raises:
        ModelError: the array takes more than `memory_budget()`.
    """
    needed = 0 if 0 in dims and element_count(dims) <= MOST_ELEMENTS else element_count(dims) * itemsize
    if needed > memory_budget():
        raise ModelError(
            f"{what} has the shape {list(dims)} and takes {needed / 2**30:,.3g} GiB; this machine can give "
            f"{memory_budget() / 2**30:,.3g} GiB; is a size wrong?"
        )


def check_drawn(name: str, dims: Sequence[int]) -> None:
    """Refuse to draw an input that is larger than any that a proof needs.

    Raises:
        ModelError: the message names the input and its shape.
    """
    if math.prod(dims) > MOST_DRAWN or element_count(dims) > MOST_ELEMENTS:
        raise ModelError(
            f"input {name!r} has the shape {list(dims)}, {math.prod(dims):,} elements, and {MOST_DRAWN:,} at most are "
            "drawn; is a dim wrong? If not, give smaller sizes, or `feeds`"
        )


def check_drawn_together(shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse to draw inputs that together are larger than any that a proof needs.

    Raises:
        ModelError: the message names the largest input.
    """
    counts = {name: math.prod(dims) for name, dims in shapes.items()}
    if sum(counts.values()) > MOST_DRAWN:
        largest = max(counts, key=counts.__getitem__)
        raise ModelError(
            f"the inputs have {sum(counts.values()):,} elements together, most of them in {largest!r} of the shape "
            f"{list(shapes[largest])}, and {MOST_DRAWN:,} at most are drawn; is a dim wrong? If not, give "
            "smaller sizes, or `feeds`"
        )
