"""Tables that a model fills while it runs, put back after a run without numbers.

A forward may keep what it has computed once: by key in a dict of its module, of its class or of its file, or under
`functools.cache`. After a trace such a table holds a tensor without numbers, and the next run takes it for a real one.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipeline.importers.from_torch.modules import STANDARD

__all__ = ["tables_kept"]


@contextmanager
def tables_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Where a tensor gets into a table or goes out of it in here, that entry is as before afterwards.

    Tables are the dicts, lists and functools' caches that are in reach of the forwards' code: in attributes of
    `modules` and of plain objects there, in classes, in decorated functions, and in the files of the classes and of
    what those files use. Names in files and classes are entries too; attributes of modules are not.
    """
    classes = _classes(modules)
    held = (item for kind in classes for item in vars(kind).values())
    reached = _reached([*_held(modules), *held, *_files(classes)])
    tables = [(item, item.copy()) for item in reached if not isinstance(item, CACHE)]
    names = [(kind, dict(vars(kind))) for kind in classes]
    caches = [(item, _kept_in(item)) for item in reached if isinstance(item, CACHE)]
    try:
        yield
    finally:
        for table, was in tables:
            _put_back(table, was)
        for kind, had in names:
            for name in _changed(vars(kind), had):
                setattr(kind, name, had[name]) if name in had else delattr(kind, name)
        for cache, kept in caches:
            if _kept_in(cache) - kept:
                cache.cache_clear()


def _classes(modules: Iterable[nn.Module]) -> list[type]:
    kinds = set(map(type, modules))
    return [base for base in {base for kind in kinds for base in kind.__mro__} if _may_keep(base)]


def _files(classes: list[type]) -> list[dict[str, Any]]:
    """The names of their files, and of those that they use something from."""
    methods = [item for kind in classes for item in vars(kind).values() if isinstance(item, FunctionType)]
    own = {id(method.__globals__): method.__globals__ for method in methods}  # a file may have no name in sys.modules
    used = {_file(item) for names in own.values() for item in tuple(names.values())}
    others = [vars(sys.modules[name]) for name in used if name in sys.modules and not _is_foreign(name)]
    return [*own.values(), *others]


def _file(item: Any) -> str:
    """Of a file itself, or of the class or function that it is from; "" of anything else."""
    if isinstance(item, ModuleType):
        return item.__name__
    return str(item.__module__) if isinstance(item, type | FunctionType | CACHE) else ""


def _held(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """What is in attributes, and the attributes of plain objects there."""
    own = {kind for kind in set(map(type, modules)) if _may_keep(kind)}
    attributes = [vars(one) for one in modules if len(vars(one)) > len(STANDARD) and type(one) in own]
    items = {id(held[name]): held[name] for held in attributes for name in held.keys() - STANDARD}
    for item in items.values():
        is_plain = hasattr(item, "__dict__") and _may_keep(type(item)) and not isinstance(item, nn.Module | type)
        yield vars(item) if is_plain else item


def _may_keep(kind: type) -> bool:
    return not _is_foreign(str(kind.__module__))


def _is_foreign(file: str) -> bool:
    """Whether it is Python's own, or torch's."""
    top = file.partition(".")[0]
    return top == "torch" or (top in sys.stdlib_module_names and top != "__main__")


def _reached(pending: list[Any]) -> list[Any]:
    """Tables and caches, each once: those in other tables too, and those of the function around a decorated one."""
    found: dict[int, Any] = {}
    while pending:
        item = pending.pop()
        if isinstance(item, staticmethod | classmethod):
            item = item.__func__
        if id(item) in found or type(item) not in (*TABLES, CACHE, FunctionType):
            continue
        found[id(item)] = item
        if isinstance(item, FunctionType):
            pending += gc.get_referents(*item.__closure__ or ())
        elif isinstance(item, dict | list):
            pending += item.values() if isinstance(item, dict) else item
    return [item for item in found.values() if type(item) in (*TABLES, CACHE)]


def _put_back(table: Any, was: Any) -> None:
    if isinstance(table, list):
        if _changed(dict(enumerate(table)), dict(enumerate(was))):
            table[:] = was
        return
    for key in _changed(table, was):
        if key in was:
            table[key] = was[key]
        else:
            del table[key]


def _changed(now: Mapping[Any, Any], was: Mapping[Any, Any]) -> list[Any]:
    """Keys under which another tensor is held, or none any more."""
    keys = [key for key in {**was, **now} if now.get(key, MISSING) is not was.get(key, MISSING)]
    return [key for key in keys if _tensors((now.get(key), was.get(key)))]


def _kept_in(cache: Any) -> set[int]:
    """Which tensors a cache of functools holds: what it holds, only the garbage collector is told."""
    return _tensors(gc.get_referents(cache))


def _tensors(item: Any) -> set[int]:
    return {id(leaf) for leaf in pytree.tree_leaves(item) if isinstance(leaf, torch.Tensor)}


TABLES = (dict, OrderedDict, defaultdict, list)
"""Exactly these: a class of its own may load what it is asked for."""

CACHE = type(lru_cache(len))
MISSING = object()
