"""The top of the page: how the run ended, its main results, and the tables of names, old and new ones.

After a simulation its section says what dominates the noise, how Q, K and V fare, and the noise along the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from passes.provenance.annotations import NameMap
from passes.run.result import Status
from passes.suggest import bytes_text, plural
from pipeline.report.html.curves import Curve, Tick, ratio_curve, ratio_labels
from pipeline.report.html.timeline import Timeline, error_text, seconds_text, worst_of
from pipeline.report.model import Quantization, QuantizedLayer, QuantizedTensor, Report


@dataclass(frozen=True, slots=True)
class Card:
    """One number. `tone` is good, bad, or empty where there is nothing to judge."""

    title: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Headline:
    """`failure` is empty for a run that ended well."""

    name: str
    tone: str
    verdict: str
    failure: str
    cards: tuple[Card, ...]
    title: str
    """Of the page, so that one of many tabs is known."""


def headline_of(report: Report, timeline: Timeline) -> Headline:
    lost = [verdict for verdict in report.structures if not verdict.kept]
    if report.failure or report.exit_code:
        tone, verdict = "bad", f"ended early, exit code {report.exit_code}"
    elif lost:
        tone, verdict = "warn", "done, with losses"
    else:
        tone, verdict = "good", "done"
    cards = (
        *_training(report),
        *_structures(report),
        *_error(report),
        *_sizes(report, timeline),
        *_passes(report),
        *_time(report),
    )
    word = "✓ proven by structure" if report.not_compared and tone == "good" else TITLES[tone]
    word = "✓ trained" if report.training is not None and tone == "good" else word
    return Headline(report.name, tone, verdict, report.failure, cards, f"{word} · {report.name}")


TITLES: Final = {"good": "✓ proven", "warn": "△ proven, with losses", "bad": "✗ failed"}


def _training(report: Report) -> Iterator[Card]:
    training = report.training
    if training is None:
        return
    yield Card("steps", f"{training.steps:,}", f"{training.parameters:,} trained values")
    if training.last_loss is not None:
        yield Card("loss", f"{training.last_loss:.4f}", "mean of the last 50 steps")
    for name, value in training.metrics.items():
        yield Card(name, f"{value:.4g}", "of the trained model")


def _structures(report: Report) -> Iterator[Card]:
    if not report.structures:
        return
    kept, total = sum(verdict.kept for verdict in report.structures), len(report.structures)
    kinds = dict.fromkeys(verdict.kind for verdict in report.structures)
    yield Card("structures kept", f"{kept} of {total}", ", ".join(kinds), "good" if kept == total else "bad")


def _error(report: Report) -> Iterator[Card]:
    backends = report.runtime.backends if report.runtime else ()
    rows = [row for row in report.passes if row.status is Status.RAN]
    worst = worst_of([backend.errors for backend in backends] or [row.errors for row in rows])
    if worst is None:
        return
    output, errors = worst
    note = f"{errors.excess:.1%} of what is allowed" if errors.ok else f"{output}: {errors.why}"
    yield Card("worst error", error_text(errors), note, "good" if errors.ok else "bad")


def _sizes(report: Report, timeline: Timeline) -> Iterator[Card]:
    if not timeline.rows:
        return
    first, last = timeline.rows[0], timeline.final
    yield Card("nodes", f"{first.nodes:,} → {last.nodes:,}", _share(first.nodes, last.nodes))
    before, after = bytes_text(first.nbytes), bytes_text(last.nbytes)
    number, unit = before.split()
    short = number if after.endswith(unit) else before  # 329.5 → 329.1 MiB
    value = after if before == after else f"{short} → {after}"
    yield Card("weights", value, "as before" if before == after else _share(first.nbytes, last.nbytes))


def _share(before: int, after: int) -> str:
    share = (after - before) / before if before else 0
    return f"{share:+.{0 if abs(share) > 0.02 else 1}%}".replace("-", "−") if share else "as before"


def _passes(report: Report) -> Iterator[Card]:
    counts = {status: sum(row.status is status for row in report.passes) for status in Status}
    if not report.passes:
        return
    others = [
        f"{count} {status.replace('_', ' ')}" for status, count in counts.items() if count and status is not Status.RAN
    ]
    yield Card("passes", f"{counts[Status.RAN]} ran", ", ".join(others) or "none was taken back")


def _time(report: Report) -> Iterator[Card]:
    if report.seconds:
        stages = f"{', '.join(report.cached)} from an earlier run" if report.cached else "all stages"
        yield Card("time", seconds_text(sum(report.seconds.values())), stages)


MOST_ROWS: Final = 200
"""Rows of one table; `report.json` has all."""


@dataclass(frozen=True, slots=True)
class NameTable:
    """`rows` are pairs: the name in the source, and those in the final model; renamed ones come first."""

    title: str
    renamed: int
    gone: int
    rows: tuple[tuple[str, str], ...]

    @property
    def more(self) -> int:
        """How many names are not shown."""
        return self.renamed + self.gone - len(self.rows)


def name_tables(names: NameMap | None) -> tuple[NameTable, ...]:
    """The tables, without empty ones."""
    if names is None:
        return ()
    tables: list[NameTable] = []
    for title, changed in (("nodes", names.nodes), ("values", names.values), ("weights", names.weights)):
        rows = sorted(((old, ", ".join(news)) for old, news in changed.items()), key=lambda row: not row[1])
        gone = sum(not new for _, new in rows)
        tables.append(NameTable(title, len(rows) - gone, gone, tuple(rows[:MOST_ROWS])))
    return tuple(table for table in tables if table.rows)


@dataclass(frozen=True, slots=True)
class QuantizationView:
    """What quantization.html.j2 shows besides the data itself.

    parts: structure → its tensors, each with the layer that it is, or None. tensors: worst first. curves: alone and in
    all, along the model, on one axis; `labels`: the modules under that axis.
    """

    data: Quantization
    cards: tuple[Card, ...]
    sentence: str
    parts: Mapping[str, Sequence[tuple[QuantizedTensor, QuantizedLayer | None]]]
    tensors: tuple[QuantizedTensor, ...]
    curves: tuple[Curve, ...]
    labels: tuple[Tick, ...]


def quantization_view(data: Quantization | None) -> QuantizationView | None:
    """The section; None where nothing was quantized."""
    if data is None:
        return None
    known = [row for row in data.tensors if math.isfinite(row.local_db) or math.isfinite(row.total_db)]
    layers = {layer.layer: layer for layer in data.layers}
    parts: dict[str, list[tuple[QuantizedTensor, QuantizedLayer | None]]] = {}
    for tensor in data.tensors:
        if tensor.part:
            parts.setdefault(tensor.part.rpartition(" ")[0], []).append((tensor, layers.get(tensor.tensor)))
    return QuantizationView(
        data=data,
        cards=tuple(_cards(data)),
        sentence=_sentence(data),
        parts=parts,
        tensors=tuple(sorted(data.tensors, key=lambda row: row.local_db)),
        curves=_curves(known),
        labels=ratio_labels([row.module for row in known]) if len(known) > 1 else (),
    )


def _cards(data: Quantization) -> Iterable[Card]:
    for output in data.outputs:
        device = f"{ratio_text(output.device_db)} with all optimizations, " if output.device_db is not None else ""
        yield Card(f"SQNR of {output.name}", ratio_text(output.sqnr_db), f"{device}max abs error {output.max_abs:.1e}")
    before, after = data.weight_bytes, data.quantized_weight_bytes
    saved = f"{1 - after / before:.0%} less" if before else ""
    number, unit = bytes_text(before).split()
    short = number if bytes_text(after).endswith(unit) else bytes_text(before)
    yield Card("weights", f"{short} → {bytes_text(after)}", saved)
    yield Card("tensors quantized", f"{data.quantized} of {data.found}", f"{data.found - data.quantized} in float")


def _sentence(data: Quantization) -> str:
    """What dominates, in a sentence; or why that is not known."""
    if data.not_measured:
        return f"No noise was measured: {data.not_measured}."
    if not data.layers:
        return f"The part of each layer is not estimated: {data.not_estimated}."
    covered, count = 0.0, 0
    while covered < MOST_OF_IT and count < len(data.layers):
        covered += data.layers[count].share
        count += 1
    first = data.layers[0]
    name = first.module or first.layer
    elsewhere = _elsewhere(data)
    if elsewhere:
        return elsewhere
    if count == 1:
        return f"{name} dominates: {percent_text(first.share)} of what all layers add to the noise of the outputs."
    return (
        f"{plural(count, 'layer')} of {len(data.layers)} make {percent_text(covered)} of what all layers add to the "
        f"noise of the outputs; the most is {name} with {percent_text(first.share)}."
    )


def _elsewhere(data: Quantization) -> str:
    """A sentence on the worst step, where the outputs have far more noise than all layers add to them."""
    power = sum(10 ** (-layer.sqnr_db / 10) for layer in data.layers)
    outputs = [output.sqnr_db for output in data.outputs if math.isfinite(output.sqnr_db)]
    if not power or not outputs or -10 * math.log10(power) - min(outputs) < FAR_DB:
        return ""
    worst = min(data.tensors, key=lambda row: row.local_db)
    return (
        f"The layers below do not explain the noise: together they leave {ratio_text(-10 * math.log10(power))}, and "
        f"the outputs have {ratio_text(min(outputs))}. The worst step is {worst.op} {worst.module or worst.tensor}, "
        f"with {ratio_text(worst.local_db)} alone."
    )


MOST_OF_IT: Final = 0.8

FAR_DB: Final = 10.0
"""Steps that are no products are not among the layers; up to here the order of layers is still the answer."""


def _curves(tensors: Sequence[QuantizedTensor]) -> tuple[Curve, ...]:
    if len(tensors) < 2:
        return ()
    return ratio_curve("alone", [row.local_db for row in tensors], "in all", [row.total_db for row in tensors])


def role_of(part: str) -> str:
    """`Q` of `qkv layers.0 q`."""
    return part.rpartition(" ")[2].upper()


def percent_text(share: float) -> str:
    """In whole percents."""
    return f"{share:.0%}" if share >= 0.01 else "< 1%"


def ratio_text(value: float) -> str:
    """`12.3 dB`; `exact` where nothing differs, and `zero` where there is no signal."""
    return f"{value:.1f} dB" if math.isfinite(value) else "exact" if value > 0 else "zero"
