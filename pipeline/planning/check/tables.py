"""The tables of a plan by themselves: unknown vids, missing or doubled storage, alignment, bounds, layouts."""

from __future__ import annotations

from pipeline.planning.check.places import root_of, span
from pipeline.planning.plan import ExecutionPlan

__all__ = ["GIVEN", "outside", "wrong_tables"]

GIVEN = ("input", "param", "state", "const")
"""Roles whose values exist before the first call."""


def wrong_tables(plan: ExecutionPlan) -> list[str]:
    """What is wrong with them; where a value lies can be worked out only if this is nothing."""
    known = set(range(len(plan.slots)))
    used = {vid for call in plan.calls for vid in (*call.in_vids, *call.out_vids)}
    used |= {
        *plan.inputs,
        *plan.outputs,
        *plan.updates,
        *plan.updates.values(),
        *plan.alias,
        *plan.alias.values(),
        *plan.offsets,
        *plan.layouts,
    }
    found = [f"vid {vid} has no slot" for vid in sorted(used - known)]
    found += [f"slot {at} describes vid {slot.vid}" for at, slot in enumerate(plan.slots) if slot.vid != at]
    found += [f"slot {slot.name!r} has named dims" for slot in plan.slots if not slot.spec.is_static]
    if len(plan.order) != len(plan.calls):
        found.append(f"{len(plan.order)} op ids for {len(plan.calls)} calls")
    if found:
        return found
    for slot in plan.slots:
        sources = [slot.role in GIVEN, slot.vid in plan.alias, slot.vid in plan.offsets]
        if sum(sources) != 1:
            found.append(f"{slot.name!r} (vid {slot.vid}, {slot.role}) has {sum(sources)} sources of storage, not one")
    for vid, offset in plan.offsets.items():
        end = offset + plan.slots[vid].spec.nbytes
        if offset % 64:
            found.append(f"{plan.slots[vid].name!r} (vid {vid}) at byte {offset} is not on a 64-byte boundary")
        if offset < 0 or end > plan.arena_bytes:
            found.append(f"{plan.slots[vid].name!r} (vid {vid}) ends at {end}, outside 0..{plan.arena_bytes}")
    entries = {entry.name: entry.spec for entry in plan.feed_signature}
    found += [
        f"input {plan.slots[vid].name!r} is not in the feed signature as it is in the slots"
        for vid in plan.inputs
        if entries.get(plan.slots[vid].name) != plan.slots[vid].spec
    ]
    return found + (_alias_cycles(plan) or _layouts(plan))


def _layouts(plan: ExecutionPlan) -> list[str]:
    """Only an alias has a layout; it has the sizes of its slot, and no negative stride."""
    found = []
    for vid, layout in plan.layouts.items():
        name, sizes = f"{plan.slots[vid].name!r} (vid {vid})", plan.slots[vid].spec.sizes
        if vid not in plan.alias:
            found.append(f"{name} has a layout, but storage of its own")
        if layout.sizes != sizes or len(layout.strides) != len(sizes) or min((0, *layout.strides)) < 0:
            found.append(f"the layout of {name} is {layout}; expected sizes {sizes}, one stride of 0 or more for each")
    return found


def outside(plan: ExecutionPlan) -> list[str]:
    """Aliases that leave the storage of their root."""
    found = []
    for vid in plan.alias:
        (first, end), numel = span(plan, vid), plan.slots[root_of(plan, vid)].spec.numel
        if first < 0 or end > max(numel, first):
            found.append(
                f"{plan.slots[vid].name!r} (vid {vid}) lies on elements {first} to {end} of a storage of {numel}"
            )
    return found


def _alias_cycles(plan: ExecutionPlan) -> list[str]:
    found = []
    for start in plan.alias:
        vid, steps = start, 0
        while vid in plan.alias and steps <= len(plan.alias):
            vid, steps = plan.alias[vid], steps + 1
        if steps > len(plan.alias):
            found.append(f"the aliases of {plan.slots[start].name!r} (vid {start}) run in a circle")
    return found
