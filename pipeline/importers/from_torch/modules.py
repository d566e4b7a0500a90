"""The caller's modules: walk them quickly, run them as torch.export would, and leave them unchanged.

torch's own walks build a name for each module, and a model of experts has 90,000. torch.export restores attributes of
modules, but not what a forward registers or collects elsewhere, in containers and in objects that modules hold.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from sys import stdlib_module_names
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn


def every_module(model: nn.Module) -> list[nn.Module]:
    """`model` and the modules inside of it; one in two places is listed twice."""
    found = [model]
    for module in found:  # which grows meanwhile
        if module._modules:
            found += [child for child in module._modules.values() if child is not None]
    return found


def every_path(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of every place, in the order of the tree."""
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        yield path, module
        if module._modules:
            prefix = f"{path}." if path else ""
            children = reversed(module._modules.items())
            pending += [(prefix + name, child) for name, child in children if child is not None]


def every_tensor(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers; one in two places is listed twice."""
    found: list[torch.Tensor | None] = []
    for module in every_module(model):
        if module._parameters:
            found += module._parameters.values()
        if module._buffers:
            found += module._buffers.values()
    return [tensor for tensor in found if tensor is not None]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, each by all of its names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def attribute_items(model: nn.Module) -> dict[str, list[Any]]:
    """{path of an attribute that not every module has: its value, and what containers in it hold}."""
    found: dict[str, list[Any]] = {}
    for path, module in every_path(model):
        own = vars(module)
        for name in sorted(own.keys() - STANDARD) if len(own) > len(STANDARD) else ():
            held = chain.from_iterable(container.items for container in _containers_in([own[name]]))
            found[f"{path}.{name}" if path else name] = [own[name], *held]
    return found


def kept_tensors(items: Mapping[str, Sequence[Any]], model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Of `attribute_items` of the model, the attributes with tensors that are neither parameters nor buffers."""
    stored = set(map(id, every_tensor(model)))
    found = {
        path: [item for item in held if isinstance(item, torch.Tensor) and id(item) not in stored]
        for path, held in items.items()
    }
    return {path: tensors for path, tensors in found.items() if tensors}


STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has; none of them is a tensor."""

HOOKS = tuple(
    name for name in sorted(STANDARD) if name.startswith("_forward_") and isinstance(vars(nn.Module())[name], dict)
)
"""Those that hold hooks of forward. Models of transformers install some at the first call, and keep a flag for it."""


@contextmanager
def as_exporting() -> Iterator[None]:
    """Make `torch.compiler.is_exporting()` true, so that models run the branches that torch.export traces."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = {flag: getattr(torch.compiler, flag) for flag in flags if hasattr(torch.compiler, flag)}
    try:
        for flag in before:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)


@contextmanager
def preserve_module_state(module: nn.Module) -> Iterator[list[nn.Module]]:
    """On exit, restore attributes, parameters, buffers, children and hooks of each module in `module`, by identity.

    Containers and plain objects that the modules refer to are restored too; what classes, files, closures and
    functools' caches hold is not. Yields the modules.
    """
    modules = every_module(module)
    attributes = [vars(inner) for inner in modules]
    tables = [table for own in attributes for table in (own, own["_buffers"], own["_parameters"], own["_modules"])]
    before = [table.copy() for table in tables]
    hooks = {id(own[name]): own[name].copy() for own in attributes for name in HOOKS if own[name]}
    containers = _containers_in(
        own[name] for own in attributes if len(own) > len(STANDARD) for name in own.keys() - STANDARD
    )
    try:
        yield modules
    finally:
        for container in containers:
            container.restore()
        if _may_differ(tables, before):
            for table, was in zip(tables, before, strict=True):
                _restore(table, was)
        for table in (own[name] for own in attributes for name in HOOKS):
            if table or id(table) in hooks:
                _restore(table, hooks.get(id(table), {}))


def _restore(table: dict[Any, Any], was: dict[Any, Any]) -> None:
    if not _is_same_table(table, was):
        table.clear()
        table.update(was)


@dataclass(frozen=True, slots=True)
class _Container:
    """The items (and keys) that `container` held, read by methods of its built-in type `kind`.

    That runs no code of the user's, except `__hash__` and `__eq__` of keys that are restored.
    """

    container: Any
    kind: type[Any]
    items: list[Any]

    @staticmethod
    def of(container: Any, kind: type[Any]) -> _Container:
        return _Container(container, kind, _items(container, kind))

    def restore(self) -> None:
        if self.kind in SEALED or _are_same(_items(self.container, self.kind), self.items):
            return
        self.kind.clear(self.container)
        if issubclass(self.kind, dict):
            for key, item in zip(self.items[::2], self.items[1::2], strict=True):
                self.kind.__setitem__(self.container, key, item)
        elif self.kind is set:
            set.update(self.container, self.items)
        else:
            self.kind.extend(self.container, self.items)


def _containers_in(roots: Iterable[Any]) -> list[_Container]:
    """Containers, and the attributes of plain objects of the user's classes, however nested, each once."""
    found: list[_Container] = []
    seen: set[int] = set()  # `found` keeps them alive, so that no other gets the same id
    pending = list(roots)
    while pending:
        item = pending.pop()
        if not _is_open(type(item)) or id(item) in seen:
            continue
        seen.add(id(item))
        here = [_Container.of(item, base) for base in (*MUTABLE, *SEALED) if isinstance(item, base)][:1]
        if not here or type(item) is not here[0].kind:
            here += _attributes(item)
        found += here
        pending += chain.from_iterable(container.items for container in here)
    return found


def _attributes(item: Any) -> list[_Container]:
    try:
        return [_Container.of(object.__getattribute__(item, "__dict__"), dict)]
    except AttributeError:  # it has slots
        return []


def _is_open(kind: type) -> bool:
    """Whether it is a container, or a class that is neither Python's own nor torch's."""
    top = str(kind.__module__).partition(".")[0]
    is_users = top != "torch" and (top not in stdlib_module_names or top == "__main__")
    return kind in OPEN or (is_users and not issubclass(kind, CLOSED))


def _items(container: Any, kind: type[Any]) -> list[Any]:
    if issubclass(kind, dict):
        return list(chain.from_iterable(kind.items(container)))
    return list(kind.__iter__(container))


def _may_differ(tables: list[dict[str, Any]], before: list[dict[str, Any]]) -> bool:
    """A quick comparison that finds nothing in most cases: a model of experts has 90,000 modules.

    A user's own attributes may define `==` in any way, so tables that have some are compared by identity.
    """
    try:
        if tables != before:
            return True
    except Exception:  # tensors, and whatever else has no plain answer
        return True
    return not all(
        _is_same_table(table, was) for table, was in zip(tables, before, strict=True) if len(was) > len(STANDARD)
    )


def _is_same_table(table: dict[Any, Any], was: dict[Any, Any]) -> bool:
    return _are_same(table, was) and _are_same(table.values(), was.values())


def _are_same(now: Iterable[Any], was: Iterable[Any]) -> bool:
    """Whether they are the same objects in the same order; a user's own `==` is not asked."""
    return all(map(is_, chain(now, END), chain(was, END)))


MUTABLE = (OrderedDict, dict, list, deque, set)
"""An OrderedDict's order is not known to dict's own methods, so it comes first."""
SEALED = (tuple, frozenset)
OPEN = {*MUTABLE, *SEALED, defaultdict, Counter, SimpleNamespace}
CLOSED = (nn.Module, torch.Tensor, ModuleType, type)
END = (object(),)
