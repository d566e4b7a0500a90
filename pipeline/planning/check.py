"""Judges a plan by walking through it with a shadow memory. Shares no code with the planner, and always runs.

The planner reasons about lifetimes. The checker has none: it keeps the values whose bytes are intact, lets every
call write, strikes out what the write destroyed, and objects when something reads a value that was struck out.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import InternalError
from pipeline.lowering import KernelCall, Kind
from pipeline.planning.plan import ExecutionPlan

__all__ = ["check_plan", "violations"]

ARENA = -1
GIVEN = ("input", "param", "state", "const")
LISTED = 20


def check_plan(plan: ExecutionPlan) -> None:
    """Return when the plan can be trusted.

    Raises:
        InternalError: it cannot; the message lists what is wrong.
    """
    found = violations(plan)
    if found:
        more = [f"and {len(found) - LISTED} more"] if len(found) > LISTED else []
        raise InternalError(
            f"the plan of graph {plan.graph_name!r} breaks {len(found)} rules:\n  "
            + "\n  ".join([*found[:LISTED], *more])
            + "\nThis is a bug in the planner; please report it with the model."
        )


def violations(plan: ExecutionPlan) -> list[str]:
    """Everything that is wrong with the plan, in the order of the walk; empty for a good one."""
    tables = _tables(plan)
    if tables:
        return tables  # places cannot be worked out from broken tables
    memory = _Memory(plan)
    for index, call in enumerate(plan.calls):
        memory.read(call.in_vids, f"call {index} {_kind(call)}")
        for out in call.out_vids:
            memory.write(index, call, out)
    memory.leave()
    return memory.found


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes [start, end) of a region: the arena, or the storage of one external value (region = its vid)."""

    region: int
    start: int
    end: int

    def overlaps(self, other: _Place) -> bool:
        return self.region == other.region and max(self.start, other.start) < min(self.end, other.end)


class _Memory:
    """Which values are intact while the calls run, and what went wrong so far."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        self.found: list[str] = []
        self._intact = {slot.vid: self._place(slot.vid) for slot in plan.slots if slot.role in GIVEN}
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
        place = self._place(out)
        source = self.plan.alias.get(out)
        if source is not None and self._is_view(call, out, source):
            self._intact[out] = place
            return
        if source is not None and not self._is_inplace(call, out, source):
            self.found.append(f"{where} may not put {self._name(out)} on the storage of {self._name(source)}")
        for vid in [vid for vid, taken in self._intact.items() if taken.overlaps(place)]:
            self._strike(vid, index, call, where, allowed=source)
        self._intact[out] = place

    def leave(self) -> None:
        """The outputs are intact, and nobody else's storage."""
        self.read(self.plan.outputs, "the caller")
        self.found += [
            f"{self._name(slot.vid)} is never computed"
            for slot in self.plan.slots
            if slot.role not in GIVEN and slot.vid not in self._made
        ]
        computed = [vid for vid in dict.fromkeys(self.plan.outputs) if self.plan.slots[vid].role not in GIVEN]
        for count, vid in enumerate(computed):
            place = self._place(vid)
            if place.region != ARENA:
                self.found.append(f"output {self._name(vid)} shares the storage of {self._name(place.region)}")
            twins = [other for other in computed[:count] if self._place(other).overlaps(place)]
            self.found += [f"outputs {self._name(other)} and {self._name(vid)} share storage" for other in twins]

    def _strike(self, vid: int, index: int, call: KernelCall, where: str, *, allowed: int | None) -> None:
        if self.plan.slots[vid].role in GIVEN:
            self.found.append(f"{where} writes over {self._name(vid)}, which is not the plan's to change")
        elif vid in call.out_vids:
            self.found.append(f"{where} writes two outputs to the same bytes, {self._name(vid)} is one")
        elif vid in call.in_vids and (vid != allowed or call.in_vids.count(vid) > 1):
            self.found.append(f"{where} writes over its operand {self._name(vid)} while it reads it")
        del self._intact[vid]
        self._struck[vid] = index

    def _is_view(self, call: KernelCall, out: int, source: int) -> bool:
        position = call.constraints.get("view")
        if not isinstance(position, int) or (out, source) != (call.out_vids[0], call.in_vids[position]):
            return False
        mine, theirs = self.plan.slots[out].spec, self.plan.slots[source].spec
        return (mine.dtype, mine.nbytes) == (theirs.dtype, theirs.nbytes)

    def _is_inplace(self, call: KernelCall, out: int, source: int) -> bool:
        positions = call.constraints.get("inplace", ())
        legal = [call.in_vids[int(position)] for position in positions] if isinstance(positions, tuple) else []
        slots = self.plan.slots
        return out == call.out_vids[0] and source in legal and slots[out].spec == slots[source].spec

    def _place(self, vid: int) -> _Place:
        root = vid
        while root in self.plan.alias:
            root = self.plan.alias[root]
        start = self.plan.offsets.get(root, 0)
        region = ARENA if root in self.plan.offsets else root
        return _Place(region, start, start + self.plan.slots[vid].spec.nbytes)

    def _name(self, vid: int) -> str:
        slot = self.plan.slots[vid]
        return f"{slot.name!r} (vid {vid}, {slot.role})"


def _tables(plan: ExecutionPlan) -> list[str]:
    """What is wrong with the tables by themselves: unknown vids, missing or doubled storage, alignment, bounds."""
    known = set(range(len(plan.slots)))
    used = {vid for call in plan.calls for vid in (*call.in_vids, *call.out_vids)}
    used |= {*plan.inputs, *plan.outputs, *plan.alias, *plan.alias.values(), *plan.offsets}
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
    return found + _alias_cycles(plan)


def _alias_cycles(plan: ExecutionPlan) -> list[str]:
    found = []
    for start in plan.alias:
        vid, steps = start, 0
        while vid in plan.alias and steps <= len(plan.alias):
            vid, steps = plan.alias[vid], steps + 1
        if steps > len(plan.alias):
            found.append(f"the aliases of {plan.slots[start].name!r} (vid {start}) run in a circle")
    return found


def _kind(call: KernelCall) -> str:
    return Kind(call.kind_id).name if call.kind_id in Kind.__members__.values() else f"kind {call.kind_id}"
