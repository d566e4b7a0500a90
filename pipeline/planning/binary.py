"""plan.bin: plans as bytes, for runtimes without Python. docs/reference/plan-format.md describes every field.

Little-endian, unpadded after a header of 64 bytes, texts in one table. The file says its size and its CRC-32. What is
read has to be written again as the same bytes, so no two files mean one plan.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from passes.suggest import plural, shorten_lines
from pipeline.argument_checks import a, expects
from pipeline.errors import SourceError
from pipeline.ir.graph import Role, TensorSpec
from pipeline.lowering import KernelCall
from pipeline.ops import Layout
from pipeline.ops.tagged import read_item, write_item
from pipeline.planning.json import read_sound
from pipeline.planning.memory_map import MemoryMap, MemoryRegion, Residence
from pipeline.planning.plan import ExecutionPlan, FeedEntry, Slot

MAGIC: Final = b"ONNXLPLN"
VERSION: Final = 2
"""Grows with every change of the layout. Version 1 had no checksums of weights."""

HEADER: Final = struct.Struct("<8sIIQIIII24x")
"""Magic, version, CRC-32 of what follows it, bytes of the file, counts of texts, entries and weights, alignment."""

CHECKED_FROM: Final = 16
"""The first byte that the checksum covers."""

ALIGNMENT: Final = 64

ROLES: Final = tuple(Role)
EXTERNAL, ALIAS, ARENA = range(3)
"""Where the storage of a value comes from."""

HAS_STRIDES, HAS_LAYOUT = 1, 2

BLOCK: Final = 2**20
"""Bytes of a weight that are read at once."""

UNBOUNDED: Final = 2**64 - 1
"""The size of a region that is as large as it has to be."""


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes of a weight, row after row: here in `data`, or `nbytes` from `offset` on in `file`.

    `file` is relative to the folder of the plan, or absolute.
    """

    data: bytes = b""
    file: str = ""
    offset: int = 0
    nbytes: int = 0
    crc32: int = 0
    """Of these bytes, as zlib counts it: it tells a wrong file, and is no protection against forgery."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The content of a plan.bin: entry points by name, and where the weights are, by name of the value."""

    entries: Mapping[str, ExecutionPlan]
    weights: Mapping[str, StoredBytes] = field(default_factory=dict)

    def __repr__(self) -> str:
        entries = (f"{name}: {plan!r}" for name, plan in self.entries.items())
        return shorten_lines((f"PlanFile: {plural(len(self.weights), 'weight')}", *entries))


@expects(content=a(PlanFile, "a PlanFile"))
def encode_plans(content: PlanFile) -> bytes:
    """`content` as the bytes of a plan.bin.

    Raises:
        ValueError: a plan that `check_plan` refuses for its feed signature.
    """
    writer = _PlanWriter()
    for name, plan in content.entries.items():
        writer.text(name)
        _write_plan(writer, plan)
    for name, stored in content.weights.items():
        writer.text(name)
        writer.text(stored.file)
        writer.pack("QQI", stored.offset, stored.nbytes, stored.crc32)
        writer.blob(stored.data)
    texts = b"".join(struct.pack("<I", len(text)) + text for text in writer.texts)
    body = texts + b"".join(writer.parts)
    size = HEADER.size + len(body)
    counts = len(writer.texts), len(content.entries), len(content.weights), ALIGNMENT
    unsigned = HEADER.pack(MAGIC, VERSION, 0, size, *counts) + body
    checksum = zlib.crc32(memoryview(unsigned)[CHECKED_FROM:])
    return HEADER.pack(MAGIC, VERSION, checksum, size, *counts) + body


@expects(data=a((bytes, bytearray, memoryview), "bytes"))
def decode_plans(data: bytes) -> PlanFile:
    """The content of a plan.bin.

    Raises:
        SourceError: another version, a file that was cut or changed, or plans that break a rule of the checker.
    """
    if len(data) < HEADER.size or data[:8] != MAGIC:
        raise SourceError("plan.bin: it does not begin as a plan does; expected a file that `onnxline run` wrote")
    _, version, checksum, size, texts, entries, weights, _ = HEADER.unpack_from(data)
    if version != VERSION:
        raise SourceError(
            f"plan.bin: found version {version}, expected {VERSION}; make the plan again with this release, or read it "
            "with the release that wrote it"
        )
    if size != len(data):
        raise SourceError(f"plan.bin: it has {len(data)} bytes and says {size}; it was cut, or written over")
    if zlib.crc32(memoryview(data)[CHECKED_FROM:]) != checksum:
        raise SourceError("plan.bin: its checksum does not fit; it was changed after it was written")
    return read_sound("plan.bin", data, lambda raw: _read_file(raw, texts, entries, weights), _refuse_other, _plans_of)


