"""Arguments of a call as the schema of its operator in torch has them: their names, and the types that each takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from passes.suggest import nearest, plural
from pipeline.errors import SourceError
from pipeline.ir.graph import Attr, InputRef, SymExpr, TorchConst, parts
from pipeline.runtime.operators import find_operator


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a schema. `kind`: tensor, tensors, dtype, device, layout, memory_format, or other.

    It takes a single item of the types `alone`, and a list of items of the types `each` (empty: no list).
    """

    name: str
    kind: str
    type: str
    """As torch writes it: `Optional[List[int]]`."""
    required: bool
    alone: frozenset[type]
    each: frozenset[type]

    def takes(self, item: Attr) -> bool:
        """Whether torch takes `item`, and reads it as what it is.

        torch's dispatcher reads any int as a constant of torch, some of which end the process, and True as 1 and 4 as
        True, which kernels refuse.
        """
        if type(item) is tuple:
            if not self.each:
                return object in self.alone
            return all(type(part) in self.each and self._holds(part) for part in item)
        if type(item) is TorchConst and self.kind in CONSTANTS:
            return item.kind == self.kind and (item.kind == "device" or _is_constant(item))
        return (type(item) in self.alone or object in self.alone) and self._holds(item)

    def _holds(self, item: Attr) -> bool:
        """Whether an integer fits into torch's 64 bits; a scalar may be unsigned."""
        return type(item) is not int or -LIMIT <= item < (LIMIT if "int" in self.type else 2 * LIMIT)


def arguments(kind: str) -> Mapping[str, Argument] | None:
    """Those that the operator's schema has, by name; None where torch has no such operator."""
    try:
        return _arguments(kind)
    except SourceError:
        return None


def find_wrong_arguments(kind: str, attrs: Mapping[str, Attr]) -> str:
    """What is wrong with the arguments of a call, by name, type or range; "" where nothing is.

    Raises:
        SourceError: torch does not know the operator.
    """
    known = _arguments(kind)
    if unknown := [name for name in attrs if name not in known]:
        return say_unknown(unknown[0], known)
    missing = [name for name, entry in known.items() if entry.required and name != "device" and name not in attrs]
    return say_missing(missing, known) if missing else find_wrong_type(known, attrs)


def say_unknown(name: str, known: Mapping[str, Argument]) -> str:
    return f"it has no argument {name!r}{nearest(name, known)}; its arguments: {', '.join(known) or 'none'}"


def say_missing(names: list[str], known: Mapping[str, Argument]) -> str:
    said = f"it lacks {plural(len(names), 'argument')}: {', '.join(names)}"
    may_be_none = ", even as None" if any(type(None) in known[name].alone for name in names) else ""
    return f"{said}; each argument without a default has to be given{may_be_none}"


def find_wrong_type(known: Mapping[str, Argument], attrs: Mapping[str, Attr]) -> str:
    """What is wrong with the first argument in `attrs` that its operator does not take; "" where it takes all."""
    for name, item in attrs.items():
        argument = known[name]
        if (type(item) not in argument.alone or type(item) is int) and not argument.takes(item):
            return f"the argument {name!r} is {_show(item)}; expected {_describe_expected(argument, item)}"
    return ""


def _describe_expected(argument: Argument, found: Attr) -> str:
    if argument.kind in CONSTANTS:
        return f"{argument.type}: a {argument.kind} that torch has, in Python a TorchConst({argument.kind!r}, …)"
    is_wide = int in argument.alone | argument.each and any(
        type(part) is int and abs(part) >= LIMIT for part in parts(found)
    )
    return f"{argument.type}, integers of 64 bits" if is_wide else argument.type


def _show(item: Attr) -> str:
    return "a tensor" if type(item) is InputRef else repr(item)[:60]


@cache
def _arguments(kind: str) -> dict[str, Argument]:
    """Cached. An unknown operator raises, which `cache` does not keep: a module imported later may define it."""
    undefined = UNDEFINED if kind.startswith("aten.") else ()
    return {
        argument.name: _read_argument(argument, may_be_none=argument.name in undefined)
        for argument in find_operator(kind)._schema.arguments
    }


UNDEFINED: Final = ("attn_bias", "cum_seq_q", "cum_seq_k")
"""Declared as tensors in the gradients of torch's attention for CUDA, and left undefined where there are none."""


def _read_argument(argument: Any, *, may_be_none: bool) -> Argument:
    whole = str(argument.real_type)
    type_, optional = _inner(whole, "Optional[")
    kind = SCHEMA_KINDS.get(type_, "tensors" if "Tensor" in type_ else "other")
    described = argument.name, kind, whole, not argument.has_default_value()
    none = frozenset({type(None)}) if optional or may_be_none else frozenset()
    part, is_list = _inner(type_, "List[")
    if not is_list:
        return Argument(*described, TYPES.get(type_, ANYTHING) | none, frozenset())
    part, holes = _inner(part, "Optional[")
    each = frozenset({InputRef}) if part == "Tensor" else TYPES.get(part, ANYTHING)
    if each is ANYTHING:
        return Argument(*described, ANYTHING, frozenset())
    # torch takes a single number for a list of equal ones
    return Argument(*described, each - {InputRef} | none, each | {type(None)} if holes else each)


def _inner(type_: str, outer: str) -> tuple[str, bool]:
    """(what is inside of `outer`, whether it is there)"""
    return (type_.removeprefix(outer)[:-1], True) if type_.startswith(outer) else (type_, False)


def _is_constant(item: TorchConst) -> bool:
    return isinstance(getattr(torch, item.name, None), CONSTANTS[item.kind])


LIMIT: Final = 2**63
"""torch's integers have 64 bits."""

ANYTHING: Final[frozenset[type]] = frozenset({object})

SIZES: Final[frozenset[type]] = frozenset({InputRef, SymExpr})
"""What torch takes for a number: a tensor of one element and a symbolic size too."""

TYPES: Final[dict[str, frozenset[type]]] = {
    "Tensor": SIZES | {bool, int, float, complex},
    "int": SIZES | {int},
    "bool": SIZES | {bool},
    "float": SIZES | {bool, int, float},
    "number": SIZES | {bool, int, float, complex},
    "str": frozenset({str}),
    **dict.fromkeys(("ScalarType", "Device", "Layout", "MemoryFormat"), frozenset[type]()),
}
"""What is taken for a schema's types (torch 2.13), but for constants of torch; of any other type anything is taken."""

SCHEMA_KINDS: Final = {
    "Tensor": "tensor",
    "ScalarType": "dtype",
    "Device": "device",
    "Layout": "layout",
    "MemoryFormat": "memory_format",
}
"""Types of a schema's arguments, as torch names them (torch 2.13), optional or not."""

CONSTANTS: Final[dict[str, type]] = {
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
"""Kind of a constant → its type in torch."""
