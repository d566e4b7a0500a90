"""Try passes on one case, and judge: what an audit does over and over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from passes.advisories import UNSAFE, Finding
from passes.advisories.table import round_trips
from passes.audit.attempts import LARGEST, PassAttempt
from passes.audit.cases import Case
from passes.audit.error_text import signal_in
from passes.audit.judge import READY, Result, larger
from passes.audit.metadata_probe import add_marks
from passes.audit.target import AuditTarget
from passes.errors import StepCrashed, StepTimedOut
from passes.run.narrow import culprits
from passes.worker.client import Worker

__all__ = ["AuditTrial", "CaseOutcome", "attribute_to_inner"]


ATTEMPTS: Final = "passes.audit.attempts:attempts"
JUDGE: Final = "passes.audit.judge:judge"


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """What came of one case. `unjudged` says why its numbers cannot be looked at; empty where they can."""

    findings: tuple[Finding, ...]
    unjudged: str = ""


@dataclass(frozen=True, slots=True)
class AuditTrial:
    """Two processes: in `libraries` the passes run, in `judges` the results are looked at. Either may die."""

    libraries: Worker
    judges: Worker

    def of(self, case: Case, subjects: Sequence[AuditTarget]) -> CaseOutcome:
        """Every finding on `case`, of each of `subjects` alone; that of a step is told of the passes in it at fault."""
        case = replace(case, model=add_marks(case.model))
        outcome = self._run_case(case, subjects)
        findings = attribute_to_inner(
            outcome.findings, subjects, lambda subject: self._run_case(case, [subject]).findings
        )
        return CaseOutcome(findings, outcome.unjudged)

    def _run_case(self, case: Case, subjects: Sequence[AuditTarget]) -> CaseOutcome:
        findings: list[Finding] = []
        results: dict[Result, list[str]] = {}
        for attempt, failure in self._attempts(case, subjects):
            name = subjects[attempt.place].name
            findings += [Finding(name, kind, case.name, why) for kind, why in _attempt_findings(attempt, failure, case)]
            if attempt.model and not failure:
                results.setdefault(Result(attempt.model, attempt.changed), []).append(name)
        unjudged, verdicts = self._judge(case, list(results))
        for names, verdict in zip(results.values(), verdicts, strict=True):
            findings += [Finding(name, kind, case.name, why) for name in names for kind, why in verdict.items()]
        return CaseOutcome(tuple(dict.fromkeys(findings)), unjudged)

    def _attempts(self, case: Case, subjects: Sequence[AuditTarget]) -> Iterator[tuple[PassAttempt, str]]:
        """Each attempt, with the kind of finding and the words where it brought the process down."""
        model = case.model.SerializeToString()
        data = [subject.data() for subject in subjects]
        begun = PassAttempt(-1)
        while begun.place + 1 < len(subjects):
            try:
                for item in _stream(self.libraries, ATTEMPTS, model=model, subjects=data, start=begun.place + 1):
                    yield item, ""
                    begun = item
                return
            except (StepCrashed, StepTimedOut) as failure:
                second = begun.followed
                place = begun.place if second else begun.place + 1
                begun = PassAttempt(place, again=second)
                yield begun, _kind(failure)

    def _judge(self, case: Case, results: Sequence[Result]) -> tuple[str, list[dict[str, str]]]:
        """Why the numbers are not judged, and a verdict for each result."""
        said: list[dict[str, str]] = []
        unjudged, numbers = "", True
        while len(said) < len(results):
            ready = False
            arguments = {"case": case, "results": results, "start": len(said), "numbers": numbers}
            try:
                for item in _stream(self.judges, JUDGE, **arguments):
                    if isinstance(item, str):
                        ready, unjudged = True, unjudged or ("" if item == READY else item)
                    else:
                        said.append(item[1])
            except (StepCrashed, StepTimedOut) as failure:
                if ready:
                    said.append({"wrong": f"it brings who runs it down: {_kind(failure)}"})
                elif not numbers:
                    raise
                else:
                    unjudged, numbers = f"the model itself brings who runs it down: {_kind(failure)}", False
        return unjudged, said


def _stream(worker: Worker, function: str, **arguments: Any) -> Iterator[Any]:
    """What a generator in the worker yields, but not what it returns."""
    ticket = worker.post(function, **arguments)
    while True:
        item = worker.collect(ticket)
        if not worker.awaits(ticket):
            return
        yield item


def _kind(failure: StepCrashed | StepTimedOut) -> str:
    return "timed out" if isinstance(failure, StepTimedOut) else signal_in(str(failure))


def _attempt_findings(attempt: PassAttempt, failure: str, case: Case) -> Iterator[tuple[str, str]]:
    """What is known of an attempt before anybody has looked at its result."""
    where = ", on its own result" if attempt.again else ""
    if failure:
        timed_out = failure == "timed out"
        yield "timed-out" if timed_out else "crashed", where[2:] if timed_out else failure + where
    elif attempt.raised:
        yield "raised", attempt.raised + where
    elif attempt.again and attempt.changed:
        yield "not-idempotent", ""
    if attempt.nbytes > LARGEST and larger(case.model.ByteSize(), attempt.nbytes):
        yield "grew-bytes", f"to more than {LARGEST // 2**20} MiB; what it computes was not judged"


NARROWED: Final = UNSAFE | {"raised"}

MOST: Final = 3
"""Passes that can be at fault together; of more, none is."""


def attribute_to_inner(
    findings: Sequence[Finding], subjects: Sequence[AuditTarget], tried: Callable[[AuditTarget], Sequence[Finding]]
) -> tuple[Finding, ...]:
    """The findings on one case, where a bad one of a step is that of the smallest set of passes without which the step
    does nothing bad. It stays the step's own where there is no such set.

    Args:
        tried: every finding of a subject on the same case.
    """
    by_name = {subject.name: subject for subject in subjects}
    bad = [one for one in findings if one.kind in NARROWED]
    round_trip = {(one.name, one.kind) for one in bad}
    at_fault: dict[str, tuple[str, ...]] = {}
    for one in bad:
        own = round_trip.isdisjoint((name, one.kind) for name in round_trips(one.name))
        if own and one.name not in at_fault and by_name[one.name].inner:
            at_fault[one.name] = _culprits(by_name[one.name], tried)
    return tuple(told for one in findings for told in _blame_inner(one, at_fault.get(one.name, ())))


def _culprits(subject: AuditTarget, tried: Callable[[AuditTarget], Sequence[Finding]]) -> tuple[str, ...]:
    def is_good(left_out: tuple[str, ...]) -> bool:
        found = tried(replace(subject, left_out=left_out))
        return not any(one.kind in NARROWED for one in found)

    found = culprits(subject.inner, (), is_good) or ()
    return found if len(found) <= MOST else ()


def _blame_inner(one: Finding, at_fault: Sequence[str]) -> Iterator[Finding]:
    if one.kind in NARROWED and at_fault:
        yield from (replace(one, name=f"{one.name}/{bare}") for bare in at_fault)
    else:
        yield one
