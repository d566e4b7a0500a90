"""What an audit tries, a single pass or a library's own set of passes, and the trial of it on one case: the calls that
a worker makes, and the findings on their results. Each pass gets its own copy of the model."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import onnx

from passes.advisories import ROUND_TRIP, UNSAFE, AuditFinding
from passes.advisories.table import round_trips
from passes.audit.cases import Case
from passes.audit.judge import READY, Result, add_marks, judge, larger, message_of
from passes.catalog import catalog
from passes.catalog.listing import CatalogEntry, isolate_pass
from passes.context import PassContext
from passes.errors import PolicyError, StepCrashed, StepTimedOut
from passes.external.onnxruntime_graph import NOTHING
from passes.graph.index import copy_of
from passes.model.canonical import canonical_digest
from passes.recipe.recipe import OWN_STEPS, default_passes, single_passes, steps_of
from passes.run.narrow import minimal_culprits
from passes.step import Step, flatten
from passes.weights.detached import DetachedModel
from passes.worker.client import Worker

DEFAULT: Final = "default"
"""The passes that a recipe calls by this name, in the order of their library."""


@dataclass(frozen=True, slots=True)
class AuditTarget:
    """A call to try. `distribution` is the library's name in pip, `step` its name in a recipe.

    `passes` are what one call runs of those that a recipe names one by one; `left_out` are the passes that a composite
    step leaves out, and `options` its other options. `inner` are the passes of a step that are searched for the pass at
    fault. `data` and `AuditTarget(**data)` convert to JSON and back.
    """

    name: str
    distribution: str
    step: str
    passes: Sequence[str] = ()
    left_out: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    inner: Sequence[str] = ()

    def data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def make_step(self) -> Step:
        """The step whose library is called."""
        if not self.passes:
            return OWN_STEPS[self.step].from_options(self.options).without(self.left_out)
        first, *following = flatten(steps_of(self.passes))
        return first.join(following)


def targets_of(context: PassContext, *, every: bool = False) -> tuple[AuditTarget, ...]:
    """Each pass that a recipe names alone, the default set, and each step of a recipe that is installed.

    onnxruntime loads a model before it optimizes it, and may refuse it then: that is `onnxruntime/nop`.

    Args:
        context: where libraries are asked for their passes.
        every: the passes inside of the steps too, each alone. There are hundreds.
    """
    rows = catalog(context, steps=None if every else ())
    passes = default_passes()
    default = AuditTarget(DEFAULT, passes[0].source, passes[0].source, [step.name for step in passes])
    idle = AuditTarget(f"onnxruntime/{ROUND_TRIP}", "onnxruntime", "onnxruntime", options={"level": NOTHING})
    singles = {step.name for step in single_passes()}
    steps = OWN_STEPS.keys() - missing_steps(context).keys()
    known = [row for row in rows if row.name in singles or row.name.partition("/")[0] in steps]
    others = [_target(row, rows, singles) for row in known if row.runs not in ("missing", "never")]
    return (default, idle, *others)


def missing_steps(context: PassContext) -> Mapping[str, str]:
    """Name → why, for each step of a recipe whose library is not installed, or that asks for a file."""
    missing = {}
    for name, make in OWN_STEPS.items():
        try:
            make().check(context)
        except PolicyError as error:
            missing[name] = f"{name} is not tried: {error}"
    return missing


def with_inner(targets: Sequence[AuditTarget], context: PassContext) -> tuple[AuditTarget, ...]:
    """Fill in the inner passes of whole steps. Asking a library takes seconds, so choose `targets` before."""
    return tuple(
        replace(target, inner=OWN_STEPS[target.name]().inner(context)) if target.name in OWN_STEPS else target
        for target in targets
    )


def _target(row: CatalogEntry, rows: Sequence[CatalogEntry], singles: Collection[str]) -> AuditTarget:
    if row.name in singles:
        return AuditTarget(row.name, row.source, row.source, (row.bare,))
    if "/" not in row.name:
        return AuditTarget(row.name, row.source, row.name)
    step = isolate_pass(row, rows)
    return AuditTarget(row.name, row.source, step.name, left_out=tuple(step.left_out), options=dict(step.options))


LARGEST: Final = 128 * 2**20
"""Bytes of a result above which only its size is judged: constant folding can turn a kilobyte into a gigabyte."""


@dataclass(frozen=True, slots=True)
class PassAttempt:
    """The result of one call of a pass. `index` counts the passes in `targets`, from 0.

    `again` marks the second call, on the result of the first. Each call is reported by itself, since either may crash
    the process. The second call is made only if the first changed something; `followed` announces it.
    """

    index: int
    raised: str = ""
    model: bytes = b""
    changed: bool = False
    nbytes: int = 0
    again: bool = False
    followed: bool = False


def attempts(model: bytes, targets: Sequence[Mapping[str, Any]], start: int) -> Generator[PassAttempt]:
    """Try `targets`, beginning with number `start`. A pass that leaves what the model computes is not called again."""
    source = onnx.load_from_string(model)
    known: dict[bytes, str] = {}

    def digest_of(result: bytes) -> str:  # most passes make the same model
        key = hashlib.blake2b(result).digest()
        return known.get(key) or known.setdefault(key, _digest(result))

    for index, data in enumerate(targets):
        if index < start:
            continue
        step = AuditTarget(**data).make_step()
        first = _attempt(step, source, index)
        changed = not first.raised and digest_of(first.model) != digest_of(model)
        small = len(first.model) <= LARGEST
        shipped = first.model if small else b""
        yield PassAttempt(index, first.raised, shipped, changed, len(first.model), followed=changed and small)
        if changed and small:
            second = _attempt(step, onnx.load_from_string(first.model), index)
            same = not second.raised and digest_of(second.model) == digest_of(first.model)
            yield PassAttempt(index, second.raised, changed=not same, again=True)


def _attempt(step: Step, source: onnx.ModelProto, index: int) -> PassAttempt:
    """Call a library on a copy of `source` as its users do: the repairs of its step would hide findings."""
    copy = copy_of(source)
    try:
        result = step.call_library(copy)
        return PassAttempt(index, model=result.SerializeToString(deterministic=True))
    except MemoryError:
        raise
    except Exception as error:
        return PassAttempt(index, raised=message_of(error))


def _digest(model: bytes) -> str:
    try:
        return canonical_digest(DetachedModel(onnx.load_from_string(model), {}))
    except Exception as error:  # a result that cannot be read counts as changed
        return f"unreadable: {type(error).__name__}"


def signal_in(message: str) -> str:
    """The signal named in the message of a crash, such as `SIGSEGV`; else its exit code or its words on memory."""
    match = re.search(r"signal (SIG\w+)|exit code -?\d+|out of memory|more memory", message)
    return match[1] or match[0] if match else "died"


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
