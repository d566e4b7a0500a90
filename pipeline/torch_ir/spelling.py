"""Attributes of the IR as torch takes them, and as JSON has them; constants of torch by their names."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from pipeline.ir import Attr, BodyRef, InputRef, SymExpr, TorchConst


def as_torch(item: Attr) -> Any:
    """An attribute as torch takes it: torch.float32, a torch.device, lists; a named size is its expression."""
    match item:
        case tuple():
            return [as_torch(part) for part in item]
        case TorchConst("device", name):
            return torch.device(name)
        case TorchConst(kind, name):  # `auto_functionalized` has the name of an operator, which may not be imported
            return getattr(torch, name) if kind in KINDS else name
        case SymExpr(expression):
            return expression
        case InputRef(index) | BodyRef(index):
            return index
        case _:
            return item


def as_attr(item: Any) -> Attr:
    """The inverse of `as_torch`."""
    if isinstance(item, list | tuple):
        return tuple(as_attr(part) for part in item)
    for kind, cls in KINDS.items():
        if isinstance(item, cls):
            return TorchConst(kind, str(item).removeprefix("torch."))
    return item


def to_plain(item: Any) -> Any:
    """An attribute that `as_torch` gave as JSON has it; some information may be lost, which the exact call has."""
    match item:
        case list() | tuple():
            return [to_plain(part) for part in item]
        case float():
            return item if math.isfinite(item) else repr(item)
        case complex():
            return [to_plain(item.real), to_plain(item.imag)]
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return str(item)
        case _:
            return item


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
