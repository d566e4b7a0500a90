"""Check a memory map: every value is somewhere at every call that needs it, and nothing lies over it meanwhile.

What a value's life is, is derived here from the calls, and the planner's half calls are not used: at each boundary
between two calls the places that a move reads or writes are added to what lies there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from pipeline.planning.check.shadow_memory import roots_of
from pipeline.planning.memory_map import MemoryMap, Residence
from pipeline.planning.plan import ExecutionPlan


def wrong_residences(plan: ExecutionPlan) -> list[str]:
    """What is wrong with the memory map of a plan whose tables are right; nothing where it has none."""
    if plan.memory is None:
        return []
    tables = [*_wrong_tables(plan, plan.memory)]
    return tables or [*_wrong_lives(plan, plan.memory), *_collisions(plan, plan.memory)]


def _wrong_tables(plan: ExecutionPlan, memory: MemoryMap) -> Iterator[str]:
    names = [region.name for region in memory.regions]
    if len({*names}) != len(names) or "" in names or not names:
        yield f"the regions are called {names}; expected names, each once"
    for at, region in enumerate(memory.regions):
        if region.nbytes is None:
            if at < len(memory.regions) - 1:
                yield f"region {region.name!r} has no size; only the last one may be as large as it has to be"
        elif not 0 <= region.nbytes < 2**63:
            yield f"region {region.name!r} has {region.nbytes} bytes"
    for one in memory.residences:
        if one.root not in plan.offsets or one.region not in range(len(memory.regions)):
            yield f"{one} is of no value of the arena, or in no region"
            continue
        end, room = one.offset + plan.slots[one.root].spec.nbytes, memory.regions[one.region].nbytes
        if one.offset < 0 or one.offset % 64 or (room is not None and end > room):
            yield f"{_name(plan, one)} is at bytes {one.offset} to {end} of {names[one.region]!r}, which has {room}"
    for root, region in memory.pins.items():
        held = [one.region for one in memory.residences if one.root == root]
        if not held or {*held} != {region}:
            yield f"vid {root} is pinned to region {region}, and lies in {held}"
    order = [(one.root, one.first) for one in memory.residences]
    if order != sorted(order):
        yield "the residences are not in the order of values and time"


def _wrong_lives(plan: ExecutionPlan, memory: MemoryMap) -> Iterator[str]:
    """The residences of each value follow upon one another, from the call that makes it to the last that needs it."""
    roots = roots_of(plan)
    needed: dict[int, list[int]] = {}
    for at, call in enumerate(plan.calls):
        for vid in (*call.in_vids, *call.out_vids):
            needed.setdefault(roots[vid], []).append(at)
    for vid in (*plan.outputs, *plan.updates.values()):
        needed.setdefault(roots[vid], []).append(len(plan.calls))
    held: dict[int, list[Residence]] = {}
    for one in memory.residences:
        held.setdefault(one.root, []).append(one)
    for root in plan.offsets:
        spans = [(one.first, one.last) for one in held.get(root, [])]
        if not plan.slots[root].spec.nbytes:
            if spans:
                yield f"{plan.slots[root].name!r} (vid {root}) has no bytes, and is in a region"
            continue
        wanted = (min(needed[root]), max(needed[root]))
        ends = [last + 1 for _, last in spans[:-1]]
        is_whole = bool(spans) and ends == [first for first, _ in spans[1:]] and all(a <= b for a, b in spans)
        if not is_whole or (spans[0][0], spans[-1][1]) != wanted:
            yield f"{plan.slots[root].name!r} (vid {root}) is held in the calls {spans}; it is needed in {wanted}"


def _collisions(plan: ExecutionPlan, memory: MemoryMap) -> Iterator[str]:
    """Two values on the same bytes of a region: in a call, or before one where a move reads or writes them."""
    taken: dict[int, list[tuple[int, int, int]]] = {}
    """By region, in order: first byte and end of each residence that is there, and its index. They do not overlap:
    one that does is reported, and not added."""
    events = [(time, is_begin, at) for at in range(len(memory.residences)) for time, is_begin in _times(memory, at)]
    for _, is_begin, at in sorted(events):
        one = memory.residences[at]
        here = taken.setdefault(one.region, [])
        mine = (one.offset, one.offset + plan.slots[one.root].spec.nbytes, at)
        place = bisect_left(here, mine)
        if not is_begin:
            if here[place : place + 1] == [mine]:
                del here[place]
            continue
        others = [
            other for other in here[max(place - 1, 0) : place + 1] if max(mine[0], other[0]) < min(mine[1], other[1])
        ]
        for *_, other in others:
            names = f"{_name(plan, memory.residences[other])} and {_name(plan, one)}"
            yield f"{names} share bytes of region {one.region} at call {one.first}"
        if not others:
            here.insert(place, mine)


def _times(memory: MemoryMap, at: int) -> tuple[tuple[int, bool], tuple[int, bool]]:
    """When the place of a residence is taken (True), and when it is free again: call c is time 2c + 1, and what is
    moved before it moves at time 2c."""
    one = memory.residences[at]
    before = memory.residences[at - 1] if at else None
    after = memory.residences[at + 1] if at + 1 < len(memory.residences) else None
    arrives = before is not None and before.root == one.root
    leaves = after is not None and after.root == one.root
    return (2 * one.first + (0 if arrives else 1), True), (2 * one.last + (3 if leaves else 2), False)


def _name(plan: ExecutionPlan, one: Residence) -> str:
    return f"{plan.slots[one.root].name!r} (vid {one.root})"
