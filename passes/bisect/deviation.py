"""The fault of numbers: outputs are further from those of the source model than they may be."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np

from passes.bisect.faults import Run, Sighting
from passes.bisect.route import Made
from passes.context import PassContext
from passes.diff import match_models
from passes.errors import ModelError, StepFailed
from passes.model.canonical import RANDOM_OPS, meanings_of
from passes.model.sharing import Portable, portable
from passes.model.weights import DetachedModel
from passes.optimize import plan_draws
from passes.proof.draw_choice import choose_in_worker
from passes.proof.numbers import compare

__all__ = ["Deviation", "outputs"]

Feeds = Sequence[Mapping[str, np.ndarray]]
Outputs = Sequence[Mapping[str, np.ndarray]]
"""By draw, then by name."""


@dataclass(frozen=True, slots=True)
class Distance:
    """The largest absolute error, in words too; infinite where a model does not run, which is `refused`."""

    error: float
    why: str = ""
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Deviation:
    """Some output is further than `tolerance` from what the source model computes, on seeded draws, in onnxruntime with
    graph optimization off. A model that does not run any more is infinitely far."""

    tolerance: float
    bench: PassContext
    feeds: Feeds
    expected: Outputs
    refused: bool = False
    """Whether what is looked for is that a model does not run."""
    known: dict[str, Distance] = field(default_factory=dict, compare=False)
    """By what a model computes, as a digest."""

    @classmethod
    def of(cls, tolerance: float, source: DetachedModel, bench: PassContext) -> Self:
        """With the draws of `passes.optimize`.

        Raises:
            ModelError: the model does not run, computes NaN, or is random: then it cannot be judged.
        """
        feeds, expected = _reference(source, bench)
        nan = [name for draw in expected for name, value in draw.items() if value.dtype.kind == "f" and _has_nan(value)]
        if nan:
            raise ModelError(f"the model's own output {nan[0]!r} holds NaN, so nothing can be compared with it")
        if any(node.op_type in RANDOM_OPS for node in source.proto.graph.node):
            twice = _outputs(source, [*feeds, *feeds], bench)  # a new session would draw the same numbers again
            apart = _distance(twice[: len(feeds)], twice[len(feeds) :])
            if apart.error > tolerance:
                raise ModelError(
                    f"the model is random: two runs of it differ by {apart.error:.3g}, over {tolerance:g}, so no pass "
                    "can be blamed for that"
                )
        return cls(tolerance, bench, feeds, expected)

    @property
    def kinds(self) -> tuple[str, ...]:
        return ()

    @property
    def absent(self) -> str:
        worst = max((one.error for one in self.known.values()), default=0.0)
        return f"nothing wrong: outputs are off by at most {worst:.3g}, and {self.tolerance:g} is allowed"

    @property
    def told(self) -> str:
        return f"error over {self.tolerance:g}"

    def seen(self, made: Made) -> Sighting | None:
        if made.failure:
            return None
        found = self._distance(made.model)
        return Sighting(found.why, (), found.error) if found.error > self.tolerance else None

    def measured(self, model: DetachedModel) -> float:
        return self._distance(model).error

    def _distance(self, model: DetachedModel) -> Distance:
        meaning = meanings_of(model).whole
        if meaning not in self.known:
            try:
                self.known[meaning] = _distance(self.expected, _outputs(model, self.feeds, self.bench))
            except StepFailed as failure:
                self.known[meaning] = Distance(math.inf, " ".join(str(failure).split()), refused=True)
        return self.known[meaning]

    def of_one_step(self, before: DetachedModel, made: Made) -> Self:
        """The error may have grown over several steps; then half of what this one adds is looked for."""
        if self._distance(made.model).refused:
            return replace(self, refused=True)
        apart = _distance(_outputs(before, self.feeds, self.bench), _outputs(made.model, self.feeds, self.bench)).error
        return self if apart > self.tolerance else replace(self, tolerance=apart / 2)

    def place(self, before: DetachedModel, made: Made) -> Collection[str]:
        """What the nodes make that went or were changed first."""
        matched = match_models(before, made.model)
        items = matched.same.before.items
        first = next((olds for olds, _ in matched.groups if olds), ())
        return [name for old in first for name in items[old].node.output]

    def shown(self, part: DetachedModel, run: Run) -> bool:
        made = run(part)
        if made.failure or made.model is part:
            return False
        try:
            feeds, expected = _reference(part, self.bench)
        except (ModelError, StepFailed):  # no model that can be judged
            return False
        try:
            got = _outputs(made.model, feeds, self.bench)
        except StepFailed:
            return self.refused
        if self.refused or any(map(_has_nan, (value for draw in expected for value in draw.values()))):
            return False
        return _distance(expected, got).error > self.tolerance


def outputs(model: Portable, feeds: Feeds) -> Outputs:
    """In the proof worker: what `model` computes from each of `feeds`.

    Raises:
        StepFailed: onnxruntime refuses the model, or stops.
    """
    session = model.session()
    return [session.run(draw) for draw in feeds]


def _outputs(model: DetachedModel, feeds: Feeds, bench: PassContext) -> Outputs:
    return bench.proofs.ask(OUTPUTS, model=portable(model, bench.spill), feeds=list(feeds))


def _reference(source: DetachedModel, bench: PassContext) -> tuple[Feeds, Outputs]:
    try:
        draws, _ = choose_in_worker(source, plan_draws(source), bench)
    except StepFailed as failure:
        raise ModelError(f"the model does not run as it is: {failure}") from failure
    return [draw.feeds for draw in draws], [draw.results for draw in draws]


def _distance(expected: Outputs, got: Outputs) -> Distance:
    """The largest absolute error of all outputs, and where it is."""
    worst = Distance(0.0)
    for draw, other in zip(expected, got, strict=True):
        for name, value in draw.items():
            errors = compare(value, other[name])
            if errors.max_abs > worst.error:
                said = f"is off by {errors.max_abs:.3g}" if math.isfinite(errors.max_abs) else errors.why
                worst = Distance(errors.max_abs, f"output {name}: {said}")
    return worst


def _has_nan(value: np.ndarray) -> bool:
    return value.dtype.kind == "f" and bool(np.isnan(value).any())


OUTPUTS: Final = "passes.bisect.deviation:outputs"
