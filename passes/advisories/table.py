"""What an audit found in one release of a library, grouped so that a person can review it; written as text, and read.

The text is sorted and without times or paths, so that it is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

from passes.errors import ModelError

ROUND_TRIP: Final = "nop"
"""The pass that does nothing: it shows what the library does to every model by reading and writing it."""

DIGITS: Final = 5
"""Hex digits of a mark: with 2,000 cases, two in a thousand new ones would be taken for one of them."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """The cases in which a pass does one thing for one reason: a mark for each, sorted, and their names.

    A table that was read has no names for an entry of very many cases.
    """

    name: str
    kind: str
    why: str
    marks: tuple[str, ...]
    cases: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.marks)


@dataclass(frozen=True, slots=True)
class AuditTable:
    """The result of an audit of one release.

    `names` are the passes that were tried and `cases` the number of models from each source. `judges` are the versions
    of the tools that judged; they could compare no numbers on the `unjudged` cases, nor read the `unread` ones.
    """

    distribution: str
    version: str
    names: tuple[str, ...]
    cases: Mapping[str, int] = field(default_factory=dict)
    judges: Mapping[str, str] = field(default_factory=dict)
    unjudged: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    entries: tuple[AuditEntry, ...] = ()

    def counts(self) -> dict[str, Counter[str]]:
        """Pass → kind → number of cases, for passes with any."""
        found: dict[str, Counter[str]] = {}
        for entry in self.entries:
            found.setdefault(entry.name, Counter())[entry.kind] += entry.count
        return found

    def covers(self, name: str) -> bool:
        """Whether the pass was tried, alone or in its step."""
        return name in self.names or name.partition("/")[0] in self.names


def table_of(
    library: str,
    version: str,
    names: Iterable[str],
    findings: Iterable[AuditFinding],
    cases: Mapping[str, int],
    judges: Mapping[str, str],
    unjudged: Iterable[str] = (),
    unread: Iterable[str] = (),
) -> AuditTable:
    """Group the `findings` on `names`, or on a pass inside of one.

    What `nop` does on a case too is the library's round trip, and is listed once, under `nop`.
    """
    tried = set(names)
    mine = {finding for finding in findings if finding.name in tried or finding.name.partition("/")[0] in tried}
    by_round_trip = {(finding.name, finding.kind, finding.case) for finding in mine if is_round_trip(finding.name)}
    grouped: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for finding in sorted(mine):
        same = ((name, finding.kind, finding.case) for name in round_trips(finding.name))
        if is_round_trip(finding.name) or by_round_trip.isdisjoint(same):
            grouped[finding.name, finding.kind, finding.why].append(finding.case)
    entries = tuple(entry_of(*key, cases=found) for key, found in sorted(grouped.items()))
    facts = dict(sorted(cases.items())), dict(sorted(judges.items()))
    left = tuple(sorted(set(unjudged))), tuple(sorted(set(unread)))
    return AuditTable(
        library, version, tuple(sorted(tried | {finding.name for finding in mine})), *facts, *left, entries
    )


def is_round_trip(name: str) -> bool:
    """Whether a pass is the library's reading and writing of the model alone."""
    return name.rpartition("/")[2] == ROUND_TRIP


def round_trips(name: str) -> tuple[str, ...]:
    """The names under which the round trip of a pass is listed: `nop`, and `STEP/nop` for a step and its passes."""
    return ROUND_TRIP, f"{name.partition('/')[0]}/{ROUND_TRIP}"


def entry_of(name: str, kind: str, why: str, cases: Sequence[str]) -> AuditEntry:
    """The entry for one kind of finding of a pass, with the marks of its cases."""
    return AuditEntry(name, kind, why, tuple(sorted(map(mark_of, cases))), tuple(cases))


def mark_of(case: str) -> str:
    """The 5 hex digits that identify a case in an entry with too many cases to name."""
    return hashlib.sha256(case.encode(errors="surrogatepass")).hexdigest()[:DIGITS]


@dataclass(frozen=True, slots=True, order=True)
class AuditFinding:
    """The pass `name` on the model `case`. `why` says more, in words that are the same on every machine.

    Args:
        name: as the catalogue has it, `onnxsim/fuse_qkv`; `default` for onnxoptimizer's default set as a whole.
        kind: one of `KINDS`.
        case: with its source, `node/test_abs`.
    """

    name: str
    kind: str
    case: str
    why: str = ""


KINDS: Final = {
    "crashed": "the process died",
    "timed-out": "it did not come back",
    "raised": "the library raised",
    "invalid": "ONNX's checker refuses the result, and not the model before",
    "signature": "inputs or outputs have other names, types or sizes",
    "wrong": "the result computes something else, or does not run",
    "grew-nodes": "the result has more operators",
    "grew-bytes": "the result is larger by more than a tenth, and by more than 1 KiB",
    "lost-metadata": "metadata or doc strings are gone from the model, or from operators that are still there",
    "not-idempotent": "a second run changes the model again",
}
"""Kind → what it means, the worst first."""

UNSAFE: Final = frozenset({"crashed", "timed-out", "invalid", "signature", "wrong"})
"""The kinds for which `skip: [unsafe]` leaves a pass out. One that raises says so itself, and costs its own step."""


FORMAT_VERSION: Final = 2

TITLE: Final = "onnxline audit, format "
"""How the first line of a table of any format begins."""

FIRST_LINE: Final = f"{TITLE}{FORMAT_VERSION}"

LISTED: Final = 60
"""Most cases that an entry names; with more it lists their marks, which still show a new one."""

WIDTH: Final = 118

NOTHING: Final = "."

