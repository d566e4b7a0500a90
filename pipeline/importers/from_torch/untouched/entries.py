"""What one object holds, as a flat list, and how it is given back to it.

No line of the user's code runs for it, but for `__hash__` and `__eq__` of keys that are put back: what a class makes of
its attributes or entries is passed by.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import chain
from sys import stdlib_module_names
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import nn

__all__ = ["Entries", "entries_of", "is_users"]

Entries: TypeAlias = tuple[Callable[[Any], list[Any]], Callable[[Any, list[Any]], None]]
"""Of an object: all that it holds, with keys as key, value, key, …; and to hold just that."""


def entries_of(kind: type) -> list[Entries]:
    """How an object of this class is read and put back: as a container, by its attributes, and by its slots.

    Empty for whatever is not to be opened: scalars, modules (torch's and Python's), tensors, classes, functions, and
    other objects of torch and of Python.
    """
    if kind not in OPEN and (not is_users(str(kind.__module__)) or issubclass(kind, CLOSED)):
        return []
    found = [entries for base, entries in CONTAINERS.items() if issubclass(kind, base)][:1]
    owns = [vars(base).get("__dict__") for base in kind.__mro__]
    found += [_attributes(own) for own in owns if type(own) in (GetSetDescriptorType, MemberDescriptorType)][:1]
    for base in kind.__mro__:
        members = [item for item in vars(base).values() if type(item) is MemberDescriptorType]
        if members and "__slots__" in vars(base):
            found.append(_slots(members))
    return found


def is_users(file: str) -> bool:
    """Whether a file, by its name, is neither Python's own nor torch's."""
    top = file.partition(".")[0]
    return top != "torch" and (top not in stdlib_module_names or top == "__main__")


def _attributes(own: Any) -> Entries:
    read, write = CONTAINERS[dict]
    return lambda item: read(own.__get__(item)), lambda item, was: write(own.__get__(item), was)


def _slots(members: list[Any]) -> Entries:
    def read(item: Any) -> list[Any]:
        return [_in_slot(member, item) for member in members]

    def write(item: Any, was: list[Any]) -> None:
        for member, held in zip(members, was, strict=True):
            if held is not EMPTY:
                member.__set__(item, held)
            elif _in_slot(member, item) is not EMPTY:
                member.__delete__(item)

    return read, write


def _in_slot(member: Any, item: Any) -> Any:
    try:
        return member.__get__(item)
    except AttributeError:
        return EMPTY


def _mapping(base: Any, fill: Callable[[Any, Iterable[tuple[Any, Any]]], None]) -> Entries:
    def write(item: Any, was: list[Any]) -> None:
        base.clear(item)
        fill(item, zip(was[::2], was[1::2], strict=True))

    return lambda item: list(chain.from_iterable(base.items(item))), write


def _collection(base: Any, fill: Callable[[Any, list[Any]], None]) -> Entries:
    def write(item: Any, was: list[Any]) -> None:
        base.clear(item)
        fill(item, was)

    return lambda item: list(base.__iter__(item)), write


def _constant(base: Any) -> Entries:
    return lambda item: list(base.__iter__(item)), lambda *_: None


def _fill_ordered(item: OrderedDict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> None:
    for key, value in pairs:
        OrderedDict.__setitem__(item, key, value)  # its order is not known to dict's own methods


CONTAINERS: dict[type, Entries] = {
    OrderedDict: _mapping(OrderedDict, _fill_ordered),  # before dict
    dict: _mapping(dict, dict.update),
    list: _collection(list, list.extend),
    deque: _collection(deque, deque.extend),
    set: _collection(set, set.update),
    tuple: _constant(tuple),
    frozenset: _constant(frozenset),
    staticmethod: (lambda item: [item.__func__], lambda *_: None),
    classmethod: (lambda item: [item.__func__], lambda *_: None),
}
OPEN = {*CONTAINERS, defaultdict, Counter, SimpleNamespace}
CLOSED = (nn.Module, torch.Tensor, ModuleType, type)
EMPTY = object()
