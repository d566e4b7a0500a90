"""plan.json and plan.bin: a plan as JSON, for tools and for diffs between releases, and plans as bytes, for runtimes
without Python. docs/reference/formats.md and plan-format.md describe every field; `fields.py` has the table of both.

A plan that is read must give the same data when it is written again, key by key and type by type, or byte by byte. So
a reader refuses a file that it understands only in part, since an unknown field may change what a plan computes; and
no two files hold the same plan.

plan.bin has a header of 64 bytes (size, CRC-32 and more), then the table of texts, the plans, and the weights.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from passes.suggest import plural, shorten_lines
from pipeline.argument_checks import a, expects
from pipeline.errors import OnnxlineError, SourceError
from pipeline.ir.codec import BLOB, TEXT, U32, U64, Field, FieldReader, FieldWriter, by_key, record
from pipeline.planning.arena import ALIGNMENT
from pipeline.planning.check import violations
from pipeline.planning.fields import PLAN
from pipeline.planning.plan import ExecutionPlan

FORMAT_VERSION: Final = 3
"""The version of plan.json. It grows when a key is added, changes its meaning or is removed, since readers refuse
unknown keys. Up to version 2, calls of ONNX's operators had kinds of their own."""

VERSION: Final = 3
"""The version of plan.bin. It grows with every change of the layout or of the kinds. Version 1 had no checksums of
weights; up to version 2, calls of ONNX's operators had kinds of their own."""

MAGIC: Final = b"ONNXLPLN"

HEADER: Final = struct.Struct("<8sIIQII32x")
"""Magic, version, CRC-32 of all later bytes, bytes of the file, count of texts, alignment."""

CHECKED_FROM: Final = 16
"""The first byte that the checksum covers."""

BLOCK: Final = 2**20
"""Bytes of a weight that are read at once."""

Raw = TypeVar("Raw")
Content = TypeVar("Content")


@expects(plan=a(ExecutionPlan, "an ExecutionPlan"))
def to_json(plan: ExecutionPlan) -> dict[str, Any]:
    """`plan` as dicts, lists, strings, numbers and None, ready for `json.dumps`.

    `attr_blob` is hex and exact. `attrs` is for people: a float that JSON cannot write is a string there.

    Raises:
        ValueError: the entries of the feed signature are not slots of the plan.
    """
    return {"format_version": FORMAT_VERSION, **PLAN.to_json(plan)}


def from_json(data: Any, source: str = "plan JSON") -> ExecutionPlan:
    """The plan that `data` describes, as `json.loads` gives it.

    Args:
        data: what `to_json` returned, or what `json.loads` made of it.
        source: what messages call it, such as the path of the file.

    Raises:
        SourceError: another format version, data that is not a plan, or a plan that breaks a rule of the checker.
    """
    version = data.get("format_version") if isinstance(data, Mapping) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise SourceError(
            f"{source}: found format_version {version!r}, expected {FORMAT_VERSION}; make the plan again with this "
            "release, or read it with the release that wrote it"
        )
    return _read_sound(source, data, PLAN.from_json, _refuse_other_json, lambda plan: [plan])


def _read_sound(
    source: str,
    raw: Raw,
    read: Callable[[Raw], Content],
    refuse_other: Callable[[Raw, Content], None],
    plans_of: Callable[[Content], Sequence[ExecutionPlan]],
) -> Content:
    """Return `read(raw)`, if its plans are sound and it holds all of `raw`.

    `refuse_other` raises ValueError if the content, written again, differs from `raw`.

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
    except RecursionError as error:
        raise SourceError(f"{source}: it is nested too deep to be a plan") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error, OnnxlineError) as error:
        raise SourceError(f"{source}: it cannot be read: {str(error).lstrip('.')}") from error


def _refuse_other_json(data: Any, plan: ExecutionPlan) -> None:
    if difference := _difference(data, to_json(plan), ""):
        raise ValueError(difference)


def _difference(found: Any, expected: Any, where: str) -> str:
    """Where two JSON trees differ first, in a value or in its type; empty for equal trees."""
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


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes of a weight, row-major: in `data`, or `nbytes` of `file`, starting at `offset`.

    `file` is relative to the folder of the plan, or absolute.
    """

    data: bytes = b""
    file: str = ""
    offset: int = 0
    nbytes: int = 0
    crc32: int = 0
    """The CRC-32 of the bytes (zlib's): it detects a wrong file, and is no protection against forgery."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The content of a plan.bin: entry points by name, and where the weights are, by name of the value."""

    entries: Mapping[str, ExecutionPlan]
    """{entry point: its plan}."""
    weights: Mapping[str, StoredBytes] = field(default_factory=dict)
    """{value: where the bytes of its weight are}; none where the plan has no stored weights."""

    def __repr__(self) -> str:
        entries = (f"{name}: {plan!r}" for name, plan in self.entries.items())
        return shorten_lines((f"PlanFile: {plural(len(self.weights), 'weight')}", *entries))


