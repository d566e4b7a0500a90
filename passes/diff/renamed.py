"""What is only called otherwise, which is no difference."""

from __future__ import annotations

from collections.abc import Iterator

from passes.diff.found import Renaming
from passes.diff.matched import Matched
from passes.provenance.wiring import ABSENT, Wiring

__all__ = ["renamings"]


def renamings(matched: Matched) -> Iterator[Renaming]:
    before, after = matched.same.before, matched.same.after
    for old, new in matched.pairs():
        item, old_item = after.items[new], before.items[old]
        if item.node.name != old_item.node.name:
            yield Renaming("node", old_item.node.name, item.node.name)
        for one, other in zip(item.makes, old_item.makes, strict=False):
            if ABSENT not in (one, other) and after.names[one] != before.names[other]:
                yield Renaming("value", before.names[other], after.names[one])
        for one, other in zip(item.needs, old_item.needs, strict=False):
            if _is_initializer(after, one) and _is_initializer(before, other):
                is_same = after.value_meanings[one] == before.value_meanings[other]
                if is_same and after.names[one] != before.names[other]:
                    yield Renaming("initializer", before.names[other], after.names[one])


def _is_initializer(wiring: Wiring, value: int) -> bool:
    return value in wiring.shapes and wiring.makers[value] < 0
