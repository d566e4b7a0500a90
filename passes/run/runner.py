"""The loop: try a step, accept its model or continue with the previous model, and record why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from passes.context import PassContext
from passes.errors import StepFailed
from passes.graph.traversal import pause_collector
from passes.model.analysis import AnalyzedModel, what_is_invalid
from passes.model.signature import (
    describe_defaults,
    describe_lost_training,
    drop_stale_training,
    fill_in_outputs,
    free_initializers,
    restore_version,
)
from passes.policy.policy import Policy
from passes.proof.prover import Prover
from passes.provenance import Carrier, name_weights
from passes.recipe.recipe import library_versions, pass_names
from passes.run.apply_step import with_skips
from passes.run.growth import describe_growth, describe_void_nodes
from passes.run.reproduce import save_reproducer
from passes.run.result import PassRow, PassRun, Status, StructureVerdict, op_changes
from passes.run.tracked import TrackedStructures, find_structures, refuse_unmatched
from passes.run.trial import Attempt, Trial
from passes.step import Repeat, Step, flatten
from passes.weights.detached import DetachedModel

Observer = Callable[[str, int, int, PassRow | None], None]
"""Called as (step name, its index, number of steps, None) when a step begins, and with its row when it has ended."""


ChangeObserver = Callable[[int, PassRow, AnalyzedModel, AnalyzedModel], None]
"""Called as (index of the row, the row without its time, the model before the step, the model that the step made)."""


def run_passes(
    model: DetachedModel,
    recipe: Sequence[Step | Repeat],
    policy: Policy,
    prover: Prover,
    context: PassContext,
    observer: Observer = lambda *_: None,
    reproducers: Path | None = None,
    on_change: ChangeObserver = lambda *_: None,
    *,
    observes: bool = True,
) -> PassRun:
    """Run `recipe` in order on the exported `model`; every change is proven, and what breaks something is reverted.

    Args:
        model: the exported model.
        recipe: steps, and groups of steps that repeat.
        policy: what to skip, and what to keep.
        prover: compares each changed model with the reference.
        context: the workers, and a folder for files.
        observer: called when a step begins, and with its row when it has ended.
        reproducers: the folder in which to save the smallest model that still brings a step down; none by default.
        on_change: is shown each change of the model, also one that is rejected. A row that is judged again in the end
            is shown again, with `changed` false if its step does nothing any more.
        observes: whether the structures that are always observed are looked for, too.

    Raises:
        PolicyError: an unknown name, or a `keep` that matches nothing in the model.
    """
    source, model = model, fill_in_outputs(free_initializers(model))
    blocks = [item if isinstance(item, Repeat) else Repeat((item,), limit=1) for item in recipe]
    steps = flatten(recipe)
    names = pass_names(steps, context) if policy.skip else ()
    policy.check(names, [step.name for step in steps])
    made_later = {kind for step in steps for kind in step.makes_structures}
    watched = find_structures(model, policy, names, made_later, observes=observes)
    before = AnalyzedModel(model)
    prover.watch(before, watched.must_hold())
    refuses = policy.contrib == "refuse"
    loop = _PassLoop(before, before, watched, prover, context, reproducers, on_change, refuses)
    runnable = [with_skips(step, policy, context) for step in steps]
    begun = 0
    for block in blocks:
        ended = begun + len(block.steps)
        for turn in range(1, block.limit + 1):
            begun_with = loop.model
            for index in range(begun, ended):
                observer(runnable[index].name, index, len(steps), None)
                for row in loop.step(runnable[index], policy, turn):
                    observer(runnable[index].name, index, len(steps), row)
            if loop.model is begun_with:
                break
        else:
            if block.limit > 1:
                loop.add_reason(f"not stable after {block.limit} turns")
        begun = ended
    loop.conclude()
    refuse_unmatched(loop.watched, policy, loop.model, _say_tried(steps, loop.rows))
    power, coverage = prover.power(), prover.coverage(loop.current)
    named = name_weights(model, loop.model)  # last: what was proven goes by the names from before
    final = drop_stale_training(source, restore_version(source, fill_in_outputs(named)))
    said = describe_defaults(final), describe_lost_training(source, final)
    return PassRun(
        *(final, tuple(loop.rows), loop.verdicts(), power, library_versions(), watched, coverage),
        remarks=(*filter(None, said), *_closing_remarks(loop.rows, before, AnalyzedModel(final))),
        example=next(iter(prover.feeds()), {}),
        nodes_before=len(model.proto.graph.node),
        invalid="" if before.invalid else what_is_invalid(final),
    )


def _say_tried(steps: Sequence[Step], rows: Sequence[PassRow]) -> dict[str, str]:
    """Kind of structure → which step of the recipe should have made it, and the reason in its row."""
    reasons = {row.name: f": {row.reason}" for row in rows if row.reason}
    hint = "a step that folds constants, such as onnxsim, may help before it"
    return {
        kind: f"the step {step.name} could not change that{reasons.get(step.name, '')}; {hint}"
        for step in steps
        for kind in step.makes_structures
    }


@dataclass(frozen=True, slots=True)
class _Accepted:
    """An accepted step, with the index of its row and the model that it made."""

    row: int
    step: Step
    after: AnalyzedModel


@dataclass(slots=True)
class _PassLoop:
    """The state of the loop: the current model, and what has been recorded."""

    baseline: AnalyzedModel
    """The last model that was run as a whole."""
    current: AnalyzedModel
    watched: TrackedStructures
    prover: Prover
    context: PassContext
    reproducers: Path | None
    on_change: ChangeObserver
    refuses_contrib: bool
    rows: list[PassRow] = field(default_factory=list)
    gone: dict[tuple[str, str], str] = field(default_factory=dict)
    broken_by: dict[tuple[str, str], str] = field(default_factory=dict)
    carrier: Carrier = field(default_factory=Carrier)
    held: set[tuple[str, str]] = field(default_factory=set)
    """The kept structures of which a row says what would have lost them."""
    trial: Trial | None = None
    accepted: list[_Accepted] = field(default_factory=list)
    """The steps since `baseline`, each proven by what it changed."""

    @property
    def model(self) -> DetachedModel:
        """The current model."""
        return self.current.model

    def step(self, step: Step, policy: Policy, turn: int) -> list[PassRow]:
        """Try one step; returns its row, after the rows of the inner passes that had to be taken out of it."""
        first, begun = len(self.rows), time.perf_counter()
        skip = policy.skips(step.name)
        if skip is not None:
            self._record(step, Status.SKIPPED, skip.reason)
        else:
            with pause_collector():
                self._try(step)
        self.rows[-1] = replace(self.rows[-1], seconds=time.perf_counter() - begun)
        self.rows[first:] = [replace(row, turn=turn) for row in self.rows[first:]]
        return self.rows[first:]

    def add_reason(self, words: str) -> None:
        """Say more about the step that ran last."""
        last = self.rows[-1]
        self.rows[-1] = replace(last, reason=f"{last.reason}; {words}" if last.reason else words)

    def conclude(self) -> None:
        """Run the final model, if it was proven by its equality to an earlier model and was not run itself.

        Should it be wrong all the same (onnxruntime refuses a type that a step has declared, say), the first step whose
        model is wrong is reverted, and the steps after it are tried again without it.
        """
        while self.accepted and self._fault_of(self.current):
            wrong, right = len(self.accepted) - 1, -1
            while wrong - right > 1:
                middle = (wrong + right) // 2
                wrong, right = (middle, right) if self._fault_of(self.accepted[middle].after) else (wrong, middle)
            self._revert_accepted(wrong)

    def _fault_of(self, analyzed: AnalyzedModel) -> str:
        """What a run of the whole model finds wrong; empty for nothing."""
        try:
            return self.prover.run(analyzed, hold=False).why
        except StepFailed as failure:
            return str(failure)

    def _revert_accepted(self, index: int) -> None:
        """Revert one of the accepted steps, and try the steps after it again."""
        guilty, later = self.accepted[index], self.accepted[index + 1 :]
        why = self._fault_of(guilty.after)
        self.rows[guilty.row] = replace(
            self.rows[guilty.row], status=Status.REVERTED, reason=f"run as a whole: {' '.join(why.split())}"
        )
        self.accepted = self.accepted[:index]
        self.current = self.accepted[-1].after if self.accepted else self.baseline
        self.on_change(guilty.row, self.rows[guilty.row], self.current, guilty.after)
        for accepted in later:
            attempt = self._trial().try_step(accepted.step)
            status = attempt.status if attempt.why else Status.RAN
            row = self._row(accepted.step, status, attempt.why or _reason(accepted.step, attempt), attempt)
            was = self.rows[accepted.row]
            self.rows[accepted.row] = replace(row, name=was.name, seconds=was.seconds, turn=was.turn)
            self._report_change(accepted.row, attempt)
            if attempt.changed and not attempt.why:
                self._accept(accepted.row, accepted.step, attempt)

    def verdicts(self) -> tuple[StructureVerdict, ...]:
        lost = self.watched.find_lost(self.model)
        return tuple(
            StructureVerdict(
                kind,
                instance.name,
                instance.module,
                (kind, instance.name) not in lost,
                self.broken_by.get((kind, instance.name)),
            )
            for kind, instances in self.watched.instances.items()
            for instance in instances
        )

    def _try(self, step: Step) -> None:
        trial = self._trial()
        attempt = trial.try_step(step)
        if attempt.lost or attempt.why:
            narrowed = trial.narrow(step, attempt)
            for key, author in narrowed.authors.items():
                self.broken_by.setdefault(key, author)
            for name in narrowed.taken_out:
                self._record(step, attempt.status, attempt.why, attempt, name=f"{step.name}/{name}")
            if narrowed.taken_out and attempt.broke_down:
                self.rows[-1] = replace(self.rows[-1], reproducer=self._save_reproducer(step, attempt))
            step, attempt = narrowed.step, narrowed.attempt
        if attempt.why:
            # A composite step that raises is narrowed; to make its model smaller too would take minutes.
            raised = attempt.status is Status.FAILED and not step.is_composite
            saved = self._save_reproducer(step, attempt) if attempt.broke_down or raised else ""
            self._record(step, attempt.status, "; ".join(filter(None, (attempt.why, attempt.note))), attempt)
            self.rows[-1] = replace(self.rows[-1], reproducer=saved)
            return
        merges = trial.find_merges(attempt)
        author = trial.find_merger(step) if merges else ""
        found = tuple(f"{author} merges {merge}, products of one input, into one" for merge in merges)
        reason = "; ".join(filter(None, (_reason(step, attempt), *found)))
        self._record(step, Status.RAN, reason, attempt)
        self.rows[-1] = replace(
            self.rows[-1], merges=found, remarks=(*self.rows[-1].remarks, *self._describe_held(trial, step))
        )
        if attempt.changed:
            self._accept(len(self.rows) - 1, step, attempt)

    def _describe_held(self, trial: Trial, step: Step) -> Iterator[str]:
        """A sentence on the kept structures that `step` is the first that would have lost."""
        author, lost = trial.find_held(step, self.held)
        self.held.update(lost)
        if lost:
            (kind, name), count = next(iter(lost)), len(lost)
            more = f" and {count - 1} more, which are kept" if count > 1 else ", which is kept"
            doer = f"its {author.partition('/')[2]} " if "/" in author else ""
            yield f"{doer}would have lost {kind} {name}{more}"

    def _trial(self) -> Trial:
        if self.trial is None or self.trial.before is not self.current:
            self.trial = Trial(
                *(self.current, self.gone, self.watched, self.prover, self.context, self.carrier, self.refuses_contrib)
            )
        return self.trial

    def _accept(self, row: int, step: Step, attempt: Attempt) -> None:
        self.current = attempt.after
        self.gone.update(attempt.lost)
        if step.makes_structures:
            self.watched = self.watched.with_new(step.makes_structures, self.model, self.gone)
            lost = self.watched.find_lost(self.model)
            self.gone = {key: why for key, why in self.gone.items() if key in lost}
        self.accepted.append(_Accepted(row, step, attempt.after))
        if self.prover.has_run(self.model):
            self.baseline, self.accepted = self.current, []

    def _save_reproducer(self, step: Step, attempt: Attempt) -> str:
        """The file with the smallest model on which `step` still breaks down; empty when none is asked for."""
        if self.reproducers is None or self.trial is None:
            return ""
        return save_reproducer(step, self.trial.pinned, self.context, self.reproducers, attempt.status)

    def _record(
        self, step: Step, status: Status, reason: str, attempt: Attempt | None = None, *, name: str = ""
    ) -> None:
        """Add a row for `step`."""
        self.rows.append(replace(self._row(step, status, reason, attempt), name=name or step.name))
        if attempt is not None and attempt.changed:
            self._report_change(len(self.rows) - 1, attempt)

    def _report_change(self, index: int, attempt: Attempt) -> None:
        self.on_change(index, self.rows[index], self.current, attempt.after)

    def _row(self, step: Step, status: Status, reason: str, attempt: Attempt | None) -> PassRow:
        reason = " ".join(reason.split())  # native errors come in many lines; a row has one
        nodes = len(self.model.proto.graph.node)
        after, changed, errors, diff, lost, remarks = nodes, False, {}, {}, (), ()
        if attempt is not None and attempt.changed:
            after, changed, errors = attempt.nodes, True, attempt.errors
            diff = op_changes(self.model, attempt.model)
            lost = tuple(f"{kind} {name}" for kind, name in attempt.lost)
            if status is Status.RAN:
                change = self.current, attempt.after
                remarks = (*describe_growth(*change), *describe_void_nodes(*change))
        return PassRow(step.name, step.source, status, reason, nodes, after, 0.0, changed, errors, diff, lost, remarks)


def _closing_remarks(rows: Sequence[PassRow], before: AnalyzedModel, after: AnalyzedModel) -> Iterator[str]:
    """What the rows say of nodes of zeros and ones, and of growth that is still there in the end."""
    remarks = [(row.name, remark) for row in rows for remark in row.remarks]
    grew = any(" grew " in remark for _, remark in remarks) and describe_growth(before, after)
    for name, remark in remarks:
        if grew or " grew " not in remark:
            yield f"{name}: {remark}"


def _reason(step: Step, attempt: Attempt) -> str:
    """The reason in the row of a step that ran: the passes that were left out, and the note of the step."""
    left_out = f"without {', '.join(step.left_out)}" if step.left_out else ""
    return "; ".join(filter(None, (left_out, attempt.note)))
