"""Nodes and values matched by their names: what is left when nothing else leads on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from passes.provenance.same import Handle, Same, alone, handle_of, is_one_kind, name_of, result_of
from passes.provenance.weight_readers import PRODUCTS, find_weight_readers
from passes.provenance.wiring import ABSENT, Wiring

__all__ = ["NAMING"]


def _akin_by_name(same: Same) -> int:
    """Nodes of one name that share something else too: a value that they read, or a reader."""
    return _by_name(same, _share)


def _by_both_names(same: Same) -> int:
    """Nodes of one name whose outputs have one name too."""
    return _by_name(same, _have_both_names)


def _by_name(same: Same, agree: Callable[[Same, int, int], bool]) -> int:
    count = 0
    for handle, olds in ((name_of, same.olds_by_name), (result_of, same.olds_by_result)):
        news = alone(same.open_new(), lambda new, handle=handle: handle_of(same.after, new, handle))
        for key, new in news.items():
            old = olds.get(key, -1)
            if old < 0 or not same.may_be(new, old):
                continue
            if is_one_kind(same, same.after.items[new], same.before.items[old]) and agree(same, new, old):
                same.claim(new, old)
                count += 1
    return count


def _have_one(same: Same, new: int, old: int, handle: Handle) -> bool:
    name = handle(same.after.items[new])
    return bool(name) and name == handle(same.before.items[old])


def _have_both_names(same: Same, new: int, old: int) -> bool:
    return all(_have_one(same, new, old, handle) for handle in HANDLES)


def _share(same: Same, new: int, old: int) -> bool:
    before, after = same.before, same.after
    read = {same.alike(one) for one in before.items[old].needs if not _is_small(before, one)}
    if any(same.known(one) in read for one in after.items[new].needs if not _is_small(after, one)):
        return True
    readers = {user for one in before.items[old].makes if one != ABSENT for user, _ in before.users[one]}
    users = (user for one in after.items[new].makes if one != ABSENT for user, _ in after.users[one])
    return any(same.old_of[user] in readers for user in users)


def _is_small(wiring: Wiring, value: int) -> bool:
    return value in wiring.constants and value not in wiring.weights


def _values_by_name(same: Same) -> int:
    """Values whose maker was replaced, and whose name was kept."""
    count = 0
    for value, old in enumerate(same.value_of):
        old_value = same.old_values_by_name.get(same.after.names[value], -1) if old < 0 else -1
        if old_value >= 0 and (same.before.makers[old_value] < 0 or same.lost(same.before.makers[old_value])):
            same.value_of[value] = old_value
            count += 1
    return count


def _values_by_weights(same: Same) -> int:
    """What goes into and comes out of a new product, if lost nodes read its weights: a Gemm for a MatMul and an Add."""
    count = 0
    for new in same.open_new():
        item = same.after.items[new]
        if item.op[1] not in PRODUCTS:
            continue
        kin = find_weight_readers(same, item)
        count += _equate(same, item.makes, _going_out(same, kin))
        if all(same.value_of[value] >= 0 for value in item.needs if value in same.after.weights):
            # Else the node that read the unknown one is missing among the kin, and what it read would be too.
            data = [one for one in item.needs if one not in same.after.constants]
            count += _equate(same, data, _coming_in(same, kin))
    return count


def _coming_in(same: Same, kin: set[int]) -> set[int]:
    needs = {one for old in kin for one in same.before.items[old].needs}
    return {one for one in needs if one not in same.before.constants and same.before.makers[one] not in kin}


def _going_out(same: Same, kin: set[int]) -> set[int]:
    makes = {one for old in kin for one in same.before.items[old].makes if one != ABSENT}
    inner = {one for one in makes if any(user in kin for user, _ in same.before.users[one])}
    return makes - inner


def _equate(same: Same, values: Sequence[int], old_values: set[int]) -> int:
    if len(values) != 1 or len(old_values) != 1 or values[0] == ABSENT or same.value_of[values[0]] >= 0:
        return 0
    same.value_of[values[0]] = old_values.pop()
    return 1


def _twins_in_order(same: Same) -> int:
    """Nodes that compute the same, and that neither a reader nor a name tells apart."""
    count = 0
    for new in same.open_new():
        twins = same.open_twins(new)
        if twins:
            same.claim(new, min(twins))
            count += 1
    return count


HANDLES: Final = (name_of, result_of)

NAMING: Final = (
    _akin_by_name,
    _by_both_names,
    _values_by_name,
    _values_by_weights,
    _twins_in_order,
)
"""Tried in turn until one finds something; the most certain first."""
