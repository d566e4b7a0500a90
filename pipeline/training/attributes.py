"""Tensors and other objects that a forward pass leaves in modules and in the user's files: a recording removes them.

`self.mask = torch.ones(4)`, an entry of a dict that serves as a cache, a counter or the state of a random generator
would otherwise stay as the recording made them, and the module could not be called any more. So would a tensor in a
dict or a cache of the user's files: `MASKS = {}`, `@functools.cache`. The files that define the classes of the modules
and the loss are searched, and the files that these import, but no installed library. Defaults and closures of functions
are searched too, and so are the functions in them.
"""

from __future__ import annotations

import functools
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.user_files import is_user_code
from pipeline.training.frozen_numbers import is_plain

Container: TypeAlias = dict[Any, Any] | list[Any] | set[Any]


class ModuleAttributes:
    """A snapshot of the attributes of a module and of its submodules, with the items of dicts, lists and sets in them.

    The states of Python's and numpy's generators are part of it: the global generators, and those that modules hold.
    In what the user's files hold outside of modules, only tensors of a recording are replaced.
    """

    def __init__(self, module: nn.Module, loss: object = None) -> None:
        self._before: list[tuple[str, Container, Container]] = []
        """(name of the attribute, container that holds it, copy of the container)."""
        outside = find_caches(module, loss)
        inner = [entry for name, held in outside.containers for entry in _containers(name, held)]
        self._outside = [(name, held, held.copy()) for name, held in (*outside.files, *inner)]
        self._caches = [(cache, cache.cache_info().misses) for cache in outside.functions]
        self._taken: dict[tuple[int, Any], tuple[dict[Any, Any], Container, Any]] = {}
        """{(id of a dict, key): (the dict, its copy from before, the constant that the first recording left)}."""
        self._scalars: dict[str, tuple[dict[str, Any], dict[str, int | float]]] = {}
        self._generators: list[Any] = []
        for name, part in module.named_modules():
            own = vars(part)
            self._scalars[name] = (own, {key: value for key, value in own.items() if isinstance(value, int | float)})
            for title, container in _containers(name, own):
                self._before.append((title, container, container.copy()))
                held = container.values() if isinstance(container, dict) else container
                self._generators += [value for value in held if isinstance(value, GENERATORS)]
        self._ids = {id(held) for _, held, _ in (*self._before, *self._outside)}
        self._random = self._random_states()

    @property
    def called_generator(self) -> bool:
        """Whether Python or numpy has drawn random values since the snapshot."""
        return [repr(state) for state in self._random] != [repr(state) for state in self._random_states()]

    def take_out(self, is_constant: Callable[[torch.Tensor], bool]) -> None:
        """Remove tensors of a recording that are constants, such as a mask that is made at the first call.

        Other tensors, and tensors that replaced a tensor, stay; the next recording refuses to read them.
        """
        for _, container, before in (*self._before, *self._outside):
            for key, value in self._own_entries(container):
                traced = _traced_in(value)
                old = before.get(key) if isinstance(before, dict) else None
                if not traced or isinstance(old, torch.Tensor) or not all(map(is_constant, traced)):
                    continue
                if isinstance(container, dict):
                    self._taken.setdefault((id(container), key), (container, before, value))
                    _put_entry_back(container, key, before)
                else:
                    _put_back(container, before)

    def clear_caches(self) -> None:
        """Clear the caches of functions that got new entries since the snapshot."""
        for cache, misses in self._caches:
            if cache.cache_info().misses > misses:
                cache.cache_clear()

    @contextmanager
    def second_call(self, number_of: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Put plain tensors in the place of the removed constants, as a second call of the module would find them."""
        for (_, key), (container, _, value) in self._taken.items():
            container[key] = pytree.tree_map_only(torch.Tensor, number_of, value, is_leaf=VisitedNodes())
        try:
            yield
        finally:
            for (_, key), (container, before, _) in self._taken.items():
                if key in container:
                    _put_entry_back(container, key, before)

    @property
    def took_out(self) -> bool:
        """Whether a recording left constants that were removed."""
        return bool(self._taken)

    def name_of(self, item: object) -> str:
        """The name of the attribute that holds a tensor or a generator; "" where there is none."""
        return next((name for name, leaf in self._leaves() if leaf is item), "")

    @property
    def left(self) -> list[str]:
        """The names of attributes that hold tensors of a recording and held no tensor before."""
        return [
            _without_place(title, key, container)
            for title, container, before in (*self._before, *self._outside)
            for key, value in self._own_entries(container)
            if _traced_in(value)
            if not (isinstance(before, dict) and isinstance(before.get(key), torch.Tensor))
        ]

    def _own_entries(self, container: Container) -> list[tuple[Any, Any]]:
        """The entries of a container, without containers whose entries are searched by themselves."""
        return [(key, value) for key, value in _entries(container) if id(value) not in self._ids]

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        for title, container, _ in (*self._before, *self._outside):
            for key, value in self._own_entries(container):
                if not isinstance(value, NEVER_TENSORS):
                    name = _without_place(title, key, container)
                    yield from ((name, leaf) for leaf in pytree.tree_leaves(value, is_leaf=VisitedNodes()))

    def put_back(self) -> list[str]:
        """Restore everything.

        Returns:
            The names of the int and float attributes that had changed.
        """
        changed = [
            f"{name}.{key}" if name else key
            for name, (now, before) in self._scalars.items()
            for key in sorted(before)
            if key in now and repr(now[key]) != repr(before[key])  # by their text: a NaN equals itself
        ]
        for _, container, before in self._before:
            _put_back(container, before)
        for _, container, before in self._outside:
            _take_traced_out(container, before)
        self.clear_caches()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        for generator, state in zip(self._generators, self._random[2:], strict=True):
            _set_state(generator, state)
        return changed

    def __enter__(self) -> ModuleAttributes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        called_generator, changed = self.called_generator, self.put_back()
        if kind is not None:
            return
        if called_generator:
            warnings.warn(
                "the forward pass or the loss calls Python's or numpy's random generator, and a recorded step does "
                "not repeat those calls: use torch.rand, or pass the values with the batch",
                stacklevel=2,
            )
        if changed:
            warnings.warn(
                f"the forward pass changes {', '.join(map(repr, changed))}, a number of Python, which no recorded step "
                "does: register it by register_buffer, and change it by an operator such as add_",
                stacklevel=2,
            )

    def _random_states(self) -> list[Any]:
        return [random.getstate(), np.random.get_state(), *map(_state, self._generators)]


def _containers(name: str, container: Container) -> Iterator[tuple[str, Container]]:
    """Each container of attributes, nested ones too; modules and objects of other classes are not searched."""
    found, seen = [(name, container)], set[int]()
    while found:
        title, container = found.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        yield title, container
        if not isinstance(container, set):
            inner = [
                (_without_place(title, key, container), value)
                for key, value in _entries(container)
                if type(value) in CONTAINERS
            ]
            found += inner


def _without_place(title: str, key: object, container: Container) -> str:
    """The name of an entry; an entry of a list has the name of the list, and entries of torch's own dicts of a module
    have none."""
    if not isinstance(container, dict) or key in ("_buffers", "_parameters"):
        return title
    return f"{title}.{key}" if title else str(key)


def _traced_in(value: object) -> list[torch.Tensor]:
    """The tensors of a recording in an entry."""
    if isinstance(value, NEVER_TENSORS):
        return []
    leaves = pytree.tree_leaves(value, is_leaf=VisitedNodes())
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not is_plain(leaf)]


class VisitedNodes:
    """Returns for each node of a walk whether it was met before, as in a container that contains itself."""

    def __init__(self) -> None:
        self._met: dict[int, object] = {}
        """Nodes by id; the nodes are kept alive, since Python reuses the id of a dead object."""

    def __call__(self, node: object) -> bool:
        is_known = id(node) in self._met
        self._met[id(node)] = node
        return is_known


def _put_entry_back(container: dict[Any, Any], key: Any, before: Any) -> None:
    if key in before:
        container[key] = before[key]
    else:
        del container[key]


def _take_traced_out(container: Container, before: Any) -> None:
    """Remove what a recording left in a container that code outside of the module uses too."""
    for key, value in _entries(container):
        if type(value) in CONTAINERS or not _traced_in(value):
            continue
        if isinstance(container, dict):
            _put_entry_back(container, key, before)
        else:
            _put_back(container, before)
            return


def _entries(container: Container) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _put_back(container: Container, before: Any) -> None:
    now = _entries(container)
    then = _entries(before)
    if len(now) == len(then) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(now, then, strict=True)):
        return
    if isinstance(container, list):
        container[:] = before
    else:
        container.clear()
        container.update(before)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)

NEVER_TENSORS: Final = (str, int, float, type, FunctionType, ModuleType, nn.Module)
"""Types of most attributes, in which nothing is searched."""


@dataclass(slots=True)
class UserCaches:
    """Containers and functions of the user's files that may keep tensors between calls."""

    files: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """The globals of each file, with its name."""
    containers: list[tuple[str, Any]] = field(default_factory=list)
    """Dicts, lists and sets with their names, such as `net.MASKS`."""
    functions: list[Any] = field(default_factory=list)
    """Functions with a cache, such as `functools.cache` makes."""

    def add(self, title: str, value: Any) -> None:
        if isinstance(value, FUNCTION_CACHE):
            self.functions.append(value)
        elif type(value) in CONTAINERS and len(value) <= LARGEST:
            self.containers.append((title, value))


def find_caches(module: nn.Module, loss: object) -> UserCaches:
    """The caches that forward pass and loss can reach by the names in their files."""
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
    searched = set[FunctionType]()
    while functions:
        function = functions.pop()
        if function not in searched:
            searched.add(function)
            functions += _add_own_values(function, found)
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
    return is_user_code(file)


def _functions_of(cls: type, title: str, found: UserCaches) -> list[FunctionType]:
    """The methods of a class, whose other values are added to `found`."""
    methods = list[FunctionType]()
    for key, value in vars(cls).items():
        plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        found.add(f"{title}.{key}", plain)
        if isinstance(plain, FunctionType):
            methods.append(plain)
    return methods


def _add_own_values(function: FunctionType, found: UserCaches) -> list[FunctionType]:
    """The user's functions among the defaults of `function` and in its closure, whose other values are added to
    `found`."""
    held = [(f"{function.__qualname__}.{key}", value) for key, value in (function.__kwdefaults__ or {}).items()]
    held += [(f"a default of {function.__qualname__}", value) for value in function.__defaults__ or ()]
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a name that is not bound yet
            held.append((f"{function.__qualname__}.{key}", cell.cell_contents))
    for title, value in held:
        found.add(title, value)
    return [
        value
        for _, value in held
        if isinstance(value, FunctionType)
        if (home := sys.modules.get(value.__module__)) is not None and _is_of_user(home)
    ]


CONTAINERS: Final = (dict, OrderedDict, defaultdict, list, set)
"""Container types that are searched for caches; exact types only, so that subclasses of the user's are left alone."""

LARGEST: Final = 1000
"""The most entries of a cache; a larger container is data."""

FUNCTION_CACHE: Final = functools._lru_cache_wrapper
