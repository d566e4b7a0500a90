"""The plots of the page: error and SQNR by layer, ratios along the model, and the loss and phases of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from passes.diff import LayerErrors
from passes.suggest import milliseconds_text
from pipeline.report.block_labels import MOST_LABELS, block_labels, shorten_label
from pipeline.report.html.timeline import seconds_text
from pipeline.report.model import TrainingReport

LEFT, RIGHT, HEIGHT, STEP = 64.0, 944.0, 120.0, 5
"""The area of the points, in units of the drawing; and the most parts of an axis."""


@dataclass(frozen=True, slots=True)
class Tick:
    position: float
    text: str


@dataclass(frozen=True, slots=True)
class Curve:
    """`points` are x and y; a value that is equal in every bit is at the better end."""

    title: str
    points: tuple[tuple[float, float], ...]
    ticks: tuple[Tick, ...]

    @property
    def path(self) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


@dataclass(frozen=True, slots=True)
class LayerPlot:
    """`curves` are empty where all layers are equal in every bit, and of one layer, which the table shows."""

    rows: tuple[LayerErrors, ...]
    curves: tuple[Curve, ...]
    labels: tuple[Tick, ...]
    equal: int


def layer_plot(layers: Sequence[LayerErrors]) -> LayerPlot | None:
    """The plot of the layers; None if no layer was compared."""
    if not layers:
        return None
    rows = tuple(layers)
    equal = sum(math.isinf(layer.errors.sqnr_db) and layer.errors.sqnr_db > 0 for layer in layers)
    if equal == len(layers) or len(layers) == 1:
        return LayerPlot(rows, (), (), equal)
    wide = (RIGHT - LEFT) / max(len(layers) - 1, 1)
    positions = [LEFT + index * wide for index in range(len(layers))]
    labels = _labels([Tick(position, row.layer or row.before) for position, row in zip(positions, rows, strict=True)])
    errors = [math.log10(layer.errors.max_abs) if 0 < layer.errors.max_abs < math.inf else None for layer in layers]
    ratios = [layer.errors.sqnr_db if math.isfinite(layer.errors.sqnr_db) else None for layer in layers]
    curves = (
        _curve("max abs error", positions, errors, 1, "1e{:+03d}", best="low"),
        _curve("SQNR in dB", positions, ratios, 10, "{:d}", best="high"),
    )
    return LayerPlot(rows, curves, labels, equal)


def ratio_curve(
    title: str, ratios: Sequence[float], other_title: str, other_ratios: Sequence[float]
) -> tuple[Curve, Curve]:
    """Two curves of ratios in dB on one axis, from left to right; a ratio that is not finite is the best one."""
    wide = (RIGHT - LEFT) / max(len(ratios) - 1, 1)
    positions = [LEFT + index * wide for index in range(len(ratios))]
    values = [ratio if math.isfinite(ratio) else None for ratio in (*ratios, *other_ratios)]
    both = _curve(title, [*positions, *positions], values, 10, "{:d} dB", best="high")
    count = len(ratios)
    return Curve(title, both.points[:count], both.ticks), Curve(other_title, both.points[count:], both.ticks)


def ratio_labels(modules: Sequence[str]) -> tuple[Tick, ...]:
    """Labels under the curves of `ratio_curve`: the blocks of the modules that its points belong to."""
    wide = (RIGHT - LEFT) / max(len(modules) - 1, 1)
    return tuple(Tick(LEFT + index * wide, label) for index, label in block_labels(modules))


def _labels(layers: Sequence[Tick]) -> tuple[Tick, ...]:
    """Labels of numbered layers, such as `encoder.layer.0`, if there are any; as many as fit."""
    numbered = [tick for tick in layers if tick.text.rpartition(".")[2].isdecimal()] or layers
    return tuple(
        Tick(tick.position, shorten_label(tick.text)) for tick in numbered[:: math.ceil(len(numbered) / MOST_LABELS)]
    )


def _curve(
    title: str, positions: Sequence[float], values: Sequence[float | None], unit: int, form: str, *, best: str
) -> Curve:
    """An axis from a multiple of `unit` to another; values that are None are the best ones, beyond one end of it."""
    known = [value for value in values if value is not None] or [0.0]
    low, high = math.floor(min(known) / unit), math.ceil(max(known) / unit)
    high = max(high, low + 1)
    step = math.ceil((high - low) / STEP)
    high = low + step * math.ceil((high - low) / step)
    if None in values:
        low, high = (low - step, high) if best == "low" else (low, high + step)
    edge = low if best == "low" else high

    def height(value: float) -> float:
        return HEIGHT - (value - low) / (high - low) * HEIGHT

    points = (height(edge if value is None else value / unit) for value in values)
    ticks = (
        Tick(height(mark), "equal" if mark == edge and None in values else form.format(mark * unit))
        for mark in range(low, high + 1, step)
    )
    return Curve(title, tuple(zip(positions, points, strict=True)), tuple(ticks))


POINTS: Final = 400
"""The most points of the curve; each is the mean of as many steps."""

PARTS: Final = 5
"""About how many parts the axis of the loss has."""

LABELS: Final = 6


@dataclass(frozen=True, slots=True)
class TrainingView:
    """`curve` is None where fewer than two steps were done. `pooled` is how many steps a point of it stands for."""

    data: TrainingReport
    curve: Curve | None
    labels: tuple[Tick, ...]
    pooled: int


def training_view(training: TrainingReport | None) -> TrainingView | None:
    """The view of a training; None where there was none."""
    if training is None:
        return None
    pooled = math.ceil(len(training.losses) / POINTS) or 1
    means = [fmean(losses) for losses in _pool([point.loss for point in training.losses], pooled)]
    curve = _loss_curve(means) if len(means) > 1 else None
    last = training.losses[-1].step if training.losses else 0
    return TrainingView(training, curve, _step_labels(last), pooled)


def _pool(losses: Sequence[float], count: int) -> list[Sequence[float]]:
    return [losses[start : start + count] for start in range(0, len(losses), count)]


def _loss_curve(losses: Sequence[float]) -> Curve:
    """The losses from left to right; the axis has round ticks, and begins at zero where zero is near."""
    low, high = min(losses), max(losses)
    low = 0.0 if 0 <= low < high / 2 else low
    step = _round_step((high - low) / PARTS)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)

    def height(value: float) -> float:
        return HEIGHT - (value / step - first) / (last - first) * HEIGHT

    wide = (RIGHT - LEFT) / (len(losses) - 1)
    points = tuple((LEFT + index * wide, height(loss)) for index, loss in enumerate(losses))
    ticks = tuple(Tick(height(mark * step), f"{mark * step:.4g}") for mark in range(first, last + 1))
    return Curve("loss", points, ticks)


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10 and so on."""
    if least <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(least))
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least)


def _step_labels(steps: int) -> tuple[Tick, ...]:
    """The ticks below the curve: how many steps there were."""
    if steps < 2:
        return ()
    marks = sorted({round(1 + index * (steps - 1) / (LABELS - 1)) for index in range(LABELS)})
    return tuple(Tick(LEFT + (mark - 1) / (steps - 1) * (RIGHT - LEFT), f"{mark:,}") for mark in marks)


def duration_text(seconds: float) -> str:
    """`500 ms` or `2.00 s`."""
    return milliseconds_text(seconds) if seconds < 1 else seconds_text(seconds)
