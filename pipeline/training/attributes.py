"""What a forward pass leaves in its modules, which a recording takes out again.

`self.mask = torch.ones(4)`, an entry of a dict that serves as a cache, a counter or the state of a generator of random
numbers would otherwise stay as the recording made them, and the module could not be called any more. So would a tensor
in a dict or a cache of the user's files.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipeline.training.known_values import is_plain
from pipeline.training.user_caches import CONTAINERS, find_caches

Container: TypeAlias = dict[Any, Any] | list[Any] | set[Any]


class ModuleAttributes:
    """The attributes of all modules below one, with what lies in dicts, lists and sets there, as they are now.

    The states of the generators of Python and numpy belong to it: the global ones, and those that modules hold. Of
    what the user's files hold outside of modules, only tensors of a recording are taken out again.
    """

    def __init__(self, module: nn.Module, loss: object = None) -> None:
        self._before: list[tuple[str, Container, Container]] = []
        """(The name of the attribute, what holds it, a copy)."""
        outside = find_caches(module, loss)
        inner = [entry for name, held in outside.containers for entry in _containers(name, held)]
        self._outside = [(name, held, held.copy()) for name, held in (*outside.files, *inner)]
        self._caches = [(cache, cache.cache_info().misses) for cache in outside.functions]
        self._taken: dict[tuple[int, Any], tuple[dict[Any, Any], Container, Any]] = {}
        """{(id of a dict, key): (that dict, a copy of before, the constant of a recording)}, of the first recording."""
        self._numbers: dict[str, tuple[dict[str, Any], dict[str, int | float]]] = {}
        self._generators: list[Any] = []
        for name, part in module.named_modules():
            own = vars(part)
            self._numbers[name] = (own, {key: value for key, value in own.items() if isinstance(value, int | float)})
            for title, container in _containers(name, own):
                self._before.append((title, container, container.copy()))
                held = container.values() if isinstance(container, dict) else container
                self._generators += [value for value in held if isinstance(value, GENERATORS)]
        self._ids = {id(held) for _, held, _ in (*self._before, *self._outside)}
        self._random = self._random_states()

    @property
    def drew_numbers(self) -> bool:
        """Whether Python or numpy has drawn random numbers since this was made."""
        return [repr(state) for state in self._random] != [repr(state) for state in self._random_states()]

    def take_out(self, is_constant: Callable[[torch.Tensor], bool]) -> None:
        """Take tensors of a recording out that are constants, such as a mask that is made at the first call.

        Others, and those in the place of a tensor, stay for the next recording, which refuses to read them.
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
        """Clear the caches of functions that have been filled further since this was made."""
        for cache, misses in self._caches:
            if cache.cache_info().misses > misses:
                cache.cache_clear()

    @contextmanager
    def second_call(self, number_of: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Put plain tensors in the place of the constants that were taken out, as they are at a second call."""
        for (_, key), (container, _, value) in self._taken.items():
            container[key] = pytree.tree_map_only(torch.Tensor, number_of, value, is_leaf=MetNodes())
        try:
            yield
        finally:
            for (_, key), (container, before, _) in self._taken.items():
                if key in container:
                    _put_entry_back(container, key, before)

    @property
    def took_out(self) -> bool:
        """Whether a recording has left constants."""
        return bool(self._taken)

    def name_of(self, item: object) -> str:
        """The name of the attribute that holds a tensor or a generator; "" where there is none."""
        return next((name for name, leaf in self._leaves() if leaf is item), "")

    @property
    def left(self) -> list[str]:
        """The names of what holds tensors of a recording, where there was no tensor before."""
        return [
            _without_place(title, key, container)
            for title, container, before in (*self._before, *self._outside)
            for key, value in self._own_entries(container)
            if _traced_in(value)
            if not (isinstance(before, dict) and isinstance(before.get(key), torch.Tensor))
        ]

    def _own_entries(self, container: Container) -> list[tuple[Any, Any]]:
        """The entries of a container, without containers whose entries are looked at on their own."""
        return [(key, value) for key, value in _entries(container) if id(value) not in self._ids]

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        for title, container, _ in (*self._before, *self._outside):
            for key, value in self._own_entries(container):
                if not isinstance(value, NEVER_TENSORS):
                    name = _without_place(title, key, container)
                    yield from ((name, leaf) for leaf in pytree.tree_leaves(value, is_leaf=MetNodes()))

    def put_back(self) -> list[str]:
        """Put everything back; the names of the numbers that were others."""
        changed = [
            f"{name}.{key}" if name else key
            for name, (now, numbers) in self._numbers.items()
            for key in sorted(numbers)
            if key in now and repr(now[key]) != repr(numbers[key])  # by their text: a NaN equals itself
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
        drew_numbers, changed = self.drew_numbers, self.put_back()
        if kind is not None:
            return
        if drew_numbers:
            warnings.warn(
                "the forward pass or the loss draws random numbers of Python or numpy, which decided nothing in nine "
                "recordings, and decide nothing in a step: draw by torch, or give what they decide with the batch",
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
    """What holds attributes, below it too; modules and objects of other classes are not looked into."""
    found, seen = [(name, container)], set[int]()
    while found:
        title, one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield title, one
        if not isinstance(one, set):
            inner = [
                (_without_place(title, key, one), value) for key, value in _entries(one) if type(value) in CONTAINERS
            ]
            found += inner


def _without_place(title: str, key: object, container: Container) -> str:
    """The name of an entry; one of a list has that of the list, and torch's own dicts of a module have none."""
    if not isinstance(container, dict) or key in ("_buffers", "_parameters"):
        return title
    return f"{title}.{key}" if title else str(key)


def _traced_in(value: object) -> list[torch.Tensor]:
    """The tensors of a recording in an entry."""
    if isinstance(value, NEVER_TENSORS):
        return []
    leaves = pytree.tree_leaves(value, is_leaf=MetNodes())
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not is_plain(leaf)]


class MetNodes:
    """Says of each node on a way through containers whether it was met before, as one that lies in itself."""

    def __init__(self) -> None:
        self._met: dict[int, object] = {}
        """By id; all are kept, since the number of one that is gone is given again."""

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
    """Take what a recording has left out of a container that others use too."""
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
"""Of what most attributes are, and nothing is looked for in."""
