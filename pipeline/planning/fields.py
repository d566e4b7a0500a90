"""The fields of a plan, as `plan.json` and `plan.bin` have them: one table for both.

In a file, a value has its storage among its fields, and a call has its bodies: these are the rows here. An
`ExecutionPlan` has maps by vid for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from pipeline.ir.codec import (
    ATTR,
    BLOB,
    I64,
    TEXT,
    U32,
    U64,
    VIDS,
    Field,
    Form,
    as_tuple,
    by_key,
    choice,
    optional,
    record,
    several,
)
from pipeline.ir.graph import Plain, Role, TensorSpec
from pipeline.ir.tagged import int_of, same, spell, write_attr
from pipeline.lowering import KernelCall
from pipeline.ops import Kind, Layout, unpack
from pipeline.planning.arena import ALIGNMENT
from pipeline.planning.plan import ExecutionPlan, FeedEntry, MemoryMap, MemoryRegion, Residence, Slot


class ValueRow(NamedTuple):
    """A slot and its storage: an alias of another value, bytes of the arena, or a tensor of the caller."""

    name: str
    role: Role
    dtype: str
    device: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    layout: Any
    """The Layout, or while a file is read its strides and offset; None for a row-major value."""
    alias_of: int | None
    offset: int | None
    vid: int = -1
    """Its place in the list of values; not read."""


class CallRow(NamedTuple):
    """A kernel call, with the op that it came from and its bodies."""

    op: int
    kind_id: int
    attr_schema: str
    attr_blob: bytes
    in_vids: tuple[int, ...]
    out_vids: tuple[int, ...]
    constraints: Mapping[str, Plain]
    bodies: tuple[ExecutionPlan, ...]


def _values_of(plan: ExecutionPlan) -> list[ValueRow]:
    return [_value_row(plan, slot) for slot in plan.slots]


def _value_row(plan: ExecutionPlan, slot: Slot) -> ValueRow:
    spec, layout = slot.spec, plan.layouts.get(slot.vid)
    alias, offset = plan.alias.get(slot.vid), plan.offsets.get(slot.vid)
    return ValueRow(
        slot.name, slot.role, spec.dtype, spec.device, spec.sizes, slot.strides, layout, alias, offset, slot.vid
    )


def _calls_of(plan: ExecutionPlan) -> list[CallRow]:
    return [
        CallRow(
            *(oid, call.kind_id, call.attr_schema, call.attr_blob, call.in_vids, call.out_vids, call.constraints),
            plan.bodies.get(at, ()),
        )
        for at, (oid, call) in enumerate(zip(plan.order, plan.calls, strict=True))
    ]


def _fed_vids(plan: ExecutionPlan) -> tuple[int, ...]:
    """The vids of the feed signature.

    Raises:
        ValueError: its entries are not slots of the plan.
    """
    vids = {slot.name: slot.vid for slot in reversed(plan.slots)}
    feed = tuple(vids.get(entry.name, -1) for entry in plan.feed_signature)
    if -1 in feed or feed_of(plan.slots, plan.layouts, feed) != plan.feed_signature:
        raise ValueError("the feed signature is not that of the slots")
    return feed


def plan_of(
    graph: str,
    graph_digest: str,
    arena_bytes: int,
    live_bytes: int,
    values: Sequence[ValueRow],
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    updates: Mapping[int, int],
    feed: Sequence[int],
    calls: Sequence[CallRow],
    memory: MemoryMap | None,
    alignment: int,
) -> ExecutionPlan:
    """The plan that has these fields in a file."""
    slots = tuple(
        Slot(vid, value.name, TensorSpec(value.shape, value.dtype, value.device), value.role, value.strides)
        for vid, value in enumerate(values)
    )
    layouts = {vid: Layout(value.shape, *value.layout) for vid, value in enumerate(values) if value.layout}
    return ExecutionPlan(
        graph,
        slots,
        tuple(KernelCall(*call[1:7]) for call in calls),
        tuple(call.op for call in calls),
        inputs,
        outputs,
        alias={vid: value.alias_of for vid, value in enumerate(values) if value.alias_of is not None},
        layouts=layouts,
        offsets={vid: value.offset for vid, value in enumerate(values) if value.offset is not None},
        arena_bytes=arena_bytes,
        live_bytes=live_bytes,
        feed_signature=feed_of(slots, layouts, feed),
        updates=updates,
        bodies={at: call.bodies for at, call in enumerate(calls) if call.bodies},
        graph_digest=graph_digest,
        memory=memory,
        alignment=alignment,
    )


def feed_of(slots: Sequence[Slot], layouts: Mapping[int, Layout], vids: Sequence[int]) -> tuple[FeedEntry, ...]:
    strides = {vid: layouts[vid].strides for vid in vids if vid in layouts}
    return tuple(FeedEntry(slots[vid].name, slots[vid].spec, strides.get(vid)) for vid in vids)


def _describe_feed(plan: ExecutionPlan) -> dict[str, Any]:
    values = [VALUE.to_json(_value_row(plan, plan.slots[vid])) for vid in _fed_vids(plan)]
    entries = [{key: value[key] for key in ("name", "shape", "dtype", "device")} for value in values]
    for entry, value in zip(entries, values, strict=True):
        if value["layout"] is not None:
            entry["strides"] = value["layout"]["strides"]
    return {"feed_signature": entries}


def _describe_call(call: CallRow) -> dict[str, Any]:
    attrs = {name: _readable(value) for name, value in unpack(call.attr_schema, call.attr_blob).items()}
    return {"kind": Kind(call.kind_id).name, "attrs": attrs}


def _readable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: write_attr(item) for name, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, tuple) else spell(value)


def _describe_moves(memory: MemoryMap) -> dict[str, Any]:
    moves = [
        {
            "before": move.before,
            "root": move.root,
            "from": [move.source.region, move.source.offset],
            "to": [move.target.region, move.target.offset],
        }
        for move in memory.moves()
    ]
    return {"moves": moves}


SIZES: Final = several(I64)

VID_MAP: Final = by_key(U32._replace(from_json=int), U32)
"""From vid to vid: the keys of an object in JSON are texts."""

VALUE: Final = record(
    ValueRow,
    Field("name", TEXT),
    Field("role", choice(Role)),
    Field("dtype", TEXT),
    Field("device", TEXT),
    Field("shape", SIZES),
    Field("strides", optional(SIZES)),
    Field("layout", optional(record(as_tuple, Field("strides", SIZES), Field("offset", I64)))),
    Field("alias_of", optional(U32)),
    Field("offset", optional(U64)),
    derived=lambda value: {"vid": value.vid},
)

BODY: Final = Form(
    lambda plan: PLAN.to_json(plan),
    lambda data: PLAN.from_json(data),
    lambda writer, plan: PLAN.write(writer, plan),
    lambda reader: PLAN.read(reader),
)

CALL: Final = record(
    CallRow,
    Field("op", U32),
    Field("kind_id", U32),
    Field("attr_schema", TEXT),
    Field("attr_blob", BLOB),
    Field("in_vids", VIDS),
    Field("out_vids", VIDS),
    Field("constraints", by_key(TEXT, ATTR)),
    Field("bodies", several(BODY), default=()),
    derived=_describe_call,
)

RESIDENCE: Final = record(
    Residence, Field("root", U32), Field("region", U32), Field("offset", U64), Field("first", U32), Field("last", U32)
)

MEMORY: Final = record(
    MemoryMap,
    Field("regions", several(record(MemoryRegion, Field("name", TEXT), Field("nbytes", optional(U64))))),
    Field("residences", several(RESIDENCE)),
    Field("pins", VID_MAP),
    derived=_describe_moves,
)

OF_FILE: Final = Form(same, int_of, lambda writer, item: None, lambda reader: reader.alignment)
"""The alignment of all plans of a plan.bin, which its header says once."""

PLAN: Final = record(
    plan_of,
    Field("graph", TEXT, "graph_name"),
    Field("graph_digest", TEXT),
    Field("arena_bytes", U64),
    Field("live_bytes", U64),
    Field("values", several(VALUE), _values_of),
    Field("inputs", VIDS),
    Field("outputs", VIDS),
    Field("updates", VID_MAP, default={}),
    Field("feed", VIDS, _fed_vids),
    Field("calls", several(CALL), _calls_of),
    Field("memory", optional(MEMORY), default=None),
    Field("alignment", OF_FILE, default=ALIGNMENT),
    derived=_describe_feed,
)
"""An `ExecutionPlan`."""
