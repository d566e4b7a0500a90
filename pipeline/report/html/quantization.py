"""The section of a simulation: what dominates the noise, how Q, K and V fare, and the noise along the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from passes.suggest import plural
from pipeline.report.html.curves import Curve, Tick, ratio_curve, ratio_labels
from pipeline.report.html.headline import Card, bytes_change
from pipeline.report.model import Quantization, QuantizedLayer, QuantizedTensor


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
    known = [row for row in data.rows if math.isfinite(row.local_db) or math.isfinite(row.total_db)]
    layers = {layer.layer: layer for layer in data.layers}
    parts: dict[str, list[tuple[QuantizedTensor, QuantizedLayer | None]]] = {}
    for tensor in data.rows:
        if tensor.part:
            parts.setdefault(tensor.part.rpartition(" ")[0], []).append((tensor, layers.get(tensor.tensor)))
    return QuantizationView(
        data=data,
        cards=tuple(_cards(data)),
        sentence=_sentence(data),
        parts=parts,
        tensors=tuple(sorted(data.rows, key=lambda row: row.local_db)),
        curves=_curves(known),
        labels=ratio_labels([row.module for row in known]) if len(known) > 1 else (),
    )


def _cards(data: Quantization) -> Iterable[Card]:
    for output in data.outputs:
        device = f"{ratio_text(output.device_db)} with all optimizations, " if output.device_db is not None else ""
        yield Card(f"SQNR of {output.name}", ratio_text(output.sqnr_db), f"{device}max abs error {output.max_abs:.1e}")
    before, after = data.weight_bytes, data.quantized_weight_bytes
    yield Card("weights", bytes_change(before, after), f"{1 - after / before:.0%} less" if before else "")
    yield Card(
        "tensors quantized",
        f"{data.quantized_tensors} of {data.tensors}",
        f"{data.tensors - data.quantized_tensors} in float",
    )


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
    worst = min(data.rows, key=lambda row: row.local_db)
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