CASE, MARKS = "  - ", "  # "
"""How a line below the head of an entry begins: indented more than the reason, which may begin with anything."""


def table_text(table: AuditTable) -> str:
    """The table, as it is written to a file: facts, counts, then each entry with its cases."""
    lines = [FIRST_LINE, f"library: {table.distribution} {table.version}"]
    lines.append("judged by: " + ", ".join(f"{name} {version}" for name, version in table.judges.items()))
    lines.append("cases: " + ", ".join(f"{source} {count}" for source, count in table.cases.items()))
    counts = table.counts()
    clean = [name for name in table.names if name not in counts]
    lines += ["", *_matrix(counts), "", f"nothing found: {len(clean)}", *_wrap(clean, "  ")]
    for title, cases in ((UNJUDGED, table.unjudged), (UNREAD, table.unread)):
        lines += ["", f"{title}{len(cases)}", *(f"  {to_one_line(case)}" for case in cases)]
    for entry in table.entries:
        lines += ["", f"[{entry.name}] {entry.kind} {entry.count}"]
        lines += [f"  {entry.why}"] if entry.why else []
        listed = 0 < len(entry.cases) <= LISTED
        lines += (
            [f"  {CASE}{to_one_line(case)}" for case in entry.cases] if listed else _wrap(entry.marks, f"  {MARKS}")
        )
    return "\n".join(lines) + "\n"


def to_one_line(case: str) -> str:
    """The name of a case in one line: as a JSON string where it holds a line break, for example."""
    return case if case.isprintable() and not case.startswith('"') else json.dumps(case)


def _wrap(words: Sequence[str], indent: str) -> list[str]:
    return textwrap.wrap(
        " ".join(words), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _matrix(counts: dict[str, Counter[str]]) -> Iterator[str]:
    """A line for each pass with a finding, a column for each kind that occurs."""
    kinds = [kind for kind in KINDS if any(count[kind] for count in counts.values())]
    width = max(len(name) for name in ("pass", *counts))
    if kinds:
        yield _line("pass".ljust(width), kinds, kinds)
    for name in sorted(counts):
        yield _line(name.ljust(width), [str(counts[name][kind] or NOTHING) for kind in kinds], kinds)


def _line(first: str, cells: Sequence[str], kinds: Sequence[str]) -> str:
    return "  ".join([first, *(cell.rjust(len(kind)) for cell, kind in zip(cells, kinds, strict=True))]).rstrip()


def parse(text: str, title: str = "the text") -> AuditTable:
    """Read a table from its text, and check that writing the table gives the same text.

    A table that was cut off or edited by half would accept less, or call less unsafe, than it seems.

    Raises:
        ModelError: it is no table of this format, or its parts do not fit together; with the line.
    """
    lines = text.splitlines()
    if lines[:1] != [FIRST_LINE]:
        raise ModelError(
            f"{title}, line 1: {lines[:1]}, expected {FIRST_LINE!r}; write the table again with this onnxline's audit"
        )
    table = _parse_lines(lines)
    wanted = table_text(table).splitlines()
    for number, (found, expected) in enumerate(zip_longest(lines, wanted, fillvalue="the end"), 1):
        if found != expected:
            raise ModelError(
                f"{title}, line {number}: {found!r} does not fit the rest of the table, which gives {expected!r}: "
                "it was cut off, or edited by half; take tables as `onnxline audit` writes them"
            )
    return table


def _parse_lines(lines: Sequence[str]) -> AuditTable:
    """Parse all but the counts, which follow from the entries."""
    facts = dict(line.split(": ", 1) for line in lines[1:4] if ": " in line)
    library, _, version = facts.get("library", "").partition(" ")
    entries = tuple(_entries(lines))
    clean = " ".join(_lines_below(lines, "nothing found: ")).split()
    names = sorted({*clean, *(entry.name for entry in entries)})
    cases = {source: int(count) for source, count in _pairs(facts.get("cases", "")) if count.isdecimal()}
    judges = dict(_pairs(facts.get("judged by", "")))
    unjudged, unread = (tuple(map(_from_one_line, _lines_below(lines, title))) for title in (UNJUDGED, UNREAD))
    return AuditTable(library, version, tuple(names), cases, judges, unjudged, unread, entries)


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (pair.partition(" ") for pair in text.split(", ") if pair)]


def _lines_below(lines: Sequence[str], head: str) -> list[str]:
    """The indented lines below the line that begins with `head`."""
    start = next((index for index, line in enumerate(lines) if line.startswith(head)), len(lines))
    return _first_block(lines[start + 1 :])


def _entries(lines: Sequence[str]) -> Iterator[AuditEntry]:
    for number, line in enumerate(lines):
        head = re.fullmatch(rf"\[(\S+)\] ({'|'.join(KINDS)}) \d+", line)
        if head is None:
            continue
        name, kind = head.groups()
        body = _first_block(lines[number + 1 :])
        cases = [_from_one_line(text.removeprefix(CASE)) for text in body if text.startswith(CASE)]
        marks = [mark for text in body if text.startswith(MARKS) for mark in text.removeprefix(MARKS).split()]
        why = "".join(text for text in body if not text.startswith((CASE, MARKS)))
        yield entry_of(name, kind, why, cases) if cases else AuditEntry(name, kind, why, tuple(marks))


def _from_one_line(text: str) -> str:
    try:
        return json.loads(text) if text.startswith('"') else text
    except ValueError:
        return text


def _first_block(lines: Sequence[str]) -> list[str]:
    """The indented lines that come first."""
    end = next((index for index, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    return [line[2:] for line in lines[:end]]


UNJUDGED: Final = "numbers not judged: "
UNREAD: Final = "not read: "