@expects(content=a(PlanFile, "a PlanFile"))
def encode_plans(content: PlanFile) -> bytes:
    """`content` as the bytes of a plan.bin.

    Raises:
        ValueError: a plan that `check_plan` refuses for its feed signature, or plans for devices of several alignments.
    """
    alignments = {plan.alignment for plan in content.entries.values()}
    if len(alignments) > 1:
        raise ValueError(f"the plans have the alignments {sorted(alignments)}; one plan.bin has one: write two files")
    (alignment,) = alignments or {ALIGNMENT}
    writer = FieldWriter()
    ENTRIES.write(writer, content.entries)
    WEIGHTS.write(writer, content.weights)
    texts = b"".join(struct.pack("<I", len(text)) + text for text in writer.texts)
    body = texts + b"".join(writer.parts)
    size = HEADER.size + len(body)
    unsigned = HEADER.pack(MAGIC, VERSION, 0, size, len(writer.texts), alignment) + body
    checksum = zlib.crc32(memoryview(unsigned)[CHECKED_FROM:])
    return HEADER.pack(MAGIC, VERSION, checksum, size, len(writer.texts), alignment) + body


@expects(data=a((bytes, bytearray, memoryview), "bytes"))
def decode_plans(data: bytes, source: str = "plan.bin") -> PlanFile:
    """The content of a plan.bin.

    Args:
        data: the bytes of the whole file.
        source: what messages call the file, such as its path.

    Raises:
        SourceError: another version, a file that was cut or changed, or plans that break a rule of the checker.
    """
    if len(data) < HEADER.size or data[:8] != MAGIC:
        raise SourceError(f"{source}: it does not begin as a plan does; expected a file that `onnxline run` wrote")
    _, version, checksum, size, texts, alignment = HEADER.unpack_from(data)
    if version != VERSION:
        raise SourceError(
            f"{source}: found version {version}, expected {VERSION}; make the plan again with this release, or read it "
            "with the release that wrote it"
        )
    if size != len(data):
        raise SourceError(f"{source}: it has {len(data)} bytes and says {size}; it was cut, or written over")
    if zlib.crc32(memoryview(data)[CHECKED_FROM:]) != checksum:
        raise SourceError(f"{source}: its checksum does not fit; it was changed after it was written")
    return _read_sound(source, data, lambda raw: _read_file(raw, texts, alignment), _refuse_other_bytes, _plans_of)


@expects(content=a(PlanFile, "a PlanFile"), folder=a(Path, "a pathlib.Path"))
def check_weights(content: PlanFile, folder: Path, source: str = "plan.bin") -> None:
    """Check that the weights of a plan have the bytes that they had when the plan was made.

    Args:
        content: what `decode_plans` returned.
        folder: the folder of the plan, in which its files of weights are named.
        source: what messages call the plan, such as its path.

    Raises:
        SourceError: a file is not there or too short, or has other bytes.
    """
    for name, stored in content.weights.items():
        try:
            crc32 = _checksum(stored, folder)
        except (OSError, ValueError) as error:  # ValueError: of a NUL in the path, and of an offset above int64
            place, reason = f"{stored.offset} of {stored.file!r}", getattr(error, "strerror", error)
            raise SourceError(f"{source}: weight {name!r} is at {place}: {reason}") from error
        if crc32 != stored.crc32:
            place = f"{stored.nbytes} bytes from {stored.offset} of {stored.file}" if stored.file else "the plan itself"
            raise SourceError(
                f"{source}: weight {name!r} ({place}) has not the bytes that the plan was made with; "
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


def _refuse_other_bytes(data: bytes, content: PlanFile) -> None:
    if encode_plans(content) != data:
        raise ValueError("its bytes are not those of any plan: a text or a name is repeated, or a field has no meaning")


def _read_file(data: bytes, texts: int, alignment: int) -> PlanFile:
    reader = FieldReader(data, HEADER.size, alignment)
    for _ in range(texts):
        reader.texts.append(reader.blob().decode())
    content = PlanFile(ENTRIES.read(reader), WEIGHTS.read(reader))
    reader.end()
    return content


ENTRIES: Final = by_key(TEXT, PLAN)

WEIGHTS: Final = by_key(
    TEXT,
    record(
        lambda file, offset, nbytes, crc32, data: StoredBytes(data, file, offset, nbytes, crc32),
        Field("file", TEXT),
        Field("offset", U64),
        Field("nbytes", U64),
        Field("crc32", U32),
        Field("data", BLOB),
    ),
)
