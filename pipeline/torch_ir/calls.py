"""Calls in pytorch-ir's form (a list of tensors, the rest by name), and the exact call where that form loses something.

The operator's schema says which tensor belongs to which argument: tensors are taken in order. Where that would not
reproduce the call (`clamp(max=t)`, an argument of a higher-order op, a number that JSON has not), the exact call is
written too. It is always written for operators that torch itself does not have, since a reader of the file may not
have imported the module that defines them.

A call is checked against the schema of its operator before anything runs: missing, unknown and mistyped arguments.
Calls without a schema (higher-order operators, the user's own that are not imported) are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from pipeline.errors import SourceError
from pipeline.ir import Attr, BodyRef, InputRef, Op, SymExpr, TorchConst
from pipeline.ir.graph import parts
from pipeline.ir.tagged import read_attr
from pipeline.runtime.call_schema import CONSTANTS, arguments, find_wrong_type, say_missing, say_unknown
from pipeline.runtime.operators import find_operator
from pipeline.torch_ir.errors import Unexpected

SIZES, MASKS = "_tensor_list_sizes", "_tensor_list_none_masks"


def needs_exact_call(op: Op) -> bool:
    """Whether inputs and attributes of a node do not determine the call, as with `clamp(max=t)`."""
    attrs = {name: to_plain(item) for name, item in format_attrs(op, as_torch)}
    known = op.kind.partition(".")[0] in TORCHS_OWN
    read = _read(op.kind, len(op.inputs), attrs) if known else _read_bare(attrs)
    return read != dict(op.attrs)


def read_call(
    kind: str, inputs: int, attrs: Mapping[str, Any], call: Mapping[str, Any] | None = None
) -> dict[str, Attr]:
    """The attributes of an op of `kind` with `inputs` inputs, from a node's `attrs`, or from its exact `call`."""
    if call is not None:
        return {name: _check_constant(read_attr(item)) for name, item in call.items()}
    return _read(kind, inputs, attrs)


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


def _read(kind: str, inputs: int, attrs: Mapping[str, Any]) -> dict[str, Attr]:
    known = arguments(kind)
    if known is None:
        return _read_bare(attrs)
    indices = iter(range(inputs))
    sizes, masks = iter(attrs.get(SIZES, ())), iter(attrs.get(MASKS, ()))
    found: dict[str, Attr] = {}
    for name, argument in known.items():
        if name in attrs:
            found[name] = _parse_item(argument.kind, attrs[name])
        elif argument.kind == "tensors" and SIZES in attrs:
            found[name] = _build_tensor_list(indices, next(sizes, 0), next(masks, None))
        elif argument.kind == "tensor" and (place := next(indices, None)) is not None:
            found[name] = InputRef(place)
    return found


def _read_bare(attrs: Mapping[str, Any]) -> dict[str, Attr]:
    """The attributes as written: without a schema, the user's own executor gets them unchanged."""
    return {name: _parse_item("other", item) for name, item in attrs.items()}


def _build_tensor_list(indices: Iterator[int], count: int, mask: Sequence[bool] | None) -> tuple[Attr, ...]:
    absent = mask or [False] * count
    return tuple(None if empty else InputRef(next(indices, 0)) for empty in absent)


def _parse_item(kind: str, item: Any) -> Attr:
    if isinstance(item, list | tuple):
        return tuple(_parse_item(kind, part) for part in item)
    if kind in CONSTANTS and isinstance(item, str | CONSTANTS[kind]):
        return torch_const(kind, str(item))
    return item


def _check_constant(item: Attr) -> Attr:
    if type(item) is TorchConst and item.kind in CONSTANTS:
        torch_const(item.kind, item.name)
    return item


TORCHS_OWN = frozenset({"aten", "prims"})
"""Namespaces of operators that are there wherever torch is."""


def check_call(kind: str, inputs: int, attrs: Mapping[str, Attr], written: Collection[str], whole: bool) -> None:
    """Check the call `attrs` of `kind` with `inputs` inputs; `written` are the names of the arguments in the file.

    Raises:
        Unexpected: an argument is unknown or of another type; or, of a call that is `whole`, one is missing, or a
            tensor is none of them.
    """
    known = arguments(kind)
    if known is None:
        return
    said = next((say_unknown(name, known) for name in written if name not in known and name not in LISTS), "")
    said = said or find_wrong_type(known, attrs)
    missing = [name for name, argument in known.items() if argument.required and name not in attrs]
    if said or (whole and missing):
        raise Unexpected(f"{kind}: {said or say_missing(missing, known)}")
    used = [part.index for item in attrs.values() for part in parts(item) if type(part) is InputRef]
    if whole and used != list(range(inputs)):
        if len(used) == inputs:
            raise Unexpected(f"{kind}: found inputs {tuple(used)}, expected each of {inputs} once, in order")
        raise Unexpected(f"{kind}: found {inputs} inputs, expected {len(used)}, as many as its arguments take")


LISTS = frozenset({SIZES, MASKS})


def as_torch(item: Attr) -> Any:
    """An attribute as torch takes it: torch.float32, a torch.device, lists; a named size is its expression."""
    match item:
        case tuple():
            return [as_torch(part) for part in item]
        case TorchConst("device", name):
            return torch.device(name)
        case TorchConst(kind, name):  # `auto_functionalized` has the name of an operator, which may not be imported
            return getattr(torch, name) if kind in CONSTANTS else name
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
    for kind, cls in CONSTANTS.items():
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
    if not isinstance(found, CONSTANTS[kind]):
        raise ValueError(f"torch has no {kind} {name!r}, expected one such as {EXAMPLES[kind]}")
    return TorchConst(kind, name)


def _device(name: str) -> torch.device | None:
    try:
        return torch.device(name)
    except RuntimeError:
        return None


EXAMPLES = {
    "dtype": "'float32'",
    "device": "'cpu' and 'cuda:0'",
    "layout": "'strided'",
    "memory_format": "'contiguous_format'",
}
