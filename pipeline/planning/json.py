"""A plan as JSON: stable, for tools in other languages and for diffs between releases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from pipeline.ir.json import write_attr
from pipeline.lowering import KernelCall, Kind, Layout, unpack
from pipeline.planning.plan import ExecutionPlan, Slot

__all__ = ["FORMAT_VERSION", "to_json"]

FORMAT_VERSION: Final = 1
"""Grows when a key changes its meaning or goes away; a new key does not change it."""


def to_json(plan: ExecutionPlan) -> dict[str, Any]:
    """`plan` as dicts, lists, strings, numbers and None, ready for `json.dumps`.

    `attr_blob` is hex and exact. `attrs` beside it is for people: a float that JSON cannot write is a string there.
    """
    return {
        "format_version": FORMAT_VERSION,
        "graph": plan.graph_name,
        "inputs": list(plan.inputs),
        "outputs": list(plan.outputs),
        "feed_signature": [
            {
                "name": entry.name,
                "shape": list(entry.spec.shape),
                "dtype": entry.spec.dtype,
                "device": entry.spec.device,
                **({} if entry.strides is None else {"strides": list(entry.strides)}),
            }
            for entry in plan.feed_signature
        ],
        "arena_bytes": plan.arena_bytes,
        "live_bytes": plan.live_bytes,
        "values": [_value(plan, slot) for slot in plan.slots],
        **({"updates": {str(vid): after for vid, after in plan.updates.items()}} if plan.updates else {}),
        "calls": [
            {**_call(oid, call), **({"bodies": list(map(to_json, plan.bodies[at]))} if at in plan.bodies else {})}
            for at, (oid, call) in enumerate(zip(plan.order, plan.calls, strict=True))
        ],
    }


def _value(plan: ExecutionPlan, slot: Slot) -> dict[str, Any]:
    return {
        "vid": slot.vid,
        "name": slot.name,
        "role": slot.role.value,
        "shape": list(slot.spec.shape),
        "dtype": slot.spec.dtype,
        "device": slot.spec.device,
        "alias_of": plan.alias.get(slot.vid),
        "offset": plan.offsets.get(slot.vid),
        "layout": _layout(plan.layouts.get(slot.vid)),
    }


def _layout(layout: Layout | None) -> dict[str, Any] | None:
    """Strides and offset in elements of the root's storage; None for row-major from its first element."""
    return None if layout is None else {"strides": list(layout.strides), "offset": layout.offset}


def _call(oid: int, call: KernelCall) -> dict[str, Any]:
    return {
        "op": oid,
        "kind": Kind(call.kind_id).name,
        "kind_id": call.kind_id,
        "attr_schema": call.attr_schema,
        "attr_blob": call.attr_blob.hex(),
        "attrs": {name: _to_json_value(value) for name, value in unpack(call.attr_schema, call.attr_blob).items()},
        "in_vids": list(call.in_vids),
        "out_vids": list(call.out_vids),
        "constraints": {name: _to_json_value(value) for name, value in call.constraints.items()},
    }


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: write_attr(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_to_json_value(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
