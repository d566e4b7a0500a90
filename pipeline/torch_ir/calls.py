"""Calls in pytorch-ir's form (a list of tensors, the rest by name), and the exact call where that form loses something.

The operator's schema says which tensor belongs to which argument: tensors are taken in order. Where that would not
reproduce the call (`clamp(max=t)`, an argument of a higher-order op, a number that JSON has not), the exact call is
written too. It is always written for operators that torch itself does not have, since a reader of the file may not
have imported the module that defines them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from pipeline.errors import SourceError
from pipeline.ir import Attr, BodyRef, InputRef, Op, SymExpr, TorchConst
from pipeline.ir.json import read_attr, write_attr
from pipeline.runtime.torch_args import find_operator

__all__ = [
    "KINDS",
    "Argument",
    "arguments",
    "find_known_operator",
    "format_attrs",
    "read_call",
    "torch_const",
    "write_call",
]

SIZES, MASKS = "_tensor_list_sizes", "_tensor_list_none_masks"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a schema. `kind`: tensor, tensors, dtype, device, layout, memory_format, or other."""

    name: str
    kind: str
    type: str
    """As torch writes it: `Optional[List[int]]`."""
    required: bool


def write_call(op: Op) -> dict[str, Any]:
    """The keys `attrs` of a node and, where the call cannot be rebuilt from them, `call`."""
    attrs = dict(format_attrs(op, _to_json))
    known = op.kind.partition(".")[0] in TORCHS_OWN
    read = _read(op.kind, len(op.inputs), attrs) if known else _read_bare(attrs)
    if read == dict(op.attrs):
        return {"attrs": attrs}
    return {"attrs": attrs, "call": {name: write_attr(item) for name, item in op.attrs.items()}}


def read_call(kind: str, inputs: int, node: Mapping[str, Any]) -> dict[str, Attr]:
    """The attributes of an op of `kind` on so many `inputs`, from the node's keys `attrs` and `call`."""
    if "call" in node:
        return {name: _check_constant(read_attr(item)) for name, item in node["call"].items()}
    return _read(kind, inputs, node.get("attrs") or {})


def format_attrs(op: Op, spell: Callable[[Attr], Any]) -> Iterator[tuple[str, Any]]:
    """(name, `spell(item)`) of each argument that is no tensor, then the sizes and None masks of tensor lists."""
    sizes: list[int] = []
    masks: list[list[bool]] = []
    for name, item in op.attrs.items():
        if isinstance(item, tuple) and any(type(part) is InputRef for part in item):
            sizes.append(sum(type(part) is InputRef for part in item))
            masks.append([part is None for part in item])
        elif type(item) is not InputRef:
            yield name, spell(item)
    if sizes:
        yield SIZES, sizes
    if any(map(any, masks)):
        yield MASKS, masks


def find_known_operator(kind: str) -> Any:
    """The operator `aten.linear.default`; None where torch has no such operator, as for a higher-order one."""
    try:
        return find_operator(kind)
    except SourceError:
        return None


def arguments(kind: str) -> tuple[Argument, ...]:
    """Those that the operator's schema has; none where torch has no such operator."""
    try:
        return _arguments(kind)
    except SourceError:
        return ()


@cache
def _arguments(kind: str) -> tuple[Argument, ...]:
    """Cached. An unknown operator raises, which `cache` does not keep: a module imported later may define it."""
    found = ((one, str(one.real_type)) for one in find_operator(kind)._schema.arguments)
    return tuple(Argument(one.name, _kind(type), type, not one.has_default_value()) for one, type in found)


def _to_json(item: Attr) -> Any:
    """`item` as JSON; some information may be lost, which the exact call has."""
    match item:
        case bool() | int() | str() | None:
            return item
        case float():
            return item if math.isfinite(item) else repr(item)
        case tuple():
            return [_to_json(part) for part in item]
        case TorchConst("device", name):
            return name
        case TorchConst(kind, name):
            return f"torch.{name}" if kind in KINDS else name
        case SymExpr(expression):
            return expression
        case InputRef(index) | BodyRef(index):
            return index
        case complex():
            return [_to_json(item.real), _to_json(item.imag)]


def _read(kind: str, inputs: int, attrs: Mapping[str, Any]) -> dict[str, Attr]:
    if find_known_operator(kind) is None:
        return _read_bare(attrs)
    places = iter(range(inputs))
    sizes, masks = iter(attrs.get(SIZES, ())), iter(attrs.get(MASKS, ()))
    found: dict[str, Attr] = {}
    for argument in arguments(kind):
        if argument.name in attrs:
            found[argument.name] = _parse_item(argument.kind, attrs[argument.name])
        elif argument.kind == "tensors" and SIZES in attrs:
            found[argument.name] = _build_tensor_list(places, next(sizes, 0), next(masks, None))
        elif argument.kind == "tensor" and (place := next(places, None)) is not None:
            found[argument.name] = InputRef(place)
    return found


def _read_bare(attrs: Mapping[str, Any]) -> dict[str, Attr]:
    """The attributes as written: without a schema, the user's own executor gets them unchanged."""
    return {name: _parse_item("other", item) for name, item in attrs.items()}


def _build_tensor_list(places: Iterator[int], count: int, mask: Sequence[bool] | None) -> tuple[Attr, ...]:
    absent = mask or [False] * count
    return tuple(None if empty else InputRef(next(places, 0)) for empty in absent)


def _parse_item(kind: str, item: Any) -> Attr:
    if isinstance(item, list):
        return tuple(_parse_item(kind, part) for part in item)
    if kind in KINDS and isinstance(item, str | KINDS[kind]):
        return torch_const(kind, str(item))
    return item


def _check_constant(item: Attr) -> Attr:
    if type(item) is TorchConst and item.kind in KINDS:
        torch_const(item.kind, item.name)
    return item


def _kind(schema_type: str) -> str:
    inner = schema_type.removeprefix("Optional[").rstrip("]") if schema_type.startswith("Optional[") else schema_type
    return SCHEMA_KINDS.get(inner, "tensors" if "Tensor" in inner else "other")


TORCHS_OWN = frozenset({"aten", "prims"})
"""Namespaces of operators that are there wherever torch is."""

SCHEMA_KINDS = {
    "Tensor": "tensor",
    "ScalarType": "dtype",
    "Device": "device",
    "Layout": "layout",
    "MemoryFormat": "memory_format",
}
"""Types of a schema's arguments, as torch names them (torch 2.13), optional or not."""


@cache  # a model has many, and few that differ
def torch_const(kind: str, name: str) -> TorchConst:
    """The dtype, device, layout or memory format `name`, with or without `torch.`.

    Raises:
        ValueError: torch has no such constant.
    """
    name = name.removeprefix("torch.")
    found = _device(name) if kind == "device" else getattr(torch, name, None)
    if not isinstance(found, KINDS[kind]):
        raise ValueError(f"torch has no {kind} {name!r}, expected one such as {EXAMPLES[kind]}")
    return TorchConst(kind, name)


def _device(name: str) -> torch.device | None:
    try:
        return torch.device(name)
    except RuntimeError:
        return None


KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}

EXAMPLES = {
    "dtype": "'float32'",
    "device": "'cpu' and 'cuda:0'",
    "layout": "'strided'",
    "memory_format": "'contiguous_format'",
}
