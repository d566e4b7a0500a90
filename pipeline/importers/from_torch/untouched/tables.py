"""Tables of classes, of files and of functools, taken back where a run without numbers has put a tensor into them.

These belong to more than the model, so nothing else of them is touched. After a trace such a table holds a tensor
without numbers, and the next run would take it for a real one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import nn

from pipeline.importers.from_torch.untouched.entries import Entries, is_users
from pipeline.importers.from_torch.untouched.reach import Held, in_reach

__all__ = ["tables_kept"]


@contextmanager
def tables_kept(modules: Sequence[nn.Module], own: Iterable[Held]) -> Iterator[None]:
    """Classes of `modules`, their files, and what is in reach of them: where a tensor comes in or goes out in here, all
    entries of that table are as before afterwards. So it is for caches of functools, in `own` too, but they end empty.
    """
    kinds = set(map(type, modules))
    classes = [kind for kind in {base for kind in kinds for base in kind.__mro__} if is_users(str(kind.__module__))]
    tables = [*map(_of_class, classes), *map(_of_file, _files(classes))]
    tables += in_reach(chain.from_iterable(table.was for table in tables))
    caches = {id(item): item for table in (*tables, *own) for item in table.was if type(item) is CACHE}
    before = [(item, item.cache_info().misses) for item in caches.values()]
    try:
        yield
    finally:
        for table in [table for table in tables if (moved := table.changed()) and _has_tensors(moved)]:
            table.put_back()
        for item, misses in before:  # nothing but the garbage collector is told what a cache holds
            if item.cache_info().misses != misses and _has_tensors(gc.get_referents(item)):
                item.cache_clear()


def _of_class(kind: type) -> Held:
    return Held.by(kind, _names(vars(kind), partial(type.__setattr__, kind), partial(type.__delattr__, kind)))


def _of_file(names: dict[str, Any]) -> Held:
    return Held.by(names, _names(names, names.__setitem__, names.__delitem__))


def _names(held: Mapping[str, Any], put: Callable[[str, Any], None], remove: Callable[[str], None]) -> Entries:
    """One by one: a class or a file is never without its names."""

    def write(_: Any, was: list[Any]) -> None:
        had = dict(zip(was[::2], was[1::2], strict=True))
        for name in held.keys() - had.keys():
            remove(name)
        for name, item in had.items():
            if name not in held or held[name] is not item:
                put(name, item)

    return lambda _: list(chain.from_iterable(held.items())), write


def _files(classes: Iterable[type]) -> list[dict[str, Any]]:
    """By the methods that they define: a file may have no name in sys.modules."""
    methods = [item for kind in classes for item in vars(kind).values() if type(item) is FunctionType]
    files = {id(method.__globals__): method.__globals__ for method in methods}
    return [names for names in files.values() if is_users(str(names.get("__name__", "")))]


def _has_tensors(items: Sequence[Any]) -> bool:
    inside = chain.from_iterable(held.was for held in in_reach(items))
    return any(issubclass(type(item), torch.Tensor) for item in chain(items, inside))


CACHE = type(lru_cache(len))
