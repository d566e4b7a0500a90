"""The faults that running a model shows: a step that breaks down, and an error over a tolerance."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from passes.bisect.faults import Fault, Run, Sighting, StepOutcome
from passes.context import PassContext
from passes.diff import match_models
from passes.errors import ModelError, StepFailed, check_arguments, check_type, is_number
from passes.graph.op_facts import RANDOM_OPS
from passes.model.canonical import value_digests
from passes.optimize import plan_draws
from passes.proof.draw_choice import choose_in_worker
from passes.proof.numbers import compare
from passes.run.reproduce import is_same_failure
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable

Feeds = Sequence[Mapping[str, np.ndarray]]
Outputs = Sequence[Mapping[str, np.ndarray]]
"""By draw, then by name."""


@dataclass(frozen=True, slots=True)
class Breakdown(Fault):
    """A step crashes, times out, raises, or returns no valid model with the same signature, or none that runs."""

    context: PassContext | None = None
    """Where models run; without it, none does."""
    feeds: Feeds = ()
    """The inputs of each draw, by name; none where models do not run."""
    status: str = ""
    """The status of the failed step, once that is known."""
    known: dict[str, StepFailed | None] = field(default_factory=dict, compare=False)
    """Digest of what a model computes → why it does not run."""

    @classmethod
    def of(cls, source: DetachedModel, context: PassContext) -> Self:
        """A breakdown of a step, or of what it makes of a model. If the source itself does not run, results are not run
        either.

        Args:
            source: the model that the steps begin with; results run on the draws that `passes.optimize` makes of its
                inputs.
            context: where models run.
        """
        _check(source, context)
        try:
            return cls(context, _reference(source, context)[0])
        except ModelError:
            return cls()

    @property
    def not_found_message(self) -> str:
        return "nothing crashes"

    @property
    def description(self) -> str:
        return "crash"

    def observe(self, outcome: StepOutcome) -> Sighting | None:
        failure = self._failure(outcome)
        if failure is None:
            return None
        message = " ".join(str(failure).split()) or type(failure).__name__
        return Sighting(f"{failure.status.replace('_', ' ')}: {message}")

    def of_one_step(self, before: DetachedModel, outcome: StepOutcome) -> Self:
        failure = self._failure(outcome)
        return self if failure is None else replace(self, status=failure.status)

    def locate(self, before: DetachedModel, outcome: StepOutcome) -> Collection[str]:
        return () if outcome.failure is not None else _first_changed(before, outcome.model)

    def reproduces(self, part: DetachedModel, run: Run) -> bool:
        outcome = run(part)
        failure = outcome.failure
        if failure is None and outcome.changed and self.context is not None:
            failure = self.of(part, self.context)._failure(outcome)
        return failure is not None and is_same_failure(failure.status, self.status)

    def _failure(self, outcome: StepOutcome) -> StepFailed | None:
        """Why the step failed, or why its model does not run."""
        if outcome.failure is not None or not outcome.changed or self.context is None:
            return outcome.failure
        digest = value_digests(outcome.model).whole
        if digest not in self.known:
            try:
                _outputs(outcome.model, self.feeds, self.context)
                self.known[digest] = None
            except StepFailed as failure:
                self.known[digest] = failure.with_traceback(None)
        return self.known[digest]


def _check(source: object, context: object) -> None:
    check_type(source, DetachedModel, "the model", "a model that read_model has read")
    check_type(context, PassContext, "context", "what open_context gives")


def _first_changed(before: DetachedModel, after: DetachedModel) -> Collection[str]:
    """The outputs of the first nodes that a step removed or changed."""
    matched = match_models(before, after)
    items = matched.nodes.before.items
    first = next((olds for olds, _ in matched.groups if olds), ())
    return [name for old in first for name in items[old].node.output]


@dataclass(frozen=True, slots=True)
class Distance:
    """The largest absolute error, also in words. A model that does not run is `refused`, at an infinite distance."""

    error: float
    why: str = ""
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Deviation(Fault):
    """An output differs from the source's by more than `tolerance`, on seeded draws, in onnxruntime without graph
    optimization. A model that no longer runs is infinitely far off. Models run in `context`; for each draw of
    inputs in `feeds`, `expected` has the source's outputs by name."""

    tolerance: float
    context: PassContext
    feeds: Feeds
    expected: Outputs
    refused: bool = False
    """Whether the fault is that a model does not run."""
    known: dict[str, Distance] = field(default_factory=dict, compare=False)
    """Digest of what a model computes → its distance."""

    @classmethod
    def of(cls, tolerance: float, source: DetachedModel, context: PassContext) -> Self:
        """A deviation from a model on the draws that `passes.optimize` makes of its inputs.

        Args:
            tolerance: the largest absolute error of an output that is no fault, 0 or more.
            source: the model that the steps begin with.
            context: where models run.

        Returns:
            The fault, with the outputs of `source` on each draw.

        Raises:
            UsageError: the tolerance is no number, or negative.
            ModelError: the model does not run, computes NaN, or is random, so it cannot be judged.
        """
        is_right = is_number(tolerance) and tolerance >= 0
        check_arguments(("the error to look for", tolerance, is_right, "a number from 0"))
        _check(source, context)
        feeds, expected = _reference(source, context)
        nan = [name for draw in expected for name, value in draw.items() if value.dtype.kind == "f" and _has_nan(value)]
        if nan:
            raise ModelError(f"the model's own output {nan[0]!r} holds NaN, so nothing can be compared with it")
        if any(node.op_type in RANDOM_OPS for node in source.proto.graph.node):
            twice = _outputs(source, [*feeds, *feeds], context)  # a new session would draw the same values again
            apart = _distance(twice[: len(feeds)], twice[len(feeds) :])
            if apart.error > tolerance:
                raise ModelError(
                    f"the model is random: two runs of it differ by {apart.error:.3g}, over {tolerance:g}, so no pass "
                    "can be blamed for that"
                )
        return cls(tolerance, context, feeds, expected)

    @property
    def not_found_message(self) -> str:
        worst = max((distance.error for distance in self.known.values()), default=0.0)
        return f"nothing wrong: outputs are off by at most {worst:.3g}, and {self.tolerance:g} is allowed"

    @property
    def description(self) -> str:
        return f"error over {self.tolerance:g}"

    def observe(self, outcome: StepOutcome) -> Sighting | None:
        if outcome.failure:
            return None
        distance = self._distance(outcome.model)
        return Sighting(distance.why, (), distance.error) if distance.error > self.tolerance else None

    def measure(self, model: DetachedModel) -> float:
        return self._distance(model).error

    def _distance(self, model: DetachedModel) -> Distance:
        digest = value_digests(model).whole
        if digest not in self.known:
            try:
                self.known[digest] = _distance(self.expected, _outputs(model, self.feeds, self.context))
            except StepFailed as failure:
                self.known[digest] = Distance(math.inf, " ".join(str(failure).split()), refused=True)
        return self.known[digest]

    def of_one_step(self, before: DetachedModel, outcome: StepOutcome) -> Self:
        """Where the error has grown over the steps until `before`, the tolerance is half of what `outcome` adds."""
        if self._distance(outcome.model).refused:
            return replace(self, refused=True)
        apart = _distance(
            _outputs(before, self.feeds, self.context), _outputs(outcome.model, self.feeds, self.context)
        ).error
        return self if apart > self.tolerance else replace(self, tolerance=apart / 2)

    def locate(self, before: DetachedModel, outcome: StepOutcome) -> Collection[str]:
        return _first_changed(before, outcome.model)

    def reproduces(self, part: DetachedModel, run: Run) -> bool:
        outcome = run(part)
        if not outcome.changed:
            return False
        try:
            feeds, expected = _reference(part, self.context)
        except (ModelError, StepFailed):  # no model that can be judged
            return False
        try:
            got = _outputs(outcome.model, feeds, self.context)
        except StepFailed:
            return self.refused
        if self.refused or any(map(_has_nan, (value for draw in expected for value in draw.values()))):
            return False
        return _distance(expected, got).error > self.tolerance