@expects(content=a(PlanFile, "a PlanFile"), folder=a(Path, "a pathlib.Path"))
def check_weights(content: PlanFile, folder: Path) -> None:
    """Check that the weights of a plan in `folder` have the bytes that they had when the plan was made.

    Raises:
        SourceError: a file is not there or too short, or has other bytes.
    """
    for name, stored in content.weights.items():
        try:
            crc32 = _checksum(stored, folder)
        except OSError as error:
            raise SourceError(f"plan.bin: weight {name!r} is in {stored.file}: {error.strerror}") from error
        if crc32 != stored.crc32:
            place = f"{stored.nbytes} bytes from {stored.offset} of {stored.file}" if stored.file else "the plan itself"
            raise SourceError(
                f"plan.bin: weight {name!r} ({place}) has not the bytes that the plan was made with; "
                "use the weights file of this plan, or make the plan again"
            )


def _checksum(stored: StoredBytes, folder: Path) -> int:
    if not stored.file:
        return zlib.crc32(stored.data)
    crc32, left = 0, stored.nbytes
    with (folder / stored.file).open("rb") as file:
        file.seek(stored.offset)
        while block := file.read(min(left, BLOCK)):
            crc32, left = zlib.crc32(block, crc32), left - len(block)
    return crc32 if not left else -1


def _plans_of(content: PlanFile) -> list[ExecutionPlan]:
    return [*content.entries.values()]


def _refuse_other(data: bytes, content: PlanFile) -> None:
    if encode_plans(content) != data:
        raise ValueError(
            "its bytes are not those of any plan: a text or a name stands twice, or a field has no meaning"
        )


class _PlanWriter:
    """Collects the fields of a file, and the table of its texts in the order of their first use."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.texts: dict[bytes, int] = {}

    def pack(self, layout: str, *numbers: int) -> None:
        self.parts.append(struct.pack(f"<{layout}", *numbers))

    def text(self, text: str) -> None:
        self.pack("I", self.texts.setdefault(text.encode(), len(self.texts)))

    def blob(self, data: bytes) -> None:
        self.pack("I", len(data))
        self.parts.append(data)

    def vids(self, vids: tuple[int, ...]) -> None:
        self.pack(f"I{len(vids)}I", len(vids), *vids)


class _PlanReader:
    """Takes fields from a file, from the front to its end. Each method raises struct.error beyond the end."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self.texts: list[str] = []

    def unpack(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{layout}", self._data, self._at)
        self._at += struct.calcsize(f"<{layout}")
        return found

    def number(self, layout: str = "I") -> int:
        return self.unpack(layout)[0]

    def text(self) -> str:
        return self.texts[self.number()]

    def blob(self) -> bytes:
        return self.unpack(f"{self.number()}s")[0]

    def vids(self) -> tuple[int, ...]:
        return self.unpack(f"{self.number()}I")

    def item(self) -> Any:
        item, self._at = read_item(self._data, self._at)
        return item

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"its last field ends at byte {self._at} of {len(self._data)}")


def _read_file(data: bytes, texts: int, entries: int, weights: int) -> PlanFile:
    reader = _PlanReader(data, HEADER.size)
    for _ in range(texts):
        reader.texts.append(reader.blob().decode())
    plans = {reader.text(): _read_plan(reader) for _ in range(entries)}
    stored = {}
    for _ in range(weights):
        name, file = reader.text(), reader.text()
        offset, nbytes, crc32 = reader.unpack("QQI")
        stored[name] = StoredBytes(reader.blob(), file, offset, nbytes, crc32)
    reader.end()
    return PlanFile(plans, stored)


def _write_plan(writer: _PlanWriter, plan: ExecutionPlan) -> None:
    writer.text(plan.graph_name)
    writer.text(plan.graph_digest)
    writer.pack("QQI", plan.arena_bytes, plan.live_bytes, len(plan.slots))
    for slot in plan.slots:
        _write_value(writer, plan, slot)
    vids = {slot.name: slot.vid for slot in reversed(plan.slots)}
    fed = tuple(vids[entry.name] for entry in plan.feed_signature)
    if _feed_of(plan.slots, plan.layouts, fed) != plan.feed_signature:
        raise ValueError("the feed signature is not that of the slots")
    updates = tuple(vid for pair in plan.updates.items() for vid in pair)
    for several in (plan.inputs, plan.outputs, updates, fed):
        writer.vids(several)
    writer.pack("I", len(plan.calls))
    for at, (oid, call) in enumerate(zip(plan.order, plan.calls, strict=True)):
        _write_call(writer, oid, call, plan.bodies.get(at, ()))
    _write_memory(writer, plan.memory)


def _read_plan(reader: _PlanReader) -> ExecutionPlan:
    name, digest = reader.text(), reader.text()
    arena_bytes, live_bytes, count = reader.unpack("QQI")
    values = [_read_value(reader, vid) for vid in range(count)]
    inputs, outputs, updates, fed = (reader.vids() for _ in range(4))
    if len(updates) % 2:
        raise ValueError("the updates are no pairs")
    calls = [_read_call(reader) for _ in range(reader.number())]
    memory = _read_memory(reader)
    slots = tuple(slot for slot, _, _, _ in values)
    layouts = {slot.vid: layout for slot, layout, _, _ in values if layout is not None}
    return ExecutionPlan(
        graph_name=name,
        slots=slots,
        calls=tuple(call for _, call, _ in calls),
        order=tuple(oid for oid, _, _ in calls),
        inputs=inputs,
        outputs=outputs,
        alias={slot.vid: place for slot, _, storage, place in values if storage == ALIAS},
        layouts=layouts,
        offsets={slot.vid: place for slot, _, storage, place in values if storage == ARENA},
        arena_bytes=arena_bytes,
        live_bytes=live_bytes,
        feed_signature=_feed_of(slots, layouts, fed),
        updates=dict(zip(updates[::2], updates[1::2], strict=True)),
        bodies={at: bodies for at, (_, _, bodies) in enumerate(calls) if bodies},
        graph_digest=digest,
        memory=memory,
    )


