"""Where a node that is in both models reads something else."""

from __future__ import annotations

from itertools import zip_longest

from passes.diff.found import InputChange
from passes.diff.initializers import Stored
from passes.diff.labels import label_of
from passes.diff.matched import Matched
from passes.provenance.wiring import ABSENT, Item, Wiring

__all__ = ["input_changes", "is_same_value"]


def input_changes(matched: Matched, item: Item, old_item: Item) -> tuple[list[InputChange], list[Stored]]:
    """The places where a node reads something else; as pairs of ids, stored tensors that have other values there, and
    constants that one model stores and the other computes."""
    same = matched.same
    changed, stored = [], []
    for position, (old, new) in enumerate(zip_longest(old_item.needs, item.needs, fillvalue=ABSENT)):
        if old in same.before.shapes and new in same.after.shapes:
            meaning, old_meaning = same.after.value_meanings[new], same.before.value_meanings[old]
            if meaning == old_meaning:
                continue
            if meaning not in matched.old_meanings or same.after.names[new] == same.before.names[old]:
                stored.append((old, new))
                continue
        elif _is_stored_and_computed(matched, old, new):
            stored.append((old, new))
            continue
        elif (new != ABSENT and old != ABSENT and is_same_value(matched, old, new)) or new == old == ABSENT:
            continue
        before, after = _name(same.before, old), _name(same.after, new)
        inner = position - max(len(item.node.input), len(old_item.node.input))
        what = f"input {position}" if inner < 0 else f"result {inner} of its bodies"
        changed.append(InputChange(label_of(item.node), position, before, after, what))
    return changed, stored


def _is_stored_and_computed(matched: Matched, old: int, new: int) -> bool:
    """Whether one of two constants is stored, and a node that has no counterpart computes the other."""
    same = matched.same
    if ABSENT in (old, new) or (old in same.before.shapes) == (new in same.after.shapes):
        return False
    if new in same.after.shapes:
        return old in same.before.constants and same.lost(same.before.makers[old])
    return new in same.after.constants and same.old_of[same.after.makers[new]] < 0


def is_same_value(matched: Matched, old: int, new: int) -> bool:
    """Whether both are one value, or follow from nodes that came or went: those are told themselves."""
    same = matched.same
    known = same.known(new)
    if same.before.makers[old] < 0 and same.after.makers[new] < 0:  # inputs, and what is stored
        return same.before.value_meanings[old] == same.after.value_meanings[new]
    if known >= 0:
        return known == same.alike(old) or known in _behind_lost(matched, old)
    maker = same.after.makers[new]
    return maker >= 0 and same.old_of[maker] < 0


def _behind_lost(matched: Matched, value: int) -> set[int]:
    """What a value was computed from by nodes that are gone: with them gone, that stands in its place."""
    same, found, front = matched.same, set(), [value]
    while front:
        maker = same.before.makers[front.pop()]
        if maker >= 0 and same.lost(maker):
            needs = [one for one in same.before.items[maker].needs if one != ABSENT and same.alike(one) not in found]
            found.update(map(same.alike, needs))
            front.extend(needs)
    return found


def _name(wiring: Wiring, value: int) -> str:
    return "" if value == ABSENT else wiring.names[value]
