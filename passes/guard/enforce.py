"""One call under a policy: run it pinned and proven, and report what it would have lost without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from passes.context import PassContext
from passes.errors import ModelError, PolicyError, StepFailed
from passes.graph.index import required_inputs
from passes.guard.call_log import Returned
from passes.guard.calls.base import CallPlan, InterceptedCall
from passes.guard.proof import NotComparable, numbers_prover
from passes.guard.settings import CombinedPolicy
from passes.proof.prover import Prover, StructureProver
from passes.run.result import PassRun, Status
from passes.run.runner import run_passes
from passes.run.tracked import TrackedStructures, find_structures
from passes.weights.detached import DetachedModel


class RefusedByOptimizer(Exception):
    """The call fails with and without a guard, so the optimizer itself should raise its error to the caller."""


@dataclass(frozen=True, slots=True)
class UnguardedResult:
    """The result of the same call without a guard, and its faults."""

    model: DetachedModel | None
    lost: tuple[str, ...]
    fault: str
    refused: bool = False
    """Whether it raised, as opposed to crashing."""


@dataclass(frozen=True, slots=True)
class GuardOutcome:
    """The model to return, and how it was obtained; see `passes.guard.call_log.GuardedCall` for the fields."""

    model: DetachedModel
    returned: Returned
    proven: bool
    kept: Mapping[str, int] = field(default_factory=dict)
    reverted: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    unguarded: UnguardedResult | None = None
    notes: tuple[str, ...] = ()


def enforce(call: InterceptedCall, policy: CombinedPolicy, context: PassContext) -> GuardOutcome:
    """Run `call` in the worker under `policy`.

    Raises:
        RefusedByOptimizer: it has no result with or without the guard.
    """
    judge = _Judge.of(call, policy, context)
    run, plan, why = judge.attempt(lambda: call.plan(policy.skips, context))
    unguarded = judge.run_unguarded() if policy.compare or why else None
    if why and unguarded is not None and unguarded.refused:
        # An operator that the script has registered, say, is not known to the worker.
        refusal = why
        run, plan, why = judge.attempt(lambda: call.plan_here(policy.skips, context))
        if why:
            raise RefusedByOptimizer(refusal)
    if run is None or plan is None or why:
        return judge.without_a_run(why, unguarded)
    return judge.with_a_run(run, plan, unguarded if policy.compare else None)


@dataclass(slots=True)
class _Judge:
    """The parts that every attempt at one call shares."""

    call: InterceptedCall
    policy: CombinedPolicy
    context: PassContext
    watched: TrackedStructures
    prover: Prover
    proven: bool
    """Whether the prover compares numbers, and not only structure."""
    notes: list[str]

    @classmethod
    def of(cls, call: InterceptedCall, policy: CombinedPolicy, context: PassContext) -> _Judge:
        watched = find_structures(call.model, policy.merge(), ())
        try:
            prover = numbers_prover(call, watched.must_hold(), context)
        except NotComparable as reason:
            notes = [_line(f"only the structure is proven: {reason}")]
            return cls(call, policy, context, watched, StructureProver(context), False, notes)
        return cls(call, policy, context, watched, prover, True, [])

    def attempt(self, plan_of: Callable[[], CallPlan | None]) -> tuple[PassRun | None, CallPlan | None, str]:
        """Return a run, its plan, and why it failed as a whole; empty if any of its steps ran."""
        try:
            plan = plan_of()
            if plan is None:
                return None, None, "it cannot be run in this process"
            run = run_passes(self.call.model, plan.steps, self.policy.merge(), self.prover, self.context)
        except (PolicyError, ModelError, StepFailed) as error:
            return None, None, str(error)
        failed = [f"{row.name}: {row.reason}" for row in run.rows if row.status is Status.FAILED]
        has_run = any(row.status is Status.RAN for row in run.rows)
        return run, plan, failed[0] if failed and not has_run else ""

    def run_unguarded(self) -> UnguardedResult:
        try:
            model = self.call.run_unguarded(self.context)
        except StepFailed as failure:
            refused = failure.status == Status.FAILED
            return UnguardedResult(None, (), _line(f"{'raised' if refused else failure.status}: {failure}"), refused)
        lost = [
            f"{kind} {name}: {why}"
            for (kind, name), why in self.watched.find_lost(model).items()
            if kind in self.watched.enforced
        ]
        return UnguardedResult(model, tuple(lost), self._fault(model))

    def _fault(self, model: DetachedModel) -> str:
        """What is wrong with the numbers of `model`; empty if the caller asked for another signature."""
        if _signature(model) != _signature(self.call.model):
            return ""
        try:
            why = self.prover.measure(model).why
        except StepFailed as failure:
            why = str(failure)
        return why and _line(f"differs: {why}")

    def with_a_run(self, run: PassRun, plan: CallPlan, unguarded: UnguardedResult | None) -> GuardOutcome:
        model = run.model
        if self._loses_any(model):  # the runner should have reverted the cause
            return self.without_a_run("a structure is lost", unguarded)
        reverted = {row.name: row.reason for row in run.reverted}
        blind = [f"a fault in {', '.join(run.power.blind)} would not show in the numbers"] if run.power.blind else []
        notes = (*self.notes, *plan.notes, *blind)
        return GuardOutcome(
            model, Returned.GUARDED, self.proven, self._count_kept(), reverted, plan.skipped, unguarded, notes
        )

    def without_a_run(self, why: str, unguarded: UnguardedResult | None) -> GuardOutcome:
        """After a failed run: the optimizer's own result if it has no fault, else the model that came in.

        The optimizer's own result skips no pass, so it is not used if a guard skips any.
        """
        notes = (*self.notes, f"the guarded run did not work: {why}")
        sound = unguarded is not None and not unguarded.lost and not unguarded.fault and not self.policy.skips_any()
        model = unguarded.model if unguarded is not None and sound else None
        if model is None:
            return GuardOutcome(
                self.call.model, Returned.AS_GIVEN, False, self._count_kept(), unguarded=unguarded, notes=notes
            )
        proven = self.proven and _signature(model) == _signature(self.call.model)
        return GuardOutcome(model, Returned.UNGUARDED, proven, self._count_kept(), unguarded=unguarded, notes=notes)

    def _count_kept(self) -> dict[str, int]:
        return {kind: len(self.watched.instances.get(kind, ())) for kind in sorted(self.watched.enforced)}

    def _loses_any(self, model: DetachedModel) -> bool:
        return any(kind in self.watched.enforced for kind, _ in self.watched.find_lost(model))


def _line(text: str) -> str:
    """Join the lines of a native error."""
    return " ".join(text.split())


def _signature(model: DetachedModel) -> list[list[str]]:
    graph = model.proto.graph
    return [[info.name for info in infos] for infos in (required_inputs(graph), graph.output)]