def _feed_of(slots: Sequence[Slot], layouts: Mapping[int, Layout], vids: Sequence[int]) -> tuple[FeedEntry, ...]:
    strides = {vid: layouts[vid].strides for vid in vids if vid in layouts}
    return tuple(FeedEntry(slots[vid].name, slots[vid].spec, strides.get(vid)) for vid in vids)


def _write_value(writer: _PlanWriter, plan: ExecutionPlan, slot: Slot) -> None:
    layout, strides = plan.layouts.get(slot.vid), slot.strides
    storage = ALIAS if slot.vid in plan.alias else ARENA if slot.vid in plan.offsets else EXTERNAL
    writer.text(slot.name)
    writer.text(slot.spec.dtype)
    writer.text(slot.spec.device)
    flags = (HAS_STRIDES if strides is not None else 0) | (HAS_LAYOUT if layout is not None else 0)
    sizes = slot.spec.sizes
    writer.pack("BBBB", ROLES.index(slot.role), storage, flags, len(sizes))
    writer.pack(f"{len(sizes)}q", *sizes)
    if strides is not None:
        writer.pack(f"{len(sizes)}q", *strides)
    if layout is not None:
        writer.pack(f"{len(sizes)}qq", *layout.strides, layout.offset)
    if storage != EXTERNAL:
        writer.pack("Q", plan.alias[slot.vid] if storage == ALIAS else plan.offsets[slot.vid])


def _read_value(reader: _PlanReader, vid: int) -> tuple[Slot, Layout | None, int, int]:
    """The slot, its layout, where its storage comes from, and the aliased vid or the offset."""
    name, dtype, device = reader.text(), reader.text(), reader.text()
    role, storage, flags, rank = reader.unpack("BBBB")
    sizes = reader.unpack(f"{rank}q")
    strides = reader.unpack(f"{rank}q") if flags & HAS_STRIDES else None
    layout = Layout(sizes, reader.unpack(f"{rank}q"), reader.number("q")) if flags & HAS_LAYOUT else None
    place = reader.number("Q") if storage != EXTERNAL else 0
    return Slot(vid, name, TensorSpec(sizes, dtype, device), ROLES[role], strides), layout, storage, place


def _write_call(writer: _PlanWriter, oid: int, call: KernelCall, bodies: tuple[ExecutionPlan, ...]) -> None:
    writer.pack("II", oid, call.kind_id)
    writer.text(call.attr_schema)
    writer.blob(call.attr_blob)
    writer.vids(call.in_vids)
    writer.vids(call.out_vids)
    writer.pack("I", len(call.constraints))
    for name, fact in call.constraints.items():
        writer.text(name)
        writer.parts.append(write_item(fact))
    writer.pack("I", len(bodies))
    for body in bodies:
        _write_plan(writer, body)


def _read_call(reader: _PlanReader) -> tuple[int, KernelCall, tuple[ExecutionPlan, ...]]:
    oid, kind_id = reader.unpack("II")
    schema, blob, in_vids, out_vids = reader.text(), reader.blob(), reader.vids(), reader.vids()
    constraints = {reader.text(): reader.item() for _ in range(reader.number())}
    bodies = tuple(_read_plan(reader) for _ in range(reader.number()))
    return oid, KernelCall(kind_id, schema, blob, in_vids, out_vids, constraints), bodies


def _write_memory(writer: _PlanWriter, memory: MemoryMap | None) -> None:
    """Without a map there are 0 regions, and nothing more."""
    regions = memory.regions if memory is not None else ()
    writer.pack("I", len(regions))
    if memory is None:
        return
    for region in regions:
        writer.text(region.name)
        writer.pack("Q", UNBOUNDED if region.nbytes is None else region.nbytes)
    writer.vids(tuple(number for pin in memory.pins.items() for number in pin))
    writer.pack("I", len(memory.residences))
    for residence in memory.residences:
        writer.pack("IIQII", residence.root, residence.region, residence.offset, residence.first, residence.last)


def _read_memory(reader: _PlanReader) -> MemoryMap | None:
    count = reader.number()
    if not count:
        return None
    regions = []
    for _ in range(count):
        name, nbytes = reader.text(), reader.number("Q")
        regions.append(MemoryRegion(name, None if nbytes == UNBOUNDED else nbytes))
    pins = reader.vids()
    residences = tuple(Residence(*reader.unpack("IIQII")) for _ in range(reader.number()))
    return MemoryMap(tuple(regions), residences, dict(zip(pins[::2], pins[1::2], strict=True)))
