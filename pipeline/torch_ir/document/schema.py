"""Check a call against the schema of its operator before anything runs: missing, unknown and mistyped arguments.

Calls without a schema (higher-order operators, the user's own that are not imported) are not checked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

from pipeline.ir import Attr, InputRef, SymExpr, TorchConst
from pipeline.torch_ir.calls import MASKS, SIZES, Argument, arguments
from pipeline.torch_ir.document.fields import LIMIT, Unexpected

__all__ = ["check_call"]


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """The types that an argument takes: `alone` for a single item, `each` for items of a list (empty: no list)."""

    argument: Argument
    alone: frozenset[type]
    each: frozenset[type]

    def takes(self, item: Attr) -> bool:
        if type(item) is tuple:
            if not self.each:
                return object in self.alone
            return all(type(part) in self.each and self.holds(part) for part in item)
        if not self.holds(item):
            return False
        if type(item) is TorchConst:
            return item.kind == self.argument.kind or object in self.alone
        return type(item) in self.alone or object in self.alone

    def holds(self, item: Attr) -> bool:
        """Whether an integer fits into torch's 64 bits; a scalar may be unsigned."""
        return type(item) is not int or -LIMIT <= item < (LIMIT if "int" in self.argument.type else 2 * LIMIT)


def check_call(kind: str, inputs: int, attrs: Mapping[str, Attr], written: Collection[str], whole: bool) -> None:
    """Check the call `attrs` of `kind` on so many `inputs`; `written` are the names of the arguments in the file.

    Raises:
        Unexpected: an argument is unknown or of another type; or, of a call that is `whole`, one is missing, or a
            tensor is none of them.
    """
    try:
        slots, required = _slots(kind)
    except LookupError:
        return
    for name in written:
        if name not in slots and name not in LISTS:
            raise Unexpected(f"{kind}: found the argument {name!r}, expected only {', '.join(slots)}")
    used: list[int] = []
    for name, item in attrs.items():
        if type(item) is InputRef:
            used.append(item.index)
        elif type(item) is tuple:
            used += [part.index for part in item if type(part) is InputRef]
        if (type(item) not in slots[name].alone or type(item) is int) and not slots[name].takes(item):
            raise Unexpected(f"{kind}: {name}: found {_format_item(item)}, expected {slots[name].argument.type}")
    if whole and not required <= attrs.keys():
        names = ", ".join(name for name in slots if name in required - attrs.keys())
        raise Unexpected(f"{kind}: found no {names}, expected each argument that has no default, None too")
    if whole and used != list(range(inputs)):
        if len(used) == inputs:
            raise Unexpected(
                f"{kind}: found inputs {_format_item(tuple(used))}, expected each of {inputs} once, in order"
            )
        raise Unexpected(f"{kind}: found {inputs} inputs, expected {len(used)}, as many as its arguments take")


@cache
def _slots(kind: str) -> tuple[Mapping[str, ArgumentSlot], frozenset[str]]:
    """(arguments by name, the required ones). An unknown operator raises, so that `cache` does not keep it."""
    found = arguments(kind)
    if not found:
        raise LookupError(kind)
    return {one.name: _slot(one) for one in found}, frozenset(one.name for one in found if one.required)


def _slot(argument: Argument) -> ArgumentSlot:
    type_, optional = _inner(argument.type, "Optional[")
    none = frozenset({type(None)}) if optional else frozenset()
    part, is_list = _inner(type_, "List[")
    if not is_list:
        return ArgumentSlot(argument, TYPES.get(type_, ANYTHING) | none, frozenset())
    part, holes = _inner(part, "Optional[")
    each = frozenset({InputRef}) if part == "Tensor" else TYPES.get(part, ANYTHING)
    if each is ANYTHING:
        return ArgumentSlot(argument, ANYTHING, frozenset())
    # torch takes a single number for a list of equal ones
    return ArgumentSlot(argument, each - {InputRef} | none, each | {type(None)} if holes else each)


def _inner(type_: str, outer: str) -> tuple[str, bool]:
    """(what is inside of `outer`, whether it is there)"""
    return (type_.removeprefix(outer)[:-1], True) if type_.startswith(outer) else (type_, False)


def _format_item(item: Attr) -> str:
    if type(item) is InputRef:
        return "a tensor"
    return "null" if item is None else str(item.name if type(item) is TorchConst else repr(item))[:60]


LISTS = frozenset({SIZES, MASKS})

ANYTHING: frozenset[type] = frozenset({object})

NUMBERS: frozenset[type] = frozenset({bool, int, InputRef, SymExpr})
"""torch takes a tensor of one element for a number, and a symbolic size too."""

TYPES: dict[str, frozenset[type]] = {
    "Tensor": NUMBERS | {float, complex},
    "int": NUMBERS,
    "bool": NUMBERS,
    "float": NUMBERS | {float},
    "number": NUMBERS | {float, complex},
    "complex": NUMBERS | {float, complex},
    "str": frozenset({str}),
    "ScalarType": frozenset({int}),
    "Device": frozenset(),
    "Layout": frozenset({int}),
    "MemoryFormat": frozenset({int}),
}
"""What torch takes for a schema's types (torch 2.13); of any other type anything is taken.
A TorchConst is taken where its own kind is asked for."""
