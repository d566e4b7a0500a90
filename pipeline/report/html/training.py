"""The section on a training: its phases, and the loss of its steps as a curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from passes.suggest import milliseconds_text
from pipeline.report.html.layers import HEIGHT, LEFT, RIGHT, Curve, Tick
from pipeline.report.html.number_text import seconds_text
from pipeline.report.training import TrainingReport

POINTS: Final = 400
"""The most points of the curve; each is the mean of as many steps."""

PARTS: Final = 5
"""About how many parts the axis of the loss has."""

LABELS: Final = 6


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """`width` is in percent of the longest phase."""

    name: str
    seconds: str
    width: float
    detail: str


@dataclass(frozen=True, slots=True)
class TrainingView:
    """`curve` is None where fewer than two steps were done. `pooled` is how many steps a point of it stands for."""

    sentence: str
    phases: tuple[PhaseRow, ...]
    curve: Curve | None
    labels: tuple[Tick, ...]
    pooled: int
    facts: tuple[tuple[str, str], ...]


def training_view(training: TrainingReport | None) -> TrainingView | None:
    """The view of a training; None where there was none."""
    if training is None:
        return None
    longest = max((phase.seconds for phase in training.phases), default=0.0) or 1.0
    rows = tuple(
        PhaseRow(phase.name, _duration(phase.seconds), round(100 * phase.seconds / longest, 3), phase.detail)
        for phase in training.phases
    )
    facts = {
        "loss": training.loss,
        "optimizer": training.optimizer,
        "trained numbers": f"{training.parameters:,}",
        "a step": f"{training.ops:,} ops, forward, backward and update",
        **{name: f"{value:.4g}" for name, value in training.metrics.items()},
        **({"ONNX": training.onnx} if training.onnx else {}),
    }
    pooled = math.ceil(len(training.losses) / POINTS) or 1
    means = [fmean(losses) for losses in _pool([point.loss for point in training.losses], pooled)]
    curve = _loss_curve(means) if len(means) > 1 else None
    last = training.losses[-1].step if training.losses else 0
    return TrainingView(_sentence(training), rows, curve, _labels(last), pooled, tuple(facts.items()))


def _sentence(training: TrainingReport) -> str:
    if training.last_loss is None:
        return "No step was done."
    first = training.losses[0].loss
    last = f"the mean of the last is {training.last_loss:.4f}"
    return f"{training.steps:,} steps; the loss of the first was {first:.4f}, {last}."


def _pool(losses: Sequence[float], count: int) -> list[Sequence[float]]:
    return [losses[place : place + count] for place in range(0, len(losses), count)]


def _loss_curve(losses: Sequence[float]) -> Curve:
    """The losses from left to right; the axis has round numbers, and begins at zero where that is near."""
    low, high = min(losses), max(losses)
    low = 0.0 if 0 <= low < high / 2 else low
    step = _round_step((high - low) / PARTS)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)

    def height(value: float) -> float:
        return HEIGHT - (value / step - first) / (last - first) * HEIGHT

    wide = (RIGHT - LEFT) / (len(losses) - 1)
    points = tuple((LEFT + place * wide, height(loss)) for place, loss in enumerate(losses))
    ticks = tuple(Tick(height(mark * step), f"{mark * step:.4g}") for mark in range(first, last + 1))
    return Curve("loss", points, ticks)


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10 and so on."""
    if least <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(least))
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least)


def _labels(steps: int) -> tuple[Tick, ...]:
    """Numbers of steps below the curve."""
    if steps < 2:
        return ()
    marks = sorted({round(1 + place * (steps - 1) / (LABELS - 1)) for place in range(LABELS)})
    return tuple(Tick(LEFT + (mark - 1) / (steps - 1) * (RIGHT - LEFT), f"{mark:,}") for mark in marks)


def _duration(seconds: float) -> str:
    return milliseconds_text(seconds) if seconds < 1 else seconds_text(seconds)
