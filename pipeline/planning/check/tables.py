"""Check the tables of a plan: unknown vids, missing or double storage, alignment, bounds, layouts."""

from __future__ import annotations

from passes.suggest import plural
from pipeline.errors import InternalError
from pipeline.lowering import KernelCall
from pipeline.ops import unpack, wrong_schema
from pipeline.planning.check.shadow_memory import contiguous_strides, has_distinct_elements, roots_of, span
from pipeline.planning.plan import ExecutionPlan, Slot

GIVEN = ("input", "param", "state", "const")
"""Roles whose values exist before the first call."""


def wrong_tables(plan: ExecutionPlan) -> list[str]:
    """What is wrong with the tables; the bytes of values can be derived only if this is empty."""
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
    found += [
        f"slot {slot.name!r} has the sizes {slot.spec.shape} and the strides {slot.strides}"
        for slot in plan.slots
        if slot.strides is not None and len(slot.strides) != slot.spec.rank
    ]
    if len(plan.order) != len(plan.calls):
        found.append(f"{plural(len(plan.order), 'op id')} for {plural(len(plan.calls), 'call')}")
    found += [
        f"{len(slots)} slots are called {name!r}"
        for name, slots in _by_name(plan).items()
        if len(slots) > 1 and any(slot.role != "tmp" for slot in slots)
    ]
    found += [f"call {at}: {problem}" for at, call in enumerate(plan.calls) if (problem := _kernel(call))]
    found += [
        f"there are bodies of call {at}, which does not exist" for at in plan.bodies if at not in range(len(plan.calls))
    ]
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
    return found + _feed(plan) + (_alias_cycles(plan) or [*_layouts(plan), *_given_layouts(plan)])


def _feed(plan: ExecutionPlan) -> list[str]:
    """The feed signature has every input, and the specs and strides of the slots."""
    entries = {entry.name: entry for entry in plan.feed_signature}
    given = {slot.name: slot.spec for slot in plan.slots if slot.role in GIVEN}
    found = [
        f"the feed signature has {entry.name!r}, which is no input and no weight, or is one of another spec"
        for entry in plan.feed_signature
        if given.get(entry.name) != entry.spec
    ]
    if len(entries) != len(plan.feed_signature):
        found.append("the feed signature has a name twice")
    found += [
        f"input {plan.slots[vid].name!r} is not in the feed signature as it is in the slots"
        for vid in plan.inputs
        if plan.slots[vid].name not in entries or entries[plan.slots[vid].name].spec != plan.slots[vid].spec
    ]
    for slot in plan.slots:
        entry, layout = entries.get(slot.name), plan.layouts.get(slot.vid)
        if entry is not None and slot.role in GIVEN and entry.strides != (layout and layout.strides):
            found.append(f"{slot.name!r} is fed with strides {entry.strides}, and its layout is {layout}")
    return found


def _by_name(plan: ExecutionPlan) -> dict[str, list[Slot]]:
    slots: dict[str, list[Slot]] = {}
    for slot in plan.slots:
        slots.setdefault(slot.name, []).append(slot)
    return slots


def _kernel(call: KernelCall) -> str:
    """What is wrong with a call by itself: its kind, schema and blob, and the operands that its constraints name."""
    if problem := wrong_schema(call.kind_id, call.attr_schema):
        return problem
    try:
        unpack(call.attr_schema, call.attr_blob)
    except InternalError as error:
        return str(error)
    view, inplace = call.constraints.get("view", 0), call.constraints.get("inplace", ())
    named = [view] if "view" in call.constraints else []
    named += inplace if isinstance(inplace, tuple) else [inplace]
    if any(type(item) is not int or item not in range(len(call.in_vids)) for item in named):
        return f"its constraints {dict(call.constraints)} name operands that it does not have"
    return ""


