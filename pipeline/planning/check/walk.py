"""Check a plan: first its tables, then a walk through its calls with a shadow memory.

The tables must know each vid, store each value once, and keep alignment, bounds and layouts. The planner reasons about
lifetimes; the checker does not use lifetimes. It keeps the set of values whose bytes are intact, removes the values
that each write destroys, and reports every read of a value that is not in the set.
"""

from __future__ import annotations

from passes.errors import check_type
from passes.suggest import join_first, plural
from pipeline.errors import InternalError
from pipeline.ir.graph import Role
from pipeline.lowering import KernelCall
from pipeline.ops import Kind, unpack, wrong_schema
from pipeline.planning.check.meaning import shows_its_operand
from pipeline.planning.check.shadow_memory import (
    ARENA,
    ByteRange,
    IntactValues,
    contiguous_strides,
    has_distinct_elements,
    place,
    roots_of,
    span,
    strides_of,
    wrong_residences,
)
from pipeline.planning.plan import ExecutionPlan, Slot

GIVEN = ("input", "param", "state", "const")
"""Roles whose values exist before the first call."""


def _wrong_tables(plan: ExecutionPlan) -> list[str]:
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
    found = [f"vid {vid} has no slot" for vid in sorted(used - known)] + _wrong_slots(plan) + _wrong_calls(plan)
    if plan.alignment < 1 or plan.alignment & (plan.alignment - 1):
        found.append(f"the alignment is {plan.alignment}; expected a power of two")
    found += [
        f"a body of call {at} has the alignment {body.alignment}; expected that of its plan, {plan.alignment}"
        for at, bodies in plan.bodies.items()
        for body in bodies
        if body.alignment != plan.alignment
    ]
    if found:
        return found
    cycles = _find_alias_cycles(plan)
    layouts = cycles or [*_wrong_layouts(plan), *_wrong_given_layouts(plan)]
    return [*_wrong_storage(plan), *_wrong_feed(plan), *layouts]


def _wrong_slots(plan: ExecutionPlan) -> list[str]:
    """Each slot describes the vid of its position, has fixed sizes, and a name of its own unless it is temporary."""
    found = [f"slot {at} describes vid {slot.vid}" for at, slot in enumerate(plan.slots) if slot.vid != at]
    found += [f"slot {slot.name!r} has named dims" for slot in plan.slots if not slot.spec.is_static]
    found += [
        f"slot {slot.name!r} has the sizes {slot.spec.shape} and the strides {slot.strides}"
        for slot in plan.slots
        if slot.strides is not None and len(slot.strides) != slot.spec.rank
    ]
    return found + [
        f"{len(slots)} slots are called {name!r}"
        for name, slots in _slots_by_name(plan).items()
        if len(slots) > 1 and any(slot.role != "tmp" for slot in slots)
    ]


def _wrong_calls(plan: ExecutionPlan) -> list[str]:
    """Each call has an op id and a kernel that takes it; bodies belong to a call."""
    found = [f"call {at}: {problem}" for at, call in enumerate(plan.calls) if (problem := _wrong_kernel(call))]
    if len(plan.order) != len(plan.calls):
        found.append(f"{plural(len(plan.order), 'op id')} for {plural(len(plan.calls), 'call')}")
    return found + [
        f"there are bodies of call {at}, which does not exist" for at in plan.bodies if at not in range(len(plan.calls))
    ]


def _wrong_storage(plan: ExecutionPlan) -> list[str]:
    """Each value has one source of storage; a place in the arena is aligned, and ends in the arena."""
    found = []
    for slot in plan.slots:
        sources = [slot.role in GIVEN, slot.vid in plan.alias, slot.vid in plan.offsets]
        if sum(sources) != 1:
            found.append(f"{slot.name!r} (vid {slot.vid}, {slot.role}) has {sum(sources)} sources of storage, not one")
    for vid, offset in plan.offsets.items():
        end = offset + plan.slots[vid].spec.nbytes
        if offset % plan.alignment:
            found.append(
                f"{plan.slots[vid].name!r} (vid {vid}) at byte {offset} is not on a {plan.alignment}-byte boundary"
            )
        if offset < 0 or end > plan.arena_bytes:
            found.append(f"{plan.slots[vid].name!r} (vid {vid}) ends at {end}, outside 0..{plan.arena_bytes}")
    return found


