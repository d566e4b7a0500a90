"""`onnxline bisect CONFIG --metric`: the layer whose quantization costs the task most."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from passes.provenance.annotations import module_of
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from pipeline.quantsim.encodings import Encoding
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.sensitivity import Layer, find_layers, group_layers


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer, and the metric of the model in which it alone is quantized. `sqnr_db` is its estimated sensitivity, and
    `part` the part of a run that it is in."""

    layer: str
    op: str
    module: str
    value: float
    loss: float
    sqnr_db: float | None
    part: str = ""

    def __str__(self) -> str:
        own = ", ".join(filter(None, (self.op, self.part, self.module)))
        return f"{self.layer} ({own})"


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
                f"{metric}; {worst} costs it most: "
                f"{worst.value:.4f} with it alone quantized, {self.without_worst:.4f} with it in float and all else "
                "quantized"
            )
        for cost in self.costs:
            own = "" if cost.sqnr_db is None else f", sensitivity {cost.sqnr_db:.1f} dB"
            yield f"  {cost.value:.4f}  {cost}{own}"
        if self.untried:
            yield f"  {plural(self.untried, 'layer')} not tried: the time was up (--budget-s)"


@dataclass(frozen=True, slots=True, eq=False)
class CostedModel:
    """A float model with the encodings of all its quantized tensors; `sensitivity`: layer, by its output → dB."""

    model: DetachedModel
    encodings: Mapping[str, Encoding]
    sensitivity: Mapping[str, float]

    def quantize(self, names: Iterable[str]) -> DetachedModel:
        """The model with these tensors quantized."""
        wanted = set(names)
        return insert_qdq(self.model, {name: encoding for name, encoding in self.encodings.items() if name in wanted})


@dataclass(frozen=True, slots=True, eq=False)
class CostMetric:
    """A metric of the task. `rate` gives its value with some models quantized, by name; the others are in float."""

    name: str
    float_value: float
    rate: Callable[[Mapping[str, DetachedModel]], float]
    loss: Callable[[float], float]


def measure_costs(
    models: Mapping[str, CostedModel],
    metric: CostMetric,
    budget_s: float,
    note: Callable[[int, int], object] = lambda *_: None,
    *,
    are_alike: bool = False,
) -> LayerCosts:
    """Rate the models with each layer alone quantized, the most sensitive first, until the time is up.

    Args:
        models: by name; a model by itself has the name "".
        metric: what is rated.
        budget_s: seconds after which no further layer is tried; one layer is tried in any case.
        note: called after each layer, with how many are done and how many there are.
        are_alike: the models have layers in common, by name, which are quantized together. Layers that the sensitivity
            does not know come last.
    """
    layers = {name: find_layers(entry.model, entry.encodings) for name, entry in models.items()}

    def sensitivity_of(unit: Sequence[tuple[str, Layer]]) -> float:
        return min(models[name].sensitivity.get(layer.output, math.inf) for name, layer in unit)

    ranked = sorted(group_layers(layers, are_alike=are_alike), key=sensitivity_of)
    begun = time.perf_counter()
    found: list[tuple[LayerCost, Sequence[tuple[str, Layer]]]] = []
    for unit in ranked:
        if found and time.perf_counter() - begun > budget_s:
            break
        value = metric.rate({name: models[name].quantize(layer.tensors()) for name, layer in unit})
        known = sensitivity_of(unit)
        node, part = unit[0][1].nodes[0], " and ".join(name for name, _ in unit)
        ratio = known if math.isfinite(known) else None
        cost = LayerCost(unit[0][1].output, node.op_type, module_of(node), value, metric.loss(value), ratio, part)
        found.append((cost, unit))
        note(len(found), len(ranked))
    found.sort(key=lambda entry: -entry[0].loss)  # stable: of equal ones the most sensitive comes first
    left = {name: set(entry.encodings) for name, entry in models.items()}
    whole = without = metric.rate({name: entry.quantize(left[name]) for name, entry in models.items()})
    if found:
        for name, layer in found[0][1]:
            left[name] -= _tensors_of_one(layer, layers[name])
        without = metric.rate({name: entry.quantize(left[name]) for name, entry in models.items()})
    costs = tuple(cost for cost, _ in found)
    return LayerCosts(metric.name, metric.float_value, whole, costs, len(ranked) - len(costs), without)


def _tensors_of_one(layer: Layer, layers: Iterable[Layer]) -> set[str]:
    """What is quantized with this layer and with no other."""
    others = {name for known in layers if known is not layer for name in known.tensors()}
    return set(layer.tensors()) - others
