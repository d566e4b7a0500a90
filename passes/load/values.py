"""Checks of text and types: string fields in UTF-8, dtypes and dims that ONNX has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from onnx import NodeProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto

from passes.errors import ModelError
from passes.load.budget import MOST_DIMS, MOST_ELEMENTS, element_count

DTYPES: Final[Mapping[int, str]] = {number: name for name, number in TensorProto.DataType.items() if number}
"""ONNX's names."""
OPEN_DIM: Final = -1
"""How Paddle's exporter writes a dim without a size."""
MOST_NESTED: Final = 16
"""Sequences of sequences, and so on."""


def check_text(text: object, where: str) -> None:
    """Refuse a string field whose bytes are no UTF-8: protobuf hands those out as bytes, which compare with no string.

    Raises:
        ModelError: naming `where` it is, and the bytes.
    """
    if type(text) is not str:
        shown = repr(text[:40]) if isinstance(text, bytes) else repr(text)
        raise ModelError(f"{where} is {shown}, which is no UTF-8 text; is the file damaged?")


def check_entries(entries: Iterable, of: str | NodeProto) -> None:
    """Refuse keys and values (of metadata, of external data) that are no text."""
    for entry in entries:
        key, value = entry.key, entry.value
        if type(key) is not str or type(value) is not str:
            where = of if isinstance(of, str) else f"the metadata of node {of.name!r} ({of.op_type})"
            check_text(key, f"a key of {where}")
            check_text(value, f"the value of {key!r} of {where}")


def check_value(info: ValueInfoProto, what: str, *, typed: bool) -> None:
    """Check name and type of an input, an output or a value between.

    Args:
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


def check_type(kind_of: TypeProto, kind: str, where: str, *, typed: bool, depth: int = 0) -> None:
    """Check a type, and those inside of it.

    Raises:
        ModelError: a dtype that ONNX does not have, dims that cannot be, or a sequence or map of nothing.
    """
    if depth > MOST_NESTED:
        raise ModelError(f"{where} is a sequence of sequences, {MOST_NESTED} deep; expected fewer")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = kind_of.tensor_type if kind == "tensor_type" else kind_of.sparse_tensor_type
        if tensor.elem_type not in DTYPES and (typed or tensor.elem_type):
            raise ModelError(f"{where} has the dtype {tensor.elem_type}, which ONNX does not know")
        if tensor.HasField("shape"):
            _check_shape(tensor.shape, where)
        return
    if kind == "opaque_type":
        return
    if kind == "map_type" and kind_of.map_type.key_type not in DTYPES:
        raise ModelError(
            f"{where} is a map with keys of the dtype {kind_of.map_type.key_type}, which ONNX does not know"
        )
    inner = kind_of.map_type.value_type if kind == "map_type" else getattr(kind_of, kind).elem_type
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
