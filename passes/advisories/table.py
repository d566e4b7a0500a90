"""What an audit found in one release of a library, grouped so that a person can review it."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "KINDS",
    "ROUND_TRIP",
    "UNSAFE",
    "AuditEntry",
    "AuditFinding",
    "AuditTable",
    "entry_of",
    "is_round_trip",
    "mark_of",
    "round_trips",
    "table_of",
]

ROUND_TRIP: Final = "nop"
"""The pass that does nothing: what it does is what the library does to every model that it reads and writes."""

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
    mine = {one for one in findings if one.name in tried or one.name.partition("/")[0] in tried}
    by_round_trip = {(one.name, one.kind, one.case) for one in mine if is_round_trip(one.name)}
    grouped: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for one in sorted(mine):
        same = ((name, one.kind, one.case) for name in round_trips(one.name))
        if is_round_trip(one.name) or by_round_trip.isdisjoint(same):
            grouped[one.name, one.kind, one.why].append(one.case)
    entries = tuple(entry_of(*key, cases=found) for key, found in sorted(grouped.items()))
    facts = dict(sorted(cases.items())), dict(sorted(judges.items()))
    left = tuple(sorted(set(unjudged))), tuple(sorted(set(unread)))
    return AuditTable(library, version, tuple(sorted(tried | {one.name for one in mine})), *facts, *left, entries)


def is_round_trip(name: str) -> bool:
    return name.rpartition("/")[2] == ROUND_TRIP


def round_trips(name: str) -> tuple[str, ...]:
    """The names under which the round trip of a pass is listed: `nop`, and `STEP/nop` for a step and its passes."""
    return ROUND_TRIP, f"{name.partition('/')[0]}/{ROUND_TRIP}"


def entry_of(name: str, kind: str, why: str, cases: Sequence[str]) -> AuditEntry:
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
