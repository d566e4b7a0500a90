"""The section on quantization: what dominates the noise, Q, K and V, and the noise along the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from passes.suggest import bytes_text, plural
from pipeline.report.html.curves import Curve, Tick, ratio_curve, ratio_labels
from pipeline.report.html.headline import Card
from pipeline.report.model import Quantization, QuantizedLayer, QuantizedStructure, QuantizedTensor

MOST_LAYERS: Final = 16
"""Bars of layers; the table below has all."""


@dataclass(frozen=True, slots=True)
class Bar:
    """`width` in percent of the greatest share."""

    name: str
    note: str
    ratio: str
    share: str
    width: float
    is_part: bool


@dataclass(frozen=True, slots=True)
class PartRow:
    """Q, K and V of one attention, or what else the parts of a structure are."""

    structure: str
    cells: tuple[PartCell, ...]


@dataclass(frozen=True, slots=True)
class PartCell:
    role: str
    precision: str
    alone: str
    in_all: str
    outputs: str


@dataclass(frozen=True, slots=True)
class StructureCells:
    """`worst` is the tensor that the structure's worst step makes, `alone` what that step leaves."""

    kind: str
    name: str
    worst: str
    alone: str
    in_all: str


@dataclass(frozen=True, slots=True)
class TensorCells:
    name: str
    op: str
    precision: str
    alone: str
    in_all: str


@dataclass(frozen=True, slots=True)
class QuantizationView:
    """`curves`: alone and in all, along the model, on one axis; `labels`: the modules under that axis."""

    cards: tuple[Card, ...]
    sentence: str
    bars: tuple[Bar, ...]
    more_layers: int
    parts: tuple[PartRow, ...]
    structures: tuple[StructureCells, ...]
    curves: tuple[Curve, ...]
    labels: tuple[Tick, ...]
    tensors: tuple[TensorCells, ...]
    left_in_float: tuple[tuple[str, int], ...]
    suggestion: str
    suggested_rules: str
    notes: tuple[str, ...]


def quantization_view(data: Quantization | None) -> QuantizationView | None:
    """The section; None where nothing was quantized."""
    if data is None:
        return None
    known = [row for row in data.tensors if math.isfinite(row.local_db) or math.isfinite(row.total_db)]
    worst = sorted(data.tensors, key=lambda row: row.local_db)
    return QuantizationView(
        cards=tuple(_cards(data)),
        sentence=_sentence(data),
        bars=tuple(_bars(data.layers)),
        more_layers=max(len(data.layers) - MOST_LAYERS, 0),
        parts=tuple(_parts(data)),
        structures=tuple(map(_structure, data.structures)),
        curves=_curves(known),
        labels=ratio_labels([row.module for row in known]) if len(known) > 1 else (),
        tensors=tuple(
            TensorCells(_label(row.module, row.tensor), row.op, row.precision, _db(row.local_db), _db(row.total_db))
            for row in worst
        ),
        left_in_float=tuple(sorted(data.left_in_float.items(), key=lambda entry: -entry[1])),
        suggestion=data.suggestion.partition("\n")[0],
        suggested_rules=data.suggestion.partition("\n")[2],
        notes=data.notes,
    )


def _cards(data: Quantization) -> Iterable[Card]:
    for output in data.outputs:
        device = f"{_db(output.device_db)} with all optimizations, " if output.device_db is not None else ""
        yield Card(f"SQNR of {output.name}", _db(output.sqnr_db), f"{device}max abs error {output.max_abs:.1e}")
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
    name = _label(first.module, first.layer)
    elsewhere = _elsewhere(data)
    if elsewhere:
        return elsewhere
    if count == 1:
        return f"{name} dominates: {_percent(first.share)} of what all layers add to the noise of the outputs."
    return (
        f"{plural(count, 'layer')} of {len(data.layers)} make {_percent(covered)} of what all layers add to the noise "
        f"of the outputs; the most is {name} with {_percent(first.share)}."
    )


def _elsewhere(data: Quantization) -> str:
    """A sentence on the worst step, where the outputs have far more noise than all layers add to them."""
    power = sum(10 ** (-layer.sqnr_db / 10) for layer in data.layers)
    outputs = [output.sqnr_db for output in data.outputs if math.isfinite(output.sqnr_db)]
    if not power or not outputs or -10 * math.log10(power) - min(outputs) < FAR_DB:
        return ""
    worst = min(data.tensors, key=lambda row: row.local_db)
    return (
        f"The layers below do not explain the noise: together they leave {_db(-10 * math.log10(power))}, and the "
        f"outputs have {_db(min(outputs))}. The worst step is {worst.op} {_label(worst.module, worst.tensor)}, with "
        f"{_db(worst.local_db)} alone."
    )


MOST_OF_IT: Final = 0.8

FAR_DB: Final = 10.0
"""Steps that are no products are not among the layers; up to here the order of layers is still the answer."""


def _bars(layers: Sequence[QuantizedLayer]) -> Iterable[Bar]:
    greatest = max((layer.share for layer in layers), default=0) or 1
    for layer in layers[:MOST_LAYERS]:
        name = _label(layer.module, layer.layer)
        note = _role(layer.part) or (f"{layer.op} {layer.layer}" if layer.module else layer.op)
        yield Bar(
            name,
            note,
            _db(layer.sqnr_db),
            _percent(layer.share),
            round(100 * layer.share / greatest, 2),
            bool(layer.part),
        )


def _parts(data: Quantization) -> Iterable[PartRow]:
    layers = {layer.layer: layer for layer in data.layers}
    rows: dict[str, list[PartCell]] = {}
    for tensor in data.tensors:
        if not tensor.part:
            continue
        structure = tensor.part.rpartition(" ")[0]
        layer = layers.get(tensor.tensor)
        cell = PartCell(
            _role(tensor.part),
            tensor.precision,
            _db(tensor.local_db),
            _db(tensor.total_db),
            _db(layer.sqnr_db) if layer else "–",
        )
        rows.setdefault(structure, []).append(cell)
    return (PartRow(structure, tuple(cells)) for structure, cells in rows.items())


def _structure(row: QuantizedStructure) -> StructureCells:
    return StructureCells(row.kind, row.name, row.worst, _db(row.local_db), _db(row.total_db))


def _curves(tensors: Sequence[QuantizedTensor]) -> tuple[Curve, ...]:
    if len(tensors) < 2:
        return ()
    return ratio_curve("alone", [row.local_db for row in tensors], "in all", [row.total_db for row in tensors])


def _role(part: str) -> str:
    """`Q` of `qkv layers.0 q`."""
    return part.rpartition(" ")[2].upper()


def _label(module: str, name: str) -> str:
    return module or name


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "< 1%"


def _db(value: float) -> str:
    return f"{value:.1f} dB" if math.isfinite(value) else "exact" if value > 0 else "zero"
