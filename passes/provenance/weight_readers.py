"""Which lost nodes put the weights of a made product to use, also where layers share weights or have equal ones."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from passes.provenance.same import Same
from passes.provenance.wiring import ABSENT, Item

__all__ = ["PRODUCTS", "find_weight_readers"]

PRODUCTS: Final = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
"""Ops that may take in a bias, and as a rule nothing else. What another op takes in, its weights do not tell."""


def find_weight_readers(same: Same, item: Item, among: AbstractSet[int] | None = None) -> set[int]:
    """The lost nodes that read the weights of `item`, a node after the pass; empty where it is not certain which.

    A weight tells that if one node reads it, under any of its names: layers may share it, and a pass makes one of
    equal ones, such as biases of zeros. Of the readers of the others it is the one beside those that are certain.
    Only nodes `among` these come into question, if it is given.
    """
    weights = (same.value_of[value] for value in item.needs if value in same.after.weights)
    readings = [_readers_of(same, value) for value in weights if value >= 0]
    if among is not None:
        readings = [readers & among for readers in readings]
    certain = {old for readers in readings if len(readers) == 1 for old in readers}
    found = set(certain)
    for readers in readings:
        beside = {old for old in readers if old in certain or any(_is_beside(same, old, one) for one in certain)}
        if len(beside) != 1:
            return set()
        found |= beside
    return found if all(map(same.lost, found)) else set()


def _readers_of(same: Same, old_value: int) -> set[int]:
    """The nodes that put a weight to use, by whatever name; a node that makes another constant of it is passed by."""
    before = same.before
    found: set[int] = set()
    seen: set[int] = set()
    front = [old_value]
    while front:
        for value in same.equals(front.pop()):
            if value in seen:
                continue
            seen.add(value)
            for user, _ in before.users[value]:
                made = [one for one in before.items[user].makes if one != ABSENT]
                if all(one in before.constants for one in made):
                    front.extend(made)
                else:
                    found.add(user)
    return found


def _is_beside(same: Same, old: int, other: int) -> bool:
    """Whether one of the two nodes reads what the other one makes."""
    one, two = same.before.items[old], same.before.items[other]
    return not set(one.makes).isdisjoint(two.needs) or not set(two.makes).isdisjoint(one.needs)
