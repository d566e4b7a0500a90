"""Put other tensors in the place of a module's parameters and buffers, wherever the module holds them.

torch's `functional_call` goes by names. Where one tensor has several (a module under two names, a weight that is an
attribute of its parent too) it puts the last name back wrongly (torch 2.13). Here a tensor is found by its identity, in
every module below, as an attribute and in lists, tuples and dicts that are attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Place = tuple[Any, Any, Any]
"""(a dict or a list, the key or index in it, what the module holds there: a tensor, or a tuple that has some)."""


@contextmanager
def swapped_tensors(
    module: nn.Module, tensors: dict[str, torch.Tensor], *, original: nn.Module | None = None
) -> Iterator[None]:
    """Let `module` hold `tensors` (by name, parameters and buffers) in the place of its own until the block ends.

    Where the block assigns to a parameter or a buffer (`self.count = self.count + 1`), `tensors` gets what it assigned.
    `original`: the module that has the names, where `module` is another one with the same tensors.
    """
    named = _named_tensors(original or module) | _named_tensors(module)
    new = {id(named[name]): tensor for name, tensor in tensors.items() if name in named}
    places = [place for part in module.modules() for place in _places(vars(part), new)]
    for container, key, held in places:
        container[key] = _swap(held, new)
    try:
        yield
    finally:
        assigned: dict[int, torch.Tensor] = {}
        for container, key, held in places:
            now = container.get(key) if isinstance(container, dict) else None
            if isinstance(held, torch.Tensor) and isinstance(now, torch.Tensor) and now is not new[id(held)]:
                assigned[id(held)] = now
            container[key] = held
        for name in tensors:
            if name in named and id(named[name]) in assigned:
                tensors[name] = assigned[id(named[name])]


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _places(attributes: Mapping[str, Any], wanted: Mapping[int, object]) -> list[Place]:
    """Where the tensors with the ids `wanted` are, in the attributes of a module and in containers among these."""
    found: list[Place] = []
    todo: list[Any] = [attributes]
    seen: set[int] = set()
    while todo:
        container = todo.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        for key, held in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if (isinstance(held, torch.Tensor) and id(held) in wanted) or (
                type(held) is tuple and _swap(held, wanted) is not held
            ):
                found.append((container, key, held))
            elif type(held) in (dict, list) and key != "_modules":
                todo.append(held)
    return found


def _swap(held: Any, new: Mapping[int, Any]) -> Any:
    """What stands for a tensor; for a tuple one with other tensors in it, or the tuple itself where it has none."""
    if not isinstance(held, tuple):
        return new.get(id(held), held)
    parts = tuple(_swap(part, new) if isinstance(part, torch.Tensor | tuple) else part for part in held)
    return held if all(part is old for part, old in zip(parts, held, strict=True)) else parts
