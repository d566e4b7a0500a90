"""A plan as JSON: exact, for tools in other languages and for diffs between releases.

What is read has to be written again as the same data, key by key and type by type. So a reader takes no plan of which
it understands only a part: an unknown key may change what a plan computes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pipeline.argument_checks import a, expects
from pipeline.errors import OnnxlineError, SourceError
from pipeline.ir.graph import Role, TensorSpec
from pipeline.ir.json import write_attr
from pipeline.lowering import KernelCall
from pipeline.ops import Kind, Layout, unpack
from pipeline.planning.check import violations
from pipeline.planning.memory_map import MemoryMap, MemoryRegion, Residence
from pipeline.planning.plan import ExecutionPlan, FeedEntry, Slot

FORMAT_VERSION: Final = 2
"""Grows when a key comes, changes its meaning or goes away, since readers refuse what they do not know."""

Raw = TypeVar("Raw")
Content = TypeVar("Content")


@expects(plan=a(ExecutionPlan, "an ExecutionPlan"))
def to_json(plan: ExecutionPlan) -> dict[str, Any]:
    """`plan` as dicts, lists, strings, numbers and None, ready for `json.dumps`.

    `attr_blob` is hex and exact. `attrs` is for people: a float that JSON cannot write is a string there.
    """
    return {
        "format_version": FORMAT_VERSION,
        "graph": plan.graph_name,
        "graph_digest": plan.graph_digest,
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
        **({} if plan.memory is None else {"memory": _memory(plan.memory)}),
    }


def from_json(data: Any) -> ExecutionPlan:
    """The plan that `data` describes, as `json.loads` gives it.

    Raises:
        SourceError: another format version, data that is not a plan, or a plan that breaks a rule of the checker.
    """
    version = data.get("format_version") if isinstance(data, Mapping) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise SourceError(
            f"plan JSON: found format_version {version!r}, expected {FORMAT_VERSION}; make the plan again with this "
            "release, or read it with the release that wrote it"
        )
    return read_sound("plan JSON", data, _read_plan, _refuse_other, lambda plan: [plan])


def read_sound(
    source: str,
    raw: Raw,
    read: Callable[[Raw], Content],
    refuse_other: Callable[[Raw, Content], None],
    plans_of: Callable[[Content], Sequence[ExecutionPlan]],
) -> Content:
    """What `read(raw)` gives, if its plans are sound and it stands for `raw` as a whole.

    `refuse_other` raises ValueError where the content, written again, is not `raw`.

    Raises:
        SourceError: anything else; the message is one sentence.
    """
    try:
        content = read(raw)
        broken = [violation for plan in plans_of(content) for violation in violations(plan)]
        if broken:
            raise ValueError(f"the plan breaks a rule: {broken[0]}")
        refuse_other(raw, content)
        return content
    except KeyError as error:
        raise SourceError(f"{source}: the key {error} is not there; compare it with what `to_json` gives") from error
    except RecursionError as error:
        raise SourceError(f"{source}: it is nested too deep to be a plan") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error, OnnxlineError) as error:
        raise SourceError(f"{source}: it cannot be read: {error}") from error


def _read_plan(data: Mapping[str, Any]) -> ExecutionPlan:
    values, calls = data["values"], data["calls"]
    slots = tuple(map(_read_slot, values))
    return ExecutionPlan(
        graph_name=str(data["graph"]),
        slots=slots,
        calls=tuple(map(_read_call, calls)),
        order=tuple(int(call["op"]) for call in calls),
        inputs=_ints(data["inputs"]),
        outputs=_ints(data["outputs"]),
        alias={slot.vid: int(value["alias_of"]) for slot, value in _having(slots, values, "alias_of")},
        layouts={slot.vid: _read_layout(slot, value["layout"]) for slot, value in _having(slots, values, "layout")},
        offsets={slot.vid: int(value["offset"]) for slot, value in _having(slots, values, "offset")},
        arena_bytes=int(data["arena_bytes"]),
        live_bytes=int(data["live_bytes"]),
        feed_signature=tuple(FeedEntry(str(e["name"]), _read_spec(e), _strides(e)) for e in data["feed_signature"]),
        updates={int(vid): int(after) for vid, after in data.get("updates", {}).items()},
        bodies={at: tuple(map(_read_body, call["bodies"])) for at, call in enumerate(calls) if "bodies" in call},
        graph_digest=str(data["graph_digest"]),
        memory=_read_memory(data["memory"]) if "memory" in data else None,
    )


def _refuse_other(data: Any, plan: ExecutionPlan) -> None:
    if difference := _difference(data, to_json(plan), ""):
        raise ValueError(difference)


def _difference(found: Any, expected: Any, where: str) -> str:
    """Where two JSON trees differ first, in a value or in its type; nothing for equal ones."""
    if type(found) is not type(expected):
        return f"{where or 'it'} is {_short(found)}; expected {_short(expected)}"
    if isinstance(found, dict):
        if found.keys() != expected.keys():
            strange = sorted(map(str, found.keys() ^ expected.keys()))
            return f"{where or 'the top level'} has other keys than a plan: {', '.join(strange)}"
        pairs = ((key, found[key], expected[key]) for key in found)
    elif isinstance(found, list) and len(found) == len(expected):
        pairs = ((at, item, other) for at, (item, other) in enumerate(zip(found, expected, strict=True)))
    else:
        return "" if found == expected else f"{where} is {_short(found)}; expected {_short(expected)}"
    steps = (_difference(item, other, f"{where}.{key}" if where else str(key)) for key, item, other in pairs)
    return next(filter(None, steps), "")


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _read_body(data: Mapping[str, Any]) -> ExecutionPlan:
    if data["format_version"] != FORMAT_VERSION:
        raise ValueError(f"a body of format_version {data['format_version']!r}; expected {FORMAT_VERSION}")
    return _read_plan(data)


def _having(slots: tuple[Slot, ...], values: list[Any], key: str) -> list[tuple[Slot, Any]]:
    return [(slot, value) for slot, value in zip(slots, values, strict=True) if value[key] is not None]


def _read_slot(data: Mapping[str, Any]) -> Slot:
    return Slot(int(data["vid"]), str(data["name"]), _read_spec(data), Role(data["role"]), _strides(data))


def _read_spec(data: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(_ints(data["shape"]), str(data["dtype"]), str(data["device"]))


def _strides(data: Mapping[str, Any]) -> tuple[int, ...] | None:
    return None if data.get("strides") is None else _ints(data["strides"])


def _read_layout(slot: Slot, data: Mapping[str, Any]) -> Layout:
    return Layout(slot.spec.sizes, _ints(data["strides"]), int(data["offset"]))


def _read_call(data: Mapping[str, Any]) -> KernelCall:
    constraints = {name: tuple(item) if isinstance(item, list) else item for name, item in data["constraints"].items()}
    return KernelCall(
        int(data["kind_id"]),
        str(data["attr_schema"]),
        bytes.fromhex(data["attr_blob"]),
        _ints(data["in_vids"]),
        _ints(data["out_vids"]),
        constraints,
    )


def _read_memory(data: Mapping[str, Any]) -> MemoryMap:
    """The map without its moves, which follow from the residences."""
    regions = [MemoryRegion(str(e["name"]), None if e["nbytes"] is None else int(e["nbytes"])) for e in data["regions"]]
    residences = [
        Residence(*(int(entry[key]) for key in ("root", "region", "offset", "first", "last")))
        for entry in data["residences"]
    ]
    return MemoryMap(tuple(regions), tuple(residences), {int(root): int(at) for root, at in data["pins"].items()})


def _memory(memory: MemoryMap) -> dict[str, Any]:
    return {
        "regions": [{"name": region.name, "nbytes": region.nbytes} for region in memory.regions],
        "pins": {str(root): region for root, region in memory.pins.items()},
        "residences": [
            {
                "root": residence.root,
                "region": residence.region,
                "offset": residence.offset,
                "first": residence.first,
                "last": residence.last,
            }
            for residence in memory.residences
        ],
        "moves": [
            {
                "before": move.before,
                "root": move.root,
                "from": [move.source.region, move.source.offset],
                "to": [move.target.region, move.target.offset],
            }
            for move in memory.moves()
        ],
    }


def _ints(items: Any) -> tuple[int, ...]:
    return tuple(map(int, items))


def _value(plan: ExecutionPlan, slot: Slot) -> dict[str, Any]:
    return {
        "vid": slot.vid,
        "name": slot.name,
        "role": slot.role.value,
        "shape": list(slot.spec.shape),
        "dtype": slot.spec.dtype,
        "device": slot.spec.device,
        "strides": None if slot.strides is None else list(slot.strides),
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
