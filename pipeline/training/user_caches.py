"""What the user's files hold outside of modules, and a call may leave a tensor in: `MASKS = {}`, `@functools.cache`.

Looked through are the files that define the classes of the modules and the loss, and those that these import; no
installed library. A function has its defaults and its closure as well.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

from torch import nn

import passes
from pipeline.training.known_values import HOMES


@dataclass(slots=True)
class UserCaches:
    """What `find_caches` finds."""

    files: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """The globals of each file, with its name."""
    containers: list[tuple[str, Any]] = field(default_factory=list)
    """Dicts, lists and sets with their names, such as `net.MASKS`."""
    functions: list[Any] = field(default_factory=list)
    """Functions that keep their results."""

    def add(self, title: str, value: Any) -> None:
        if isinstance(value, FUNCTION_CACHE):
            self.functions.append(value)
        elif type(value) in CONTAINERS and len(value) <= LARGEST:
            self.containers.append((title, value))


def find_caches(module: nn.Module, loss: object) -> UserCaches:
    """What forward pass and loss can reach by the names in their files."""
    found, functions = UserCaches(), list[FunctionType]()
    parts = [*module.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]
    given = [loss, *(value for part in parts for value in vars(part).values())]
    functions += [value for value in given if isinstance(value, FunctionType)]
    names = {cls.__module__ for part in parts for cls in type(part).__mro__} | {
        function.__module__ for function in functions
    }
    for file in _user_files(names):
        title = Path(getattr(file, "__file__", file.__name__)).stem
        found.files.append((title, vars(file)))
        for key, value in vars(file).items():
            found.add(f"{title}.{key}", value)
            if isinstance(value, FunctionType):
                functions.append(value)
            elif isinstance(value, type) and value.__module__ == file.__name__:
                functions += _functions_of(value, f"{title}.{key}", found)
    for function in functions:
        _add_own_values(function, found)
    return found


def _user_files(names: set[str]) -> Iterator[ModuleType]:
    """The user's modules of these names, and those that their globals come from."""
    todo, seen = set(names), set[str]()
    while todo:
        name = todo.pop()
        own = sys.modules.get(name)
        if name in seen or own is None or not _is_of_user(own):
            continue
        seen.add(name)
        yield own
        for value in vars(own).values():
            if isinstance(value, ModuleType):
                todo.add(value.__name__)
            elif isinstance(value, FunctionType | type | FUNCTION_CACHE):
                todo.add(value.__module__)


def _is_of_user(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ == "__main__"
    path = Path(file)
    return not LIBRARIES & set(path.parts) and not any(path.is_relative_to(home) for home in INSTALLED)


def _functions_of(cls: type, title: str, found: UserCaches) -> list[FunctionType]:
    """The methods of a class, whose other values are added to `found`."""
    methods = list[FunctionType]()
    for key, value in vars(cls).items():
        plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        found.add(f"{title}.{key}", plain)
        if isinstance(plain, FunctionType):
            methods.append(plain)
    return methods


def _add_own_values(function: FunctionType, found: UserCaches) -> None:
    for key, value in (function.__kwdefaults__ or {}).items():
        found.add(f"{function.__qualname__}.{key}", value)
    for value in function.__defaults__ or ():
        found.add(f"a default of {function.__qualname__}", value)
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.add(f"{function.__qualname__}.{key}", cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue


CONTAINERS: Final = (dict, OrderedDict, defaultdict, list, set)
"""The classes of what is looked into, but no subclass of the user's."""

LARGEST: Final = 1000
"""Entries up to which something may be a cache, and is no data."""

FUNCTION_CACHE: Final = functools._lru_cache_wrapper

LIBRARIES: Final = {"site-packages", "dist-packages"}

STDLIB: Final = (Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))

INSTALLED: Final = (*HOMES, Path(passes.__file__).parent, *STDLIB)
"""Folders of code that is not the user's, as well as those of installed libraries."""
