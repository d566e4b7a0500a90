"""Check a plan by walking through it with a shadow memory.

The planner reasons about lifetimes. The checker has none: it keeps the set of values whose bytes are intact, removes
the values that each write destroys, and reports every read of a value that is not in the set.
"""

from __future__ import annotations

from passes.errors import check_type
from passes.suggest import plural
from pipeline.errors import InternalError
from pipeline.ir.graph import Role
from pipeline.lowering import KernelCall
from pipeline.ops import Kind, unpack
from pipeline.planning.check.meaning import shows_its_operand
from pipeline.planning.check.shadow_memory import (
    ARENA,
    ByteRange,
    IntactValues,
    contiguous_strides,
    place,
    roots_of,
    strides_of,
    wrong_residences,
)
from pipeline.planning.check.tables import GIVEN, outside, unused_bytes, wrong_peak, wrong_tables
from pipeline.planning.plan import ExecutionPlan

LISTED = 20


def check_plan(plan: ExecutionPlan) -> None:
    """Check `plan`.

    Raises:
        UsageError: `plan` is no plan.
        InternalError: the plan breaks a rule; the message lists what is wrong.
    """
    check_type(plan, ExecutionPlan, "check_plan", "an ExecutionPlan, such as the plan of a compiled program")
    found = violations(plan)
    if found:
        more = [f"and {len(found) - LISTED} more"] if len(found) > LISTED else []
        raise InternalError(
            f"the plan of graph {plan.graph_name!r} breaks {plural(len(found), 'rule')}:\n  "
            + "\n  ".join([*found[:LISTED], *more])
            + "\nThis is a bug in the planner; please report it with the model."
        )


def violations(plan: ExecutionPlan) -> list[str]:
    """Everything that is wrong with the plan, in the order of the walk; empty for a good one."""
    tables = wrong_tables(plan)
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
    memory.leave()
    return memory.found + in_bodies or [*unused_bytes(plan), *wrong_peak(plan), *wrong_residences(plan)]


class _Memory:
    """Which values are intact while the calls run, and what went wrong so far."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        self.found = outside(plan)
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
        for vid in self._intact.take(mine):
            self._strike(vid, index, call, where, allowed=source)
        self._intact.add(out, mine)

    def leave(self) -> None:
        """At the end the outputs are intact, and share no storage with other values."""
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
            twins = [twin for twin in computed[:count] if places[twin].overlaps(mine)]
            self.found += [f"outputs {self._name(twin)} and {self._name(vid)} share storage" for twin in twins]

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
        return (own or (out == call.out_vids[0] and source in legal)) and alike and not _turns_axes(call)

    def _overwrites(self, call: KernelCall) -> dict[int, int]:
        """By output, the operand of its own that it may be written over."""
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


def _turns_axes(call: KernelCall) -> bool:
    """Whether the kernel permutes the axes of a result, so that an operand has other strides."""
    fields = unpack(call.attr_schema, call.attr_blob)
    return any(fields.get("orders", ())) or bool(fields.get("order", ()))


def _kind(call: KernelCall) -> str:
    return Kind(call.kind_id).name if call.kind_id in Kind.__members__.values() else f"kind {call.kind_id}"
