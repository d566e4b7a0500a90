"""The plot of error and SQNR by layer: the place and text of each point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from passes.diff import LayerErrors
from pipeline.report.module_axis import MOST_LABELS, block_labels, shorten_label

LEFT, RIGHT, HEIGHT, STEP = 64.0, 944.0, 120.0, 5
"""The area of the points, in units of the drawing; and the most parts of an axis."""


@dataclass(frozen=True, slots=True)
class Tick:
    place: float
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
class LayerRow:
    layer: str
    op: str
    dtype: str
    error: str
    sqnr: str


@dataclass(frozen=True, slots=True)
class LayerPlot:
    """`curves` are empty where all layers are equal in every bit, and of one layer, which the table shows."""

    rows: tuple[LayerRow, ...]
    curves: tuple[Curve, ...]
    labels: tuple[Tick, ...]
    equal: int


def layer_plot(layers: Sequence[LayerErrors]) -> LayerPlot | None:
    """The plot of the layers; None if no layer was compared."""
    if not layers:
        return None
    rows = tuple(map(_row, layers))
    equal = sum(math.isinf(layer.errors.sqnr_db) and layer.errors.sqnr_db > 0 for layer in layers)
    if equal == len(layers) or len(layers) == 1:
        return LayerPlot(rows, (), (), equal)
    wide = (RIGHT - LEFT) / max(len(layers) - 1, 1)
    places = [LEFT + place * wide for place in range(len(layers))]
    labels = _labels([Tick(place, row.layer) for place, row in zip(places, rows, strict=True)])
    errors = [math.log10(layer.errors.max_abs) if 0 < layer.errors.max_abs < math.inf else None for layer in layers]
    ratios = [layer.errors.sqnr_db if math.isfinite(layer.errors.sqnr_db) else None for layer in layers]
    curves = (
        _curve("max abs error", places, errors, 1, "1e{:+03d}", best="low"),
        _curve("SQNR in dB", places, ratios, 10, "{:d}", best="high"),
    )
    return LayerPlot(rows, curves, labels, equal)


def ratio_curve(
    title: str, ratios: Sequence[float], other_title: str, other_ratios: Sequence[float]
) -> tuple[Curve, Curve]:
    """Two curves of ratios in dB on one axis, from left to right; a ratio that is not finite is the best one."""
    wide = (RIGHT - LEFT) / max(len(ratios) - 1, 1)
    places = [LEFT + place * wide for place in range(len(ratios))]
    values = [ratio if math.isfinite(ratio) else None for ratio in (*ratios, *other_ratios)]
    both = _curve(title, [*places, *places], values, 10, "{:d} dB", best="high")
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
        Tick(tick.place, shorten_label(tick.text)) for tick in numbered[:: math.ceil(len(numbered) / MOST_LABELS)]
    )


def _row(layer: LayerErrors) -> LayerRow:
    sqnr = "equal" if layer.errors.sqnr_db == math.inf else f"{layer.errors.sqnr_db:.1f} dB"
    return LayerRow(layer.layer or layer.before, layer.op, layer.dtype, f"{layer.errors.max_abs:.2e}", sqnr)


def _curve(
    title: str, places: Sequence[float], values: Sequence[float | None], unit: int, form: str, *, best: str
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
    return Curve(title, tuple(zip(places, points, strict=True)), tuple(ticks))