def compute_outputs(model: MappedModel, feeds: Feeds) -> Outputs:
    """Run `model` on each of `feeds`, in the proof worker.

    Raises:
        StepFailed: onnxruntime refuses the model, or stops.
    """
    session = model.session()
    return [session.run(draw) for draw in feeds]


def _outputs(model: DetachedModel, feeds: Feeds, context: PassContext) -> Outputs:
    return context.proofs.ask(compute_outputs, model=portable(model, context.spill), feeds=list(feeds))


def _reference(source: DetachedModel, context: PassContext) -> tuple[Feeds, Outputs]:
    try:
        draws, _ = choose_in_worker(source, plan_draws(source), context)
    except StepFailed as failure:
        raise ModelError(f"the model does not run as it is: {failure}") from failure
    return [draw.feeds for draw in draws], [draw.results for draw in draws]


def _distance(expected: Outputs, got: Outputs) -> Distance:
    """The largest absolute error of all outputs, and where it is."""
    worst = Distance(0.0)
    for expected_draw, result in zip(expected, got, strict=True):
        for name, value in expected_draw.items():
            errors = compare(value, result[name])
            if errors.max_abs > worst.error:
                reason = f"is off by {errors.max_abs:.3g}" if math.isfinite(errors.max_abs) else errors.why
                worst = Distance(errors.max_abs, f"output {name}: {reason}")
    return worst


def _has_nan(value: np.ndarray) -> bool:
    return value.dtype.kind == "f" and bool(np.isnan(value).any())
