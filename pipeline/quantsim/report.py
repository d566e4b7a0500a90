"""What a simulation found, as data: rows for `quantsim.json`, for the terminal and for the page."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from passes.provenance.annotations import module_of
from passes.structures import STRUCTURES
from passes.structures.view import GraphView
from passes.suggest import bytes_text, plural, shorten_lines
from passes.visible import Table, TableResult, json_text, table_lines
from passes.weights.detached import DetachedModel
from pipeline.quantsim.layer_costs import LayerCosts
from pipeline.quantsim.metric import MetricResult
from pipeline.quantsim.noise import Noise, describe_ratio, noise_power
from pipeline.quantsim.optimize import OptimizedStep
from pipeline.quantsim.placement import PlacedSite, Placement, RuleMatches
from pipeline.quantsim.simulation import DeviceLike, OutputNoise
from pipeline.quantsim.suggest import Suggestion, suggestion_text
from pipeline.quantsim.weight_sizes import weight_bytes
from pipeline.report import Report
from pipeline.report.model import (
    Quantization,
    QuantizationFindings,
    QuantizedLayer,
    QuantizedOutput,
    QuantizedStructure,
    QuantizedTensor,
)

FORMAT_VERSION: Final = 2
"""Version of `quantsim.json`; in version 1 a ratio of null was infinite, with either sign."""


@dataclass(frozen=True, slots=True)
class TensorRow(QuantizedTensor):
    """A row of the table: a tensor, and its place in graph order."""

    place: int


@dataclass(frozen=True, slots=True)
class FloatTensor:
    """A tensor that stays in float, and why."""

    tensor: str
    role: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSimReport(QuantizationFindings):
    """What a simulation found. `rows`: worst first, by the noise of the step alone."""

    rules: tuple[RuleMatches, ...]
    rows: tuple[TensorRow, ...]
    left_in_float: tuple[FloatTensor, ...]
    outputs: Mapping[str, OutputNoise]
    device_like: DeviceLike | None
    suggestion: Suggestion | None = None
    metric: MetricResult | None = None
    costs: LayerCosts | None = None
    """What each layer costs the metric, where that was asked for."""
    optimized: tuple[OptimizedStep, ...] = ()
    """A row for each step of `quantsim.optimize`, in order."""


@dataclass(frozen=True)
class QuantSimResult(TableResult):
    """The result of a simulation, and its files in `folder`; and the report of the run before it."""

    folder: Path
    report: QuantSimReport
    """What was measured."""
    files: tuple[str, ...]
    """The names of the files in `folder`."""
    run: Report | None = field(default=None, kw_only=True)
    """The report of the run that made the model; None for a model of several parts, and for a part of a chain."""

    def __repr__(self) -> str:
        report = self.report
        before, after = bytes_text(report.weight_bytes), bytes_text(report.quantized_weight_bytes)
        return shorten_lines(
            (
                "QuantSimResult",
                f"weights: {before} → {after}, {report.quantized_tensors} of {report.tensors} tensors quantized",
                f"files: {self.folder}/",
                *(f"output {name}: {noise.sqnr_db:.2f} dB" for name, noise in report.outputs.items()),
                *report.notes,
            )
        )

    def tables(self) -> Iterator[Table]:
        report = self.report
        before, after = bytes_text(report.weight_bytes), bytes_text(report.quantized_weight_bytes)
        rows = [("weights", f"{before} → {after}"), ("quantized", f"{report.quantized_tensors} of {report.tensors}")]
        rows += [("metric", str(report.metric))] if report.metric else []
        rows += [("note", note) for note in report.notes]
        yield Table("simulation", [*rows, ("files", f"{self.folder}/")])
        yield Table("outputs", [(name, describe_ratio(noise.sqnr_db)) for name, noise in report.outputs.items()])
        layers = [
            layer_cells(row.layer, row.part or row.op, row.module, row.sqnr_db, row.share)
            for row in report.layers[:MOST_LAYERS]
        ]
        yield Table("layers that cost most", layers, LAYER_TITLES)


def make_report(
    placement: Placement,
    noise: Mapping[str, Noise],
    sensitivity: Mapping[str, float],
    not_estimated: str,
    outputs: Mapping[str, OutputNoise],
    device_like: DeviceLike | None,
    model: DetachedModel,
    notes: Iterable[str] = (),
) -> QuantSimReport:
    """The report of a whole simulation; `notes` are those on the run before it, and on its encodings."""
    parts = _parts(model)
    placed = {found.site.tensor: found for found in placement.sites}
    rows = [_row(placed[name], parts.get(name, ""), found, place) for place, (name, found) in enumerate(noise.items())]
    before, after = weight_bytes(model, placement)
    return QuantSimReport(
        rules=placement.rules,
        rows=tuple(sorted(rows, key=lambda row: row.local_db)),
        structures=tuple(sorted(_structure_rows(model, rows), key=lambda row: row.total_db)),
        layers=tuple(_layer_rows(sensitivity, model, parts)),
        not_estimated=not_estimated,
        left_in_float=tuple(
            FloatTensor(found.site.tensor, found.site.role, found.reason) for found in placement.left_in_float()
        ),
        outputs=outputs,
        device_like=device_like,
        weight_bytes=before,
        quantized_weight_bytes=after,
        tensors=len(placement.sites),
        quantized_tensors=len(placement.quantized_sites()),
        notes=(*placement.notes(), *notes),
    )


def make_placement_report(
    placement: Placement, model: DetachedModel, why: str, notes: Iterable[str] = ()
) -> QuantSimReport:
    """What is known of a model whose weights are not read: what each rule matched, what stays in float, and sizes."""
    return replace(make_report(placement, {}, {}, why, {}, None, model, notes), not_measured=why)


def page_data(report: QuantSimReport) -> Quantization:
    """What the page shows of the report."""
    devices = report.device_like.outputs if report.device_like else {}
    notes = [
        report.metric,
        *report.optimized,
        *report.notes,
        *(report.device_like.notes() if report.device_like else ()),
    ]
    shared = {field.name: getattr(report, field.name) for field in dataclasses.fields(QuantizationFindings)}
    shared |= {
        "rows": tuple(sorted(report.rows, key=lambda row: row.place)),
        "notes": tuple(str(note) for note in notes if note),
    }
    return Quantization(
        **shared,
        outputs=tuple(
            QuantizedOutput(name, found.sqnr_db, found.max_abs, devices[name].sqnr_db if name in devices else None)
            for name, found in report.outputs.items()
        ),
        left_in_float=Counter(tensor.reason for tensor in report.left_in_float),
        suggestion=suggestion_text(report.suggestion) if report.suggestion else "",
    )


MOST_LAYERS: Final = 12
"""Layers that a result shows."""

LAYER_TITLES: Final = ("layer", "is", "module", "alone", "share")
"""Of a table of layers: what each is, its module, the ratio with it alone quantized, and its share of the noise."""


def layer_cells(layer: str, what: str, module: str, sqnr_db: float, share: float) -> tuple[str, ...]:
    """The cells below `LAYER_TITLES`."""
    return layer, what, module, describe_ratio(sqnr_db), f"{share:.1%}"


def layer_lines(titles: Sequence[str], rows: Sequence[Sequence[str]], most: int | None) -> Iterator[str]:
    """A table of the first `most` layers, and how many more there are."""
    shown = rows[:most]
    yield from table_lines([titles, *shown]) if shown else ()
    if len(shown) < len(rows):
        yield f"{plural(len(rows) - len(shown), 'layer')} with less noise (--verbose shows all)"


def report_text(report: QuantSimReport) -> str:
    """The report as JSON, which has no infinity: such numbers are words, as in `report.json`, and null is what was not
    measured."""
    data = {"format_version": FORMAT_VERSION, **to_json_data(dataclasses.asdict(report))}
    return json_text(data, indent=1, allow_nan=False) + "\n"


def to_json_data(value: Any) -> Any:
    """The value, in which numbers that JSON does not have are words."""
    if isinstance(value, dict):
        return {key: to_json_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _layer_rows(
    sensitivity: Mapping[str, float], model: DetachedModel, parts: Mapping[str, str]
) -> Iterator[QuantizedLayer]:
    powers = {name: noise_power(ratio) for name, ratio in sensitivity.items()}
    whole = sum(powers.values()) or 1.0
    producers = model.index.producers
    for name in sorted(sensitivity, key=sensitivity.__getitem__):
        module = module_of(producers[name])
        op, share = producers[name].op_type, powers[name] / whole
        yield QuantizedLayer(name, op, module, parts.get(name, ""), sensitivity[name], share)


def _structure_rows(model: DetachedModel, rows: Sequence[TensorRow]) -> Iterator[QuantizedStructure]:
    """A row for each structure whose result was measured; Q, K and V have rows of their own."""
    known, view = {row.tensor: row for row in rows}, GraphView(model)
    for kind, structure in STRUCTURES.items():
        for instance in structure.search(view).instances:
            if instance.core is None or instance.core.value not in known:
                continue
            result = known[instance.core.value]
            steps = [known[name] for name in (site.tight.name for site in instance.pins) if name in known]
            worst = min([result, *steps], key=lambda row: row.local_db)
            yield QuantizedStructure(kind, instance.name, result.tensor, worst.tensor, worst.local_db, result.total_db)


def _row(placed: PlacedSite, part: str, noise: Noise, place: int) -> TensorRow:
    site = placed.site
    module = site.modules[-1] if site.modules else ""
    precision = str(placed.precision) if placed.precision else "float"
    return TensorRow(site.tensor, site.op, module, part, precision, noise.local_db, noise.total_db, place)


def _parts(model: DetachedModel) -> dict[str, str]:
    """Tensor → the Q, K or V that it is: these are rows of their own in every table."""
    return {
        site.after_bias.name: f"{instance.kind} {instance.name} {weight.role}"
        for instance in STRUCTURES["qkv"].find(model).instances
        for weight, site in zip(instance.weights, instance.pins, strict=False)
    }
