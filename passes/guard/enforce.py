"""One call under a policy: run it pinned and proven, and report what it would have lost without the policy.

Results are compared on the caller's inputs, or on drawn inputs of the caller's shapes; if neither is possible, the
structure alone is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx

from passes.context import PassContext
from passes.errors import ModelError, PolicyError, StepFailed
from passes.graph.index import required_inputs
from passes.guard.call_log import GuardedCall, Returned
from passes.guard.calls.base import CallPlan, InterceptedCall
from passes.guard.settings import CombinedPolicy
from passes.model.analysis import AnalyzedModel
from passes.optimize import FIRST_SIZE, drawn_shape, open_dims, plan_draws
from passes.proof.draws import FURTHER_SIZES, Draw, DrawPlan
from passes.proof.numeric import NumericProver
from passes.proof.prover import Prover, StructureProver
from passes.run.result import PassRun, Status
from passes.run.runner import run_passes
from passes.run.tracked import TrackedStructures, find_structures
from passes.structures import Instance
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
    """Whether the call raised an exception, as opposed to crashing."""


Enforced = tuple[DetachedModel, GuardedCall]
"""The model to return, and the record of the call: how the model was obtained."""


def enforce(call: InterceptedCall, policy: CombinedPolicy, context: PassContext, record: GuardedCall) -> Enforced:
    """Run `call` in the worker under `policy`.

    Args:
        call: the call of the library that was intercepted.
        policy: that of all guards.
        context: the workers.
        record: says where the call stands in the script; the result adds what became of the call.

    Raises:
        RefusedByOptimizer: the call has no result, with the guard or without.
    """
    judge = _Judge.of(call, policy, context, record)
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
    record: GuardedCall
    watched: TrackedStructures
    prover: Prover
    proven: bool
    """Whether the prover compares values, and not only structure."""
    notes: list[str]

    @classmethod
    def of(cls, call: InterceptedCall, policy: CombinedPolicy, context: PassContext, record: GuardedCall) -> _Judge:
        watched = find_structures(call.model, policy.merge(), ())
        try:
            prover = numbers_prover(call, watched.must_hold(), context)
        except NotComparable as reason:
            notes = [_line(f"only the structure is proven: {reason}")]
            return cls(call, policy, context, record, watched, StructureProver(), False, notes)
        return cls(call, policy, context, record, watched, prover, True, [])

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
        """What is wrong with the values that `model` computes; empty if the caller asked for another signature."""
        if _signature(model) != _signature(self.call.model):
            return ""
        analyzed = AnalyzedModel(model)
        try:
            why = self.prover.measure(analyzed).why
            if not why and not self.prover.has_run(model):  # a part of it may have been enough
                why = self.prover.run(analyzed, hold=False).why
        except StepFailed as failure:
            why = str(failure)
        return why and _line(f"differs: {why}")

    def with_a_run(self, run: PassRun, plan: CallPlan, unguarded: UnguardedResult | None) -> Enforced:
        if self._loses_any(run.model):  # the runner should have reverted the cause
            return self.without_a_run("a structure is lost", unguarded)
        reverted = {row.name: row.reason for row in run.reverted}
        blind = [f"a fault in {', '.join(run.power.blind)} would not show in the numbers"] if run.power.blind else []
        notes = (*plan.notes, *blind)
        record = self._record(run.model, Returned.GUARDED, unguarded, notes, proven=self.proven)
        return run.model, replace(record, reverted=reverted, skipped=plan.skipped)

    def without_a_run(self, why: str, unguarded: UnguardedResult | None) -> Enforced:
        """After a failed run: the optimizer's own result if it has no fault, else the model that came in.

        The optimizer's own result skips no pass, so it is not used if a guard skips any.
        """
        notes = (f"the guarded run did not work: {why}",)
        sound = unguarded is not None and not unguarded.lost and not unguarded.fault and not self.policy.skips_any()
        model = unguarded.model if unguarded is not None and sound else None
        if model is None:
            return self.call.model, self._record(self.call.model, Returned.AS_GIVEN, unguarded, notes, proven=False)
        proven = self.proven and _signature(model) == _signature(self.call.model)
        return model, self._record(model, Returned.UNGUARDED, unguarded, notes, proven=proven)

    def _record(
        self,
        model: DetachedModel,
        returned: Returned,
        unguarded: UnguardedResult | None,
        notes: Sequence[str],
        *,
        proven: bool,
    ) -> GuardedCall:
        """The record of a call that returns `model`."""
        kept = {kind: len(self.watched.instances.get(kind, ())) for kind in sorted(self.watched.enforced)}
        record = replace(
            self.record,
            model=self.call.source,
            returned=returned,
            nodes_before=len(self.call.model.proto.graph.node),
            nodes_after=len(model.proto.graph.node),
            proof="numbers" if proven else "structure",
            kept=kept,
            missing=tuple(kind for kind in self.policy.keep() if not kept.get(kind)),
            **{"reverted": {}, "skipped": {}, "notes": (*self.notes, *notes)},
        )
        if unguarded is None:
            return record
        nodes = len(unguarded.model.proto.graph.node) if unguarded.model else None
        faults = {"unguarded_fault": unguarded.fault, "would_have_lost": unguarded.lost}
        return replace(record, compared=True, unguarded_nodes=nodes, **faults)

    def _loses_any(self, model: DetachedModel) -> bool:
        return any(kind in self.watched.enforced for kind, _ in self.watched.find_lost(model))


def _line(text: str) -> str:
    """Join the lines of a native error."""
    return " ".join(text.split())


def _signature(model: DetachedModel) -> list[list[str]]:
    graph = model.proto.graph
    return [[info.name for info in infos] for infos in (required_inputs(graph), graph.output)]


MOST_ELEMENTS: Final = 2**24
"""The most elements of one input that is drawn."""


class NotComparable(Exception):  # not an error: structure is still proven
    """The outputs of the model cannot be compared; the message says why."""


class NumbersProver(NumericProver):
    """Watches the model only once, although a call may be tried twice."""

    _has_looked = False

    def watch(self, model: AnalyzedModel, instances: Sequence[Instance]) -> None:
        if not self._has_looked:
            super().watch(model, instances)
        self._has_looked = True


def numbers_prover(call: InterceptedCall, instances: Sequence[Instance], context: PassContext) -> NumericProver:
    """A prover that compares on the caller's own inputs if there are any, else on drawn inputs of the caller's shapes.

    Args:
        call: the call of the library that was intercepted.
        instances: what the prover watches.
        context: whose proof worker runs the model.

    Raises:
        NotComparable: no inputs can be drawn, the model does not run on them, or its outputs depend on random values
            that cannot be fixed.
    """
    if call.feeds:
        return _watching(call, NumbersProver.of_itself(call.feeds, context), instances)
    return _watching(call, NumbersProver.of_plan(_plan(call), context), instances)


def _watching(call: InterceptedCall, prover: NumericProver, instances: Sequence[Instance]) -> NumericProver:
    try:
        prover.watch(AnalyzedModel(call.model), instances)
        prover.power()
    except (ModelError, StepFailed) as error:
        raise NotComparable(str(error)) from error
    return prover


def _plan(call: InterceptedCall) -> DrawPlan:
    """The draws to try.

    Raises:
        NotComparable: the inputs of the first draws are too large, or cannot be drawn.
    """
    inputs = _inputs(call)
    sizes = [dict.fromkeys(open_dims(inputs), size) for size in (FIRST_SIZE, FIRST_SIZE + 1, *FURTHER_SIZES)]
    elements = [math.prod(drawn_shape(info, drawn)) for drawn in sizes for info in inputs.graph.input]
    if max(elements, default=0) > MOST_ELEMENTS:
        raise NotComparable(f"its inputs are too large to draw, with open dims of {FIRST_SIZE}")
    try:
        plan = plan_draws(call.model, inputs=inputs)
        plan.feeds(Draw(0, plan.needed[0]))
    except Exception as error:  # an input that is no tensor, or has a dtype without data
        raise NotComparable(f"no inputs can be drawn for it ({type(error).__name__}: {error})") from error
    return plan


def _inputs(call: InterceptedCall) -> onnx.ModelProto:
    """The model's inputs alone, with the dims that the caller gave."""
    graph, proto = call.model.proto.graph, onnx.ModelProto()
    proto.graph.input.extend(required_inputs(graph))
    for info in proto.graph.input:
        dims = info.type.tensor_type.shape.dim
        shape = call.shapes.get(info.name, ())
        for dim, size in zip(dims, shape if len(shape) == len(dims) else (), strict=False):
            if isinstance(size, int | np.integer) and size > 0:
                dim.dim_value = int(size)
    return proto
