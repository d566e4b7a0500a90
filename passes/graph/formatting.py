"""Short text for types, tensors and attributes, and the text of a graph, for people."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto, numpy_helper

from passes.graph.index import copy_of
from passes.graph.traversal import bodies_of

FEW: Final = 8
"""Tensors up to this number of elements are written out."""


def format_type(info: ValueInfoProto | TypeProto) -> str:
    """`float[N,4]`, as in ONNX's text; `?` is a dim without size or name."""
    type_ = info if isinstance(info, TypeProto) else info.type
    kind, tensor = type_.WhichOneof("value") or "no type", type_.tensor_type
    if kind == "map_type":
        key = TensorProto.DataType.Name(type_.map_type.key_type).lower()
        return f"map({key},{format_type(type_.map_type.value_type)})"
    if kind in ("sequence_type", "optional_type"):
        return f"{kind.removesuffix('_type')}({format_type(getattr(type_, kind).elem_type)})"
    if kind != "tensor_type":
        return kind.removesuffix("_type")
    dtype = TensorProto.DataType.Name(tensor.elem_type).lower()
    if not tensor.HasField("shape"):
        return f"{dtype}[]"
    dims = [_format_dim(dim) for dim in tensor.shape.dim]
    return f"{dtype}[{','.join(dims)}]" if dims else dtype


def _format_dim(dim: TensorShapeProto.Dimension) -> str:
    if is_unknown_dim(dim):
        return "?"
    if dim.HasField("dim_value"):
        return str(dim.dim_value)
    return repr(dim.dim_param) if dim.dim_param.isdigit() else dim.dim_param


def is_unknown_dim(dim: TensorShapeProto.Dimension) -> bool:
    """Whether a dim has neither a size nor the name of one."""
    return not dim.HasField("dim_value") and not dim.dim_param


def format_tensor_type(tensor: TensorProto) -> str:
    """`float[768,768]`: the type of a stored tensor."""
    dtype = TensorProto.DataType.Name(tensor.data_type).lower()
    return f"{dtype}[{','.join(map(str, tensor.dims))}]" if tensor.dims else dtype


def format_array(array: np.ndarray) -> str:
    """The elements of `array`, or their number."""
    if array.size > FEW:
        return f"({array.size} elements)"
    return str(array.tolist())


def format_attribute(attribute: AttributeProto) -> str:
    """The value: `[1, 0]`, `'NOTSET'`, `1e-05`, a type, `(a graph)`, or `@name` for a parameter of the function."""
    if attribute.ref_attr_name:
        return f"@{attribute.ref_attr_name}"
    if attribute.type in FORMATTERS:
        return FORMATTERS[attribute.type](attribute)
    kind = AttributeProto.AttributeType.Name(attribute.type).lower()
    return f"({kind})"


def _format_tensor(tensor: TensorProto) -> str:
    try:
        return format_array(numpy_helper.to_array(tensor))
    except (TypeError, ValueError):
        return "(not readable)"


def _text(value: bytes) -> str:
    return repr(value.decode(errors="replace"))


FORMATTERS: Final[Mapping[int, Callable[[AttributeProto], str]]] = {
    AttributeProto.INT: lambda attribute: str(attribute.i),
    AttributeProto.INTS: lambda attribute: str(list(attribute.ints)),
    AttributeProto.FLOAT: lambda attribute: str(np.float32(attribute.f)),
    AttributeProto.FLOATS: lambda attribute: f"[{', '.join(str(np.float32(value)) for value in attribute.floats)}]",
    AttributeProto.STRING: lambda attribute: _text(attribute.s),
    AttributeProto.STRINGS: lambda attribute: f"[{', '.join(map(_text, attribute.strings))}]",
    AttributeProto.TENSOR: lambda attribute: f"{format_tensor_type(attribute.t)} {_format_tensor(attribute.t)}",
    AttributeProto.TYPE_PROTO: lambda attribute: format_type(attribute.tp),
    AttributeProto.GRAPH: lambda _: "(a graph)",
    AttributeProto.GRAPHS: lambda attribute: f"({len(attribute.graphs)} graphs)",
}


COLUMNS: Final = 100

SHORT: Final = 24
"""Tensors of up to this many characters are printed, such as pads and axes; longer tensors are weights."""

STORED: Final = re.compile(r" =  \{([^{}]*)\}")
CONSTANT: Final = re.compile(r"\{([-+0-9.einfa,]+)\}", re.IGNORECASE)
TYPED: Final = re.compile(r"\b(\w+): (?:int|float|string|tensor|graph)s? = ")


def graph_text(model: onnx.ModelProto) -> str:
    """ONNX text of the main graph, wrapped at `COLUMNS`; the elements of weights, types of inner values and names of
    operators are left out."""
    bare = copy_of(model.graph)
    _strip(bare)
    text = onnx.printer.to_text(bare)
    text = STORED.sub(lambda match: f" = {{{match[1]}}}" if len(match[1]) <= SHORT else "", text)
    text = CONSTANT.sub(lambda match: match[0] if len(match[1]) <= SHORT else "{…}", text)
    text = TYPED.sub(r"\1 = ", text)
    return "\n".join(part for line in text.splitlines() for part in _wrap(line))


def _strip(graph: onnx.GraphProto) -> None:
    del graph.value_info[:]
    for node in graph.node:
        node.ClearField("name")
        for attribute in node.attribute:
            for inner in bodies_of(attribute):
                _strip(inner)


def _wrap(line: str) -> list[str]:
    space = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line.strip(),
        COLUMNS,
        initial_indent=space,
        subsequent_indent=f"{space}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
