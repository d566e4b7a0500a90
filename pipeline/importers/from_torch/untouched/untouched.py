"""A caller's module stays as it was: what a run of it sets, adds or removes is undone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import nn

from pipeline.importers.from_torch.modules import STANDARD, every_module
from pipeline.importers.from_torch.untouched.reach import Held, in_reach, same
from pipeline.importers.from_torch.untouched.tables import tables_kept

__all__ = ["untouched"]

Attributes: TypeAlias = dict[str, Any]


@contextmanager
def untouched(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Afterwards each module in `module`, which are given, has the attributes, parameters, buffers and children that it
    had, and so has each plain object and container in reach of them, all by identity. Tables of their classes and files
    hold the tensors that they held.

    (torch.export puts back attributes of modules, and not what a forward registers or keeps elsewhere.)
    """
    modules = every_module(module)
    attributes = list(map(vars, modules))
    inside = in_reach([_beside(attributes)])  # as one list, so that what stands in the attributes is in there too
    with tables_kept(modules, inside), _attributes_kept(attributes), _kept(inside):
        yield modules


def _beside(attributes: Sequence[Attributes]) -> list[Any]:
    """What is in attributes that not every module has."""
    return [held[name] for held in attributes if len(held) > len(STANDARD) for name in held.keys() - STANDARD]


@contextmanager
def _kept(inside: Sequence[Held]) -> Iterator[None]:
    try:
        yield
    finally:
        for held in [held for held in inside if held.changed()]:
            held.put_back()


@contextmanager
def _attributes_kept(attributes: Sequence[Attributes]) -> Iterator[None]:
    """As `_kept`, and in one go: a model of experts has 90,000 modules."""
    parts = [part for held in attributes for part in (held, held["_buffers"], held["_parameters"], held["_modules"])]
    before = [part.copy() for part in parts]
    own = [(part, was) for part, was in zip(parts, before, strict=True) if len(was) > len(STANDARD)]
    try:
        yield
    finally:
        if _differ(parts, before) or not all(_is_same(part, was) for part, was in own):
            for part, was in zip(parts, before, strict=True):
                if not _is_same(part, was):
                    part.clear()
                    part.update(was)


def _differ(parts: Sequence[Attributes], before: Sequence[Attributes]) -> bool:
    """Quick where nothing has changed; of attributes of a user's own, `==` may say anything."""
    try:
        return parts != before
    except Exception:  # tensors, and whatever else has no plain answer
        return True


def _is_same(part: Attributes, was: Attributes) -> bool:
    return same(part, was) and same(part.values(), was.values())
