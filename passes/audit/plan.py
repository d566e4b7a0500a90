"""What an audit has to do, in jobs that can be done anywhere in any order; and what they come to together."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from passes.advisories import Finding, Table, table_of
from passes.advisories.text import quoted
from passes.audit.subject import Subject
from passes.errors import PolicyError
from passes.suggest import nearest

__all__ = ["CALL", "Plan", "chosen_subjects", "unread_of"]

CALL: Final = "passes.audit.chunk:run_chunk"

CHUNK: Final = 64
"""Cases of one job: some seconds to some tens of seconds."""

JUDGES: Final = ("onnx", "onnxruntime", "numpy")
"""The libraries that decide what is a finding."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`subjects` on `cases`. `models` is the user's folder; `timeout_s` and `memory_gib` are for one call of a pass."""

    subjects: Sequence[Subject]
    cases: Sequence[str]
    models: Path | None = None
    timeout_s: float = 60.0
    memory_gib: float | None = 4.0

    def jobs(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Key and arguments of `CALL`, for each job."""
        names = [subject.data() for subject in self.subjects]
        passes = hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()[:12]
        for start in range(0, len(self.cases), CHUNK):
            cases = list(self.cases[start : start + CHUNK])
            yield (
                f"{quoted(cases[0])} … {quoted(cases[-1])}, {passes}",
                {
                    "cases": cases,
                    "subjects": names,
                    "models": str(self.models.resolve()) if self.models else None,
                    "timeout_s": self.timeout_s,
                    "memory_gib": self.memory_gib,
                },
            )

    def tables(self, values: Iterable[Mapping[str, Any]]) -> tuple[Table, ...]:
        """A table for each library, of what the jobs returned."""
        done = list(values)
        findings = [Finding(*one) for value in done for one in value["findings"]]
        unjudged = {case for value in done for case in value["unjudged"]}
        unread = unread_of(done)
        tried = Counter(name.partition("/")[0] for name in self.cases if name not in unread)
        facts = tried, {name: metadata.version(name) for name in JUDGES}, unjudged, unread
        libraries = sorted({subject.distribution for subject in self.subjects})
        return tuple(
            table_of(library, metadata.version(library), self._names(library), findings, *facts)
            for library in libraries
        )

    def _names(self, library: str) -> list[str]:
        return [subject.name for subject in self.subjects if subject.distribution == library]


def unread_of(values: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The models that cannot be read, of what the jobs returned, each with the reason."""
    return {case: why for value in values for case, why in value["unread"].items()}


def chosen_subjects(subjects: Sequence[Subject], only: Sequence[str]) -> tuple[Subject, ...]:
    """Those that `only` names: libraries, passes, globs. All, where it names none.

    Raises:
        PolicyError: an entry names nothing, with the nearest.
    """
    for entry in only:
        if not any(_is_meant(subject, entry) for subject in subjects):
            known = [name for subject in subjects for name in (subject.name, subject.distribution)]
            raise PolicyError(f"--only: no pass and no library named {entry!r}{nearest(entry, known)}")
    return tuple(one for one in subjects if not only or any(_is_meant(one, entry) for entry in only))


def _is_meant(subject: Subject, entry: str) -> bool:
    return subject.distribution == entry or fnmatch.fnmatchcase(subject.name, entry)
