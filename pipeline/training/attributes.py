"""What a forward pass leaves in its modules, which a recording takes out again.

`self.mask = torch.ones(4)`, an entry of a dict that serves as a cache, a counter or the state of a generator of random
numbers would otherwise stay as the recording made them, and the module could not be called any more.
"""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipeline.training.known_values import is_plain

__all__ = ["ModuleAttributes"]

Container: TypeAlias = dict[Any, Any] | list[Any] | set[Any]


class ModuleAttributes:
    """The attributes of all modules below one, with what lies in dicts, lists and sets there, as they are now.

    The states of the generators of Python and numpy belong to it: the global ones, and those that modules hold.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before: list[tuple[str, Container, Container]] = []
        """(The name of the attribute, what holds it, a copy)."""
        self._numbers: dict[str, tuple[dict[str, Any], dict[str, int | float]]] = {}
        self._generators: list[Any] = []
        for name, part in module.named_modules():
            own = vars(part)
            self._numbers[name] = (own, {key: value for key, value in own.items() if isinstance(value, int | float)})
            for title, container in _containers(name, own):
                self._before.append((title, container, container.copy()))
                held = container.values() if isinstance(container, dict) else container
                self._generators += [value for value in held if isinstance(value, GENERATORS)]
        self._random = self._random_states()

    @property
    def drew_numbers(self) -> bool:
        """Whether Python or numpy has drawn random numbers since this was made."""
        return [repr(state) for state in self._random] != [repr(state) for state in self._random_states()]

    def take_out(self, is_constant: Callable[[torch.Tensor], bool]) -> None:
        """Take tensors of a recording out that are constants, such as a mask that is made at the first call.

        Others, and those in the place of a tensor, stay for the next recording, which refuses to read them.
        """
        for _, container, before in self._before:
            for key, value in _entries(container):
                leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
                traced = [leaf for leaf in leaves if not is_plain(leaf)]
                old = before.get(key) if isinstance(before, dict) else None
                if not traced or isinstance(old, torch.Tensor) or not all(map(is_constant, traced)):
                    continue
                if isinstance(container, dict) and key not in before:
                    del container[key]
                elif isinstance(container, dict):
                    container[key] = old
                else:
                    _put_back(container, before)

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of the attribute that holds a tensor; "" where there is none."""
        for title, container, _ in self._before:
            for key, value in _entries(container):
                if any(leaf is tensor for leaf in pytree.tree_leaves(value)):
                    return f"{title}.{key}" if title else str(key)
        return ""

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
        found += [
            (f"{title}.{key}" if title else str(key), value) for key, value in _entries(one) if type(value) in KINDS
        ]


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

KINDS: Final = (dict, OrderedDict, defaultdict, list, set)
"""The classes of what holds attributes, but no subclass of the user's."""