def _wrong_feed(plan: ExecutionPlan) -> list[str]:
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
        f"input {plan.slots[vid].name!r} is not in the feed signature"
        for vid in plan.inputs
        if plan.slots[vid].name not in entries
    ]
    for slot in plan.slots:
        entry, layout = entries.get(slot.name), plan.layouts.get(slot.vid)
        if entry is not None and slot.role in GIVEN and entry.strides != (layout and layout.strides):
            found.append(f"{slot.name!r} is fed with strides {entry.strides}, and its layout is {layout}")
    return found


def _slots_by_name(plan: ExecutionPlan) -> dict[str, list[Slot]]:
    slots: dict[str, list[Slot]] = {}
    for slot in plan.slots:
        slots.setdefault(slot.name, []).append(slot)
    return slots


def _wrong_kernel(call: KernelCall) -> str:
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


def _wrong_given_layouts(plan: ExecutionPlan) -> list[str]:
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
                f"{slot.role} {slot.name!r} has strides {strides} and offset {offset}; expected {wanted} and offset 0"
            )
    return found


def _same_strides(slot: Slot, strides: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether two strides address the same elements; strides of axes of size 1 do not matter."""
    sizes = slot.spec.sizes
    pairs = zip(sizes, strides, wanted, strict=True)
    return 0 in sizes or all(size == 1 or own == other for size, own, other in pairs)


def _wrong_layouts(plan: ExecutionPlan) -> list[str]:
    """Only an alias, an input or a stored value has a layout; it has the sizes of its slot, and no negative stride."""
    found = []
    for vid, layout in plan.layouts.items():
        name, sizes = f"{plan.slots[vid].name!r} (vid {vid})", plan.slots[vid].spec.sizes
        if vid not in plan.alias and plan.slots[vid].role not in GIVEN:
            found.append(f"{name} has a layout, but storage of its own")
        if layout.sizes != sizes or len(layout.strides) != len(sizes) or min((0, *layout.strides)) < 0:
            found.append(f"the layout of {name} is {layout}; expected sizes {sizes}, one stride of 0 or more for each")
    return found


def _wrong_size(plan: ExecutionPlan) -> list[str]:
    """An arena that is larger than its content by more than an alignment."""
    end = max((offset + plan.slots[vid].spec.nbytes for vid, offset in plan.offsets.items()), default=0)
    rounded = -(-end // plan.alignment) * plan.alignment
    if plan.arena_bytes <= rounded:
        return []
    return [f"the arena has {plan.arena_bytes} bytes, and its values end at {end}"]


def _wrong_peak(plan: ExecutionPlan) -> list[str]:
    """A stated lower bound of the arena that is not the peak of its values, counted call by call from the last
    reads."""
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
    if plan.live_bytes == peak:
        return []
    return [f"the plan says that {plan.live_bytes} bytes are alive at once; its calls need {peak}"]


def _find_aliases_outside(plan: ExecutionPlan) -> list[str]:
    """Aliases that extend beyond the storage of their root."""
    found, roots = [], roots_of(plan)
    for vid in plan.alias:
        (first, end), (_, room) = span(plan, vid), span(plan, roots[vid])
        if first < 0 or end > max(room, first):
            found.append(
                f"{plan.slots[vid].name!r} (vid {vid}) lies on elements {first} to {end} of a storage of {room}"
            )
    return found


def _find_alias_cycles(plan: ExecutionPlan) -> list[str]:
    cycles: dict[int, bool] = {}
    """By vid, whether its alias chain is a cycle, where this is known already."""
    for start in plan.alias:
        vid, way = start, set[int]()
        while vid in plan.alias and vid not in cycles and vid not in way:
            way.add(vid)
            vid = plan.alias[vid]
        cycles.update(dict.fromkeys(way, vid in way or cycles.get(vid, False)))
    return [
        f"the aliases of {plan.slots[start].name!r} (vid {start}) run in a cycle"
        for start in plan.alias
        if cycles[start]
    ]


LISTED = 20


def check_plan(plan: ExecutionPlan) -> None:
    """Check a plan by rules that share no code with the planner.

    Args:
        plan: the plan of a graph; the plans of its bodies are checked too.

    Raises:
        UsageError: `plan` is no ExecutionPlan.
        InternalError: the plan breaks a rule; the message lists the first of what is wrong.
    """
    check_type(plan, ExecutionPlan, "check_plan", "an ExecutionPlan, such as the plan of a compiled program")
    found = violations(plan)
    if found:
        raise InternalError(
            f"the plan of graph {plan.graph_name!r} breaks {plural(len(found), 'rule')}:\n  "
            + join_first(found, LISTED, "\n  and {} more", "\n  ")
            + "\nThis is a bug in the planner; please report it with the model."
        )


def violations(plan: ExecutionPlan) -> list[str]:
    """Everything that is wrong with the plan, in the order of the walk; empty for a good one."""
    tables = _wrong_tables(plan)
    if tables:
        return tables  # broken tables give no places
    in_bodies = [
        f"in body {number} of call {at}: {violation}"
        for at, bodies in plan.bodies.items()
        for number, body in enumerate(bodies)
        for violation in violations(body)
    ]
    memory = _Memory(plan)
    for index, call in enumerate(plan.calls):
        memory.read(call.in_vids, f"call {index} {_kind(call)}")
        for out in call.out_vids:
            memory.write(index, call, out)
    memory.end()
    return memory.found + in_bodies or [*_wrong_size(plan), *_wrong_peak(plan), *wrong_residences(plan)]


class _Memory:
    """Which values are intact while the calls run, and what went wrong so far."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        self.found = _find_aliases_outside(plan)
        self._roots = roots_of(plan)
        self._intact = IntactValues()
        for slot in plan.slots:
            if slot.role in GIVEN:
                self._intact.add(slot.vid, self._place(slot.vid))
        self._struck: dict[int, int] = {}
        self._made: set[int] = set()

    def read(self, vids: tuple[int, ...], reader: str) -> None:
        for vid in vids:
            if vid in self._intact:
                continue
            fate = f"overwritten by call {self._struck[vid]}" if vid in self._struck else "not computed yet"
            self.found.append(f"{reader} reads {self._name(vid)}, which is {fate}")

    def write(self, index: int, call: KernelCall, out: int) -> None:
        where = f"call {index} {_kind(call)}"
        if out in self._made or self.plan.slots[out].role in GIVEN:
            self.found.append(f"{where} writes {self._name(out)}, which already has a value")
        self._made.add(out)
        mine = self._place(out)
        source = self.plan.alias.get(out)
        if source is not None and self._is_view(call, source):
            if not shows_its_operand(self.plan, call, out, source):
                self.found.append(f"{where}: {self._name(out)} does not lie on the elements of {self._name(source)}")
            self._intact.add(out, mine)
            return
        if source is not None and not self._is_inplace(call, out, source):
            self.found.append(f"{where} may not put {self._name(out)} on the storage of {self._name(source)}")
        if not self._is_in_rows(out):
            self.found.append(f"{where} writes {self._name(out)}, whose elements do not lie row after row")
        for vid in self._intact.destroy(mine):
            self._strike(vid, index, call, where, allowed=source)
        self._intact.add(out, mine)

    def end(self) -> None:
        """Check that the outputs are intact after the last call, and share no storage with other values."""
        self.read(self.plan.outputs, "the caller")
        for vid, after in self.plan.updates.items():
            self.read((after,), f"the update of {self._name(vid)}")
        self.found += [
            f"{self._name(slot.vid)} is never computed"
            for slot in self.plan.slots
            if slot.role not in GIVEN and slot.vid not in self._made
        ]
        computed = [vid for vid in dict.fromkeys(self.plan.outputs) if self.plan.slots[vid].role not in GIVEN]
        places = {vid: self._place(vid) for vid in computed}
        for count, (vid, mine) in enumerate(places.items()):
            if mine.region != ARENA:
                self.found.append(f"output {self._name(vid)} shares the storage of {self._name(mine.region)}")
            shared = [output for output in computed[:count] if places[output].overlaps(mine)]
            self.found += [f"outputs {self._name(output)} and {self._name(vid)} share storage" for output in shared]

    def _strike(self, vid: int, index: int, call: KernelCall, where: str, *, allowed: int | None) -> None:
        if self.plan.slots[vid].role in GIVEN and not self._is_changed(vid):
            self.found.append(f"{where} writes over {self._name(vid)}, which is not the plan's to change")
        elif vid in call.out_vids:
            self.found.append(f"{where} writes two outputs to the same bytes, {self._name(vid)} is one")
        elif vid in call.in_vids and (vid != allowed or call.in_vids.count(vid) > 1):
            self.found.append(f"{where} writes over its operand {self._name(vid)} while it reads it")
        self._struck[vid] = index

    def _place(self, vid: int) -> ByteRange:
        return place(self.plan, vid, self._roots[vid])

    def _is_changed(self, vid: int) -> bool:
        """Whether `vid` is a param or state with an update, which may be overwritten after its last reader."""
        return self.plan.slots[vid].role in (Role.PARAM, Role.STATE) and vid in self.plan.updates

    def _is_view(self, call: KernelCall, source: int) -> bool:
        """All outputs or none: if one of them is not a view, the kernel runs, and writes every one."""
        position = call.constraints.get("view")
        if not isinstance(position, int) or source != call.in_vids[position]:
            return False
        slots = self.plan.slots
        return all(
            self.plan.alias.get(vid) == source and slots[vid].spec.dtype == slots[source].spec.dtype
            for vid in call.out_vids
        )

    def _is_inplace(self, call: KernelCall, out: int, source: int) -> bool:
        positions = call.constraints.get("inplace", ())
        legal = [call.in_vids[int(position)] for position in positions] if isinstance(positions, tuple) else []
        slots = self.plan.slots
        alike = slots[out].spec == slots[source].spec and strides_of(self.plan, out) == strides_of(self.plan, source)
        own = self._overwrites(call).get(out) == source
        return (own or (out == call.out_vids[0] and source in legal)) and alike and not _permutes_axes(call)

    def _overwrites(self, call: KernelCall) -> dict[int, int]:
        """By output, the operand that the output may be written over."""
        positions = call.constraints.get("overwrites", ())
        if not isinstance(positions, tuple) or len(positions) != len(call.out_vids):
            return {}
        return {out: call.in_vids[int(at)] for out, at in zip(call.out_vids, positions, strict=True)}

    def _is_in_rows(self, vid: int) -> bool:
        sizes = self.plan.slots[vid].spec.sizes
        strides, _ = strides_of(self.plan, vid)
        return 0 in sizes or all(
            size == 1 or own == row for size, own, row in zip(sizes, strides, contiguous_strides(sizes), strict=True)
        )

    def _name(self, vid: int) -> str:
        slot = self.plan.slots[vid]
        return f"{slot.name!r} (vid {vid}, {slot.role})"


def _permutes_axes(call: KernelCall) -> bool:
    """Whether the kernel permutes the axes of a result, so that the result has other strides than an operand."""
    fields = unpack(call.attr_schema, call.attr_blob)
    return any(fields.get("orders", ())) or bool(fields.get("order", ()))


def _kind(call: KernelCall) -> str:
    return Kind(call.kind_id).name if call.kind_id in Kind.__members__.values() else f"kind {call.kind_id}"
