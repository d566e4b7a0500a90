"""The loop: try a step, keep what it made or go on with the model from before, and write down why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.base import Composite, Step, Workbench
from passes.catalog import catalog
from passes.errors import StepFailed
from passes.numbers import Errors
from passes.policy import Policy
from passes.prove import Prover
from passes.result import PassRow, PassRun, Status, StructureVerdict
from passes.trial import Trial
from passes.versions import library_versions
from passes.watch import Watched, find_structures
from passes.weights import DetachedModel

__all__ = ["Observer", "run_passes"]

Observer = Callable[[str, int, int, PassRow | None], None]
"""Called as (step name, its index, number of steps, None) when a step begins, and with its row when it has ended."""


def run_passes(
    model: DetachedModel,
    steps: Sequence[Step],
    policy: Policy,
    prover: Prover,
    bench: Workbench,
    observer: Observer = lambda *_: None,
) -> PassRun:
    """Run `steps` in order on the exported `model`; every change is proven, and what breaks something is reverted.

    Raises:
        PolicyMistake: an unknown name, or a `keep` that matches nothing in the model.
    """
    names = _all_names(steps, bench)
    policy.check(names)
    steps = [_told(step, policy, bench) for step in steps]
    watched = find_structures(model, policy, names)
    power = prover.watch(model, watched.must_hold())
    run = _Run(model, model, watched, prover, bench)
    for index, step in enumerate(steps):
        observer(step.name, index, len(steps), None)
        for row in run.step(step, policy):
            observer(step.name, index, len(steps), row)
    run.conclude()
    return PassRun(run.model, tuple(run.rows), run.verdicts(), power, library_versions())


@dataclass(slots=True)
class _Run:
    """The state of the loop: the model as it stands, and what has been written down."""

    exported: DetachedModel
    model: DetachedModel
    watched: Watched
    prover: Prover
    bench: Workbench
    rows: list[PassRow] = field(default_factory=list)
    gone: dict[tuple[str, str], str] = field(default_factory=dict)
    broken_by: dict[tuple[str, str], str] = field(default_factory=dict)
    last_run: tuple[DetachedModel, int] | None = None
    """The last model that was run and not only reasoned about, with the number of rows up to it."""

    def step(self, step: Step, policy: Policy) -> list[PassRow]:
        """Try one step; returns its row, after those of the inner passes that had to be taken out of it."""
        first, begun = len(self.rows), time.perf_counter()
        skip = policy.skips(step.name)
        if skip is not None:
            self._record(step, Status.SKIPPED, skip.reason)
        else:
            self._try(step)
        self.rows[-1] = replace(self.rows[-1], seconds=time.perf_counter() - begun)
        return self.rows[first:]

    def conclude(self) -> None:
        """Run the final model, if its proof was that it computes the same as one that was run.

        Should onnxruntime refuse it all the same (a wrong type annotation, say), the steps since then are reverted.
        """
        base, row = self.last_run or (self.exported, 0)
        if self.model is base:
            return
        try:
            why = self.prover.run(self.model).why
        except StepFailed as failure:
            why = str(failure)
        if not why:
            return
        self.model = base
        for index in range(row, len(self.rows)):
            if self.rows[index].changed and self.rows[index].status is Status.RAN:
                self.rows[index] = replace(self.rows[index], status=Status.REVERTED, reason=f"the final model: {why}")

    def verdicts(self) -> tuple[StructureVerdict, ...]:
        lost = self.watched.lost(self.model)
        return tuple(
            StructureVerdict(
                kind, one.name, one.module, (kind, one.name) not in lost, self.broken_by.get((kind, one.name))
            )
            for kind, instances in self.watched.instances.items()
            for one in instances
        )

    def _try(self, step: Step) -> None:
        trial = Trial(self.model, self.gone, self.watched, self.prover, self.bench)
        try:
            attempt = trial.attempt(step)
            if attempt.lost or attempt.why:
                narrowed = trial.narrowed(step, attempt)
                for key, author in narrowed.authors.items():
                    self.broken_by.setdefault(key, author)
                for name in narrowed.taken_out:
                    inner = f"{step.name}/{name}"
                    self._record(step, Status.REVERTED, attempt.why, attempt.nodes, attempt.errors, name=inner)
                step, attempt = narrowed.step, narrowed.attempt
        except StepFailed as failure:
            self._record(step, Status(failure.status), str(failure))
            return
        if attempt.why:
            self._record(step, Status.REVERTED, attempt.why, attempt.nodes, attempt.errors)
            return
        if not attempt.changed:
            self._record(step, Status.RAN, _without(step))
            return
        self._record(step, Status.RAN, _without(step), attempt.nodes, attempt.errors)
        self.model = attempt.model
        self.gone.update(attempt.lost)
        if self.prover.has_run(self.model):
            self.last_run = (self.model, len(self.rows))

    def _record(
        self,
        step: Step,
        status: Status,
        reason: str,
        nodes_after: int | None = None,
        errors: Mapping[str, Errors] | None = None,
        *,
        name: str = "",
    ) -> None:
        """Add a row; `nodes_after` is given when there is a changed model to speak of."""
        reason = " ".join(reason.split())  # native errors come in many lines; a row has one
        nodes = len(self.model.proto.graph.node)
        after, changed = (nodes, False) if nodes_after is None else (nodes_after, True)
        self.rows.append(
            PassRow(name or step.name, step.source, status, reason, nodes, after, 0.0, changed, errors or {})
        )


def _told(step: Step, policy: Policy, bench: Workbench) -> Step:
    """The step with the policy's skips told to it, if it has inner passes of its own."""
    if not isinstance(step, Composite):
        return step
    step.check(bench)
    return step.without([name for name in step.inner(bench) if policy.skips(f"{step.name}/{name}")])


def _without(step: Step) -> str:
    left_out = step.left_out if isinstance(step, Composite) else ()
    return "without " + ", ".join(left_out) if left_out else ""


def _all_names(steps: Sequence[Step], bench: Workbench) -> tuple[str, ...]:
    """Names that a skip list may hold; onnxsim's own count only where it runs, since asking for them takes seconds."""
    with_onnxsim = any(isinstance(step, Composite) for step in steps)
    return tuple(row.name for row in catalog(bench, with_onnxsim=with_onnxsim))