def _given_layouts(plan: ExecutionPlan) -> list[str]:
    """Inputs and stored values keep their traced strides, or are contiguous where elements shared a place."""
    found = []
    for slot in plan.slots:
        if slot.role not in GIVEN:
            continue
        sizes, layout = slot.spec.sizes, plan.layouts.get(slot.vid)
        wanted = (
            slot.strides
            if slot.strides is not None and has_distinct_elements(sizes, slot.strides)
            else contiguous_strides(sizes)
        )
        strides, offset = (contiguous_strides(sizes), 0) if layout is None else (layout.strides, layout.offset)
        if offset or not _same_strides(slot, strides, wanted):
            found.append(
                f"{slot.role} {slot.name!r} lies with strides {strides} from {offset} on; expected {wanted} from 0 on"
            )
    return found


def _same_strides(slot: Slot, strides: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether two strides mean the same; those of axes of size 1 do not matter."""
    sizes = slot.spec.sizes
    pairs = zip(sizes, strides, wanted, strict=True)
    return 0 in sizes or all(size == 1 or own == other for size, own, other in pairs)


def _layouts(plan: ExecutionPlan) -> list[str]:
    """Only an alias, an input or a stored value has a layout; it has the sizes of its slot, and no negative stride."""
    found = []
    for vid, layout in plan.layouts.items():
        name, sizes = f"{plan.slots[vid].name!r} (vid {vid})", plan.slots[vid].spec.sizes
        if vid not in plan.alias and plan.slots[vid].role not in GIVEN:
            found.append(f"{name} has a layout, but storage of its own")
        if layout.sizes != sizes or len(layout.strides) != len(sizes) or min((0, *layout.strides)) < 0:
            found.append(f"the layout of {name} is {layout}; expected sizes {sizes}, one stride of 0 or more for each")
    return found


def unused_bytes(plan: ExecutionPlan) -> list[str]:
    """An arena that is larger than what lies in it, by more than an alignment."""
    end = max((offset + plan.slots[vid].spec.nbytes for vid, offset in plan.offsets.items()), default=0)
    rounded = -(-end // 64) * 64
    return [f"the arena has {plan.arena_bytes} bytes, and its values end at {end}"] * (plan.arena_bytes > rounded)


def wrong_peak(plan: ExecutionPlan) -> list[str]:
    """A lower bound of the arena that is not what its values take: counted call by call, from who is read last."""
    roots = roots_of(plan)
    last = {roots[vid]: at for at, call in enumerate(plan.calls) for vid in (*call.out_vids, *call.in_vids)}
    last |= {roots[vid]: len(plan.calls) for vid in (*plan.outputs, *plan.updates.values())}
    alive, peak, seen = 0, 0, set[int]()
    ends: dict[int, int] = {}
    for at, call in enumerate(plan.calls):
        for root in ({roots[vid] for vid in call.out_vids} & plan.offsets.keys()) - seen:
            seen.add(root)
            alive += plan.slots[root].spec.nbytes
            ends[last[root]] = ends.get(last[root], 0) + plan.slots[root].spec.nbytes
        peak = max(peak, alive)
        alive -= ends.pop(at, 0)
    return [f"the plan says that {plan.live_bytes} bytes are alive at once; its calls need {peak}"] * (
        plan.live_bytes != peak
    )


def outside(plan: ExecutionPlan) -> list[str]:
    """Aliases that extend beyond the storage of their root."""
    found, roots = [], roots_of(plan)
    for vid in plan.alias:
        (first, end), (_, room) = span(plan, vid), span(plan, roots[vid])
        if first < 0 or end > max(room, first):
            found.append(
                f"{plan.slots[vid].name!r} (vid {vid}) lies on elements {first} to {end} of a storage of {room}"
            )
    return found


def _alias_cycles(plan: ExecutionPlan) -> list[str]:
    circles: dict[int, bool] = {}
    """By vid, whether its alias chain is a cycle, as far as it is known."""
    for start in plan.alias:
        vid, way = start, set[int]()
        while vid in plan.alias and vid not in circles and vid not in way:
            way.add(vid)
            vid = plan.alias[vid]
        circles.update(dict.fromkeys(way, vid in way or circles.get(vid, False)))
    return [
        f"the aliases of {plan.slots[start].name!r} (vid {start}) run in a circle"
        for start in plan.alias
        if circles[start]
    ]
