"""Try passes on one case, and judge their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from passes.advisories import UNSAFE, AuditFinding
from passes.advisories.table import round_trips
from passes.audit.cases import Case
from passes.audit.judge import READY, Result, add_marks, judge, larger
from passes.audit.target import LARGEST, AuditTarget, PassAttempt, attempts, signal_in
from passes.errors import StepCrashed, StepTimedOut
from passes.run.narrow import minimal_culprits
from passes.worker.client import Worker


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """The findings on one case. `unjudged` says why its outputs cannot be judged; empty if they can."""

    findings: tuple[AuditFinding, ...]
    unjudged: str = ""


@dataclass(frozen=True, slots=True)
class AuditTrial:
    """Two worker processes: `libraries` runs the passes, `judges` judges the results. Either may crash."""

    libraries: Worker
    judges: Worker

    def of(self, case: Case, targets: Sequence[AuditTarget]) -> CaseOutcome:
        """Every finding on `case`, of each of `targets` alone; a step's are attributed to its inner passes."""
        case = replace(case, model=add_marks(case.model))
        outcome = self._run_case(case, targets)
        findings = attribute_to_inner(outcome.findings, targets, lambda target: self._run_case(case, [target]).findings)
        return CaseOutcome(findings, outcome.unjudged)

    def _run_case(self, case: Case, targets: Sequence[AuditTarget]) -> CaseOutcome:
        findings: list[AuditFinding] = []
        results: dict[Result, list[str]] = {}
        for attempt, failure in self._attempts(case, targets):
            name = targets[attempt.index].name
            findings += [
                AuditFinding(name, kind, case.name, why) for kind, why in _attempt_findings(attempt, failure, case)
            ]
            if attempt.model and not failure:
                results.setdefault(Result(attempt.model, attempt.changed), []).append(name)
        unjudged, verdicts = self._judge(case, list(results))
        for names, verdict in zip(results.values(), verdicts, strict=True):
            findings += [AuditFinding(name, kind, case.name, why) for name in names for kind, why in verdict.items()]
        return CaseOutcome(tuple(dict.fromkeys(findings)), unjudged)

    def _attempts(self, case: Case, targets: Sequence[AuditTarget]) -> Iterator[tuple[PassAttempt, str]]:
        """Each attempt, with the signal or `timed out` if it crashed the process, else an empty text."""
        model = case.model.SerializeToString()
        data = [target.data() for target in targets]
        begun = PassAttempt(-1)
        while begun.index + 1 < len(targets):
            try:
                for item in _stream(self.libraries, attempts, model=model, targets=data, start=begun.index + 1):
                    yield item, ""
                    begun = item
                return
            except (StepCrashed, StepTimedOut) as failure:
                second = begun.followed
                index = begun.index if second else begun.index + 1
                begun = PassAttempt(index, again=second)
                yield begun, _kind(failure)

    def _judge(self, case: Case, results: Sequence[Result]) -> tuple[str, list[dict[str, str]]]:
        """Return why the outputs are not judged (empty if they are), and a verdict for each result."""
        verdicts: list[dict[str, str]] = []
        unjudged, compares = "", True
        while len(verdicts) < len(results):
            ready = False
            arguments = {"case": case, "results": results, "start": len(verdicts), "compares": compares}
            try:
                for item in _stream(self.judges, judge, **arguments):
                    if isinstance(item, str):
                        ready, unjudged = True, unjudged or ("" if item == READY else item)
                    else:
                        verdicts.append(item[1])
            except (StepCrashed, StepTimedOut) as failure:
                if ready:
                    verdicts.append({"wrong": f"its run ends the process: {_kind(failure)}"})
                elif not compares:
                    raise
                else:
                    unjudged, compares = f"a run of the model itself ends the process: {_kind(failure)}", False
        return unjudged, verdicts


def _stream(worker: Worker, function: Callable[..., Iterator[Any]], **arguments: Any) -> Iterator[Any]:
    """Yield what a generator in the worker yields."""
    ticket = worker.post(function, **arguments)
    while True:
        item = worker.collect(ticket)
        if not worker.awaits(ticket):
            return
        yield item


def _kind(failure: StepCrashed | StepTimedOut) -> str:
    return "timed out" if isinstance(failure, StepTimedOut) else signal_in(str(failure))


def _attempt_findings(attempt: PassAttempt, failure: str, case: Case) -> Iterator[tuple[str, str]]:
    """Kind and reason of the findings that do not depend on the result."""
    where = ["on its own result"] if attempt.again else []
    if failure == "timed out":
        yield "timed-out", ", ".join(where)
    elif failure:
        yield "crashed", ", ".join((failure, *where))
    elif attempt.raised:
        yield "raised", ", ".join((attempt.raised, *where))
    elif attempt.again and attempt.changed:
        yield "not-idempotent", ""
    if attempt.nbytes > LARGEST and larger(case.model.ByteSize(), attempt.nbytes):
        yield "grew-bytes", f"to more than {LARGEST // 2**20} MiB; what it computes was not judged"


NARROWED: Final = UNSAFE | {"raised"}

MOST: Final = 3
"""The most passes that are blamed together; a larger set is not blamed."""


def attribute_to_inner(
    findings: Sequence[AuditFinding],
    targets: Sequence[AuditTarget],
    findings_of: Callable[[AuditTarget], Sequence[AuditFinding]],
) -> tuple[AuditFinding, ...]:
    """Attribute a step's findings on one case to the smallest set of inner passes without which they do not occur.

    A finding stays with the step if there is no such set.

    Args:
        findings: what was found on the case.
        targets: what was tried.
        findings_of: returns every finding of a target on the same case.
    """
    by_name = {target.name: target for target in targets}
    bad = [finding for finding in findings if finding.kind in NARROWED]
    round_trip = {(finding.name, finding.kind) for finding in bad}
    at_fault: dict[str, tuple[str, ...]] = {}
    for finding in bad:
        own = round_trip.isdisjoint((name, finding.kind) for name in round_trips(finding.name))
        if own and finding.name not in at_fault and by_name[finding.name].inner:
            at_fault[finding.name] = _culprits(by_name[finding.name], findings_of)
    return tuple(
        blamed
        for step_finding in findings
        for blamed in _blame_inner(step_finding, at_fault.get(step_finding.name, ()))
    )


def _culprits(target: AuditTarget, findings_of: Callable[[AuditTarget], Sequence[AuditFinding]]) -> tuple[str, ...]:
    def is_good(left_out: tuple[str, ...]) -> bool:
        return not any(finding.kind in NARROWED for finding in findings_of(replace(target, left_out=left_out)))

    blamed = minimal_culprits(target.inner, (), is_good) or ()
    return blamed if len(blamed) <= MOST else ()


def _blame_inner(finding: AuditFinding, at_fault: Sequence[str]) -> Iterator[AuditFinding]:
    if finding.kind in NARROWED and at_fault:
        yield from (replace(finding, name=f"{finding.name}/{bare}") for bare in at_fault)
    else:
        yield finding
