"""`onnxline bisect CONFIG --metric`: the layer whose quantization costs the task most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from passes.provenance.annotations import module_path_of
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from pipeline.quantsim.encodings import Encoding
from pipeline.quantsim.metric import TaskMetric
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.sensitivity import Layer, find_layers


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer, and the metric of the model in which it alone is quantized. `sqnr_db` is its estimated sensitivity."""

    layer: str
    op: str
    module: str
    value: float
    loss: float
    sqnr_db: float | None


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The layers that were tried, those first that cost most; and the model with the first of them in float."""

    metric: str
    float_value: float
    quantized_value: float
    costs: tuple[LayerCost, ...]
    untried: int
    without_worst: float

    def lines(self) -> Iterator[str]:
        """A sentence on the layer that costs most, and a line for each layer."""
        metric = f"{self.metric}: {self.float_value:.4f} in float, {self.quantized_value:.4f} quantized"
        worst = self.costs[0] if self.costs else None
        if worst is None or worst.loss <= 0:
            yield f"{metric}; no layer alone costs any of it"
        else:
            yield (
                f"{metric}; {worst.layer} ({worst.op}{worst.module and f', {worst.module}'}) costs it most: "
                f"{worst.value:.4f} with it alone quantized, {self.without_worst:.4f} with it in float and all else "
                "quantized"
            )
        for cost in self.costs:
            own = "" if cost.sqnr_db is None else f", sensitivity {cost.sqnr_db:.1f} dB"
            yield f"  {cost.value:.4f}  {cost.layer} ({cost.op}{cost.module and f', {cost.module}'}){own}"
        if self.untried:
            yield f"  {plural(self.untried, 'layer')} not tried: the time was up (--budget-s)"


def measure_costs(
    model: DetachedModel,
    encodings: Mapping[str, Encoding],
    metric: TaskMetric,
    sensitivity: Mapping[str, float],
    budget_s: float,
    note: Callable[[int, int], object] = lambda *_: None,
) -> LayerCosts:
    """Rate the model with each layer alone quantized, the most sensitive first, until the time is up.

    Args:
        sensitivity: layer, by its output → dB; layers that are not in it come last.
    """
    layers = sorted(find_layers(model, encodings), key=lambda layer: sensitivity.get(layer.output, float("inf")))
    begun = time.perf_counter()
    costs: list[LayerCost] = []
    for layer in layers:
        if costs and time.perf_counter() - begun > budget_s:
            break
        value = metric.rate(insert_qdq(model, _only(encodings, layer.tensors())))
        place, name = module_path_of(layer.nodes[0]), layer.output
        module = place.paths[-1] if place and place.paths else ""
        op = layer.nodes[0].op_type
        costs.append(LayerCost(name, op, module, value, metric.loss(value), sensitivity.get(name)))
        note(len(costs), len(layers))
    costs.sort(key=lambda cost: -cost.loss)  # stable: of equal ones the most sensitive comes first
    whole = metric.rate(insert_qdq(model, encodings))
    without = whole
    if costs:
        worst = next(layer for layer in layers if layer.output == costs[0].layer)
        own = _tensors_of_one(worst, layers)
        without = metric.rate(insert_qdq(model, _only(encodings, encodings.keys() - own)))
    left = len(layers) - len(costs)
    return LayerCosts(metric.name, metric.float_value, whole, tuple(costs), left, without)


def _only(encodings: Mapping[str, Encoding], names: Iterable[str]) -> dict[str, Encoding]:
    wanted = set(names)
    return {name: encoding for name, encoding in encodings.items() if name in wanted}


def _tensors_of_one(layer: Layer, layers: Iterable[Layer]) -> set[str]:
    """What is quantized with this layer and with no other."""
    others = {name for known in layers if known is not layer for name in known.tensors()}
    return set(layer.tensors()) - others
