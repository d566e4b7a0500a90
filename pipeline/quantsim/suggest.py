"""Mixed precision for a target: which layers get another format, so that the noise or the size is as asked for.

For a ratio of signal to noise the layers that add most to the noise of the outputs get more bits, one after the other;
for a size those that add least, for each byte that it saves, get fewer; for the metric of the task those that add most
for each byte get more, and then those that turn out not to be needed go back. How many that takes is searched by
halving, and what is suggested has been simulated: the estimate decides the order alone. Sizes follow from shapes. A
bias that 32 bits do not hold in the scale of the new formats stays in float, and no suggestion for a ratio has a lower
one than the rules as they are.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import yaml
from onnx import helper

from passes.graph.op_facts import opset_of
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from pipeline.config import FormatsConfig, SuggestConfig
from pipeline.config.quantsim import FLOAT
from pipeline.errors import UsageError
from pipeline.quantsim.noise import Layer
from pipeline.quantsim.placement import PlacedSite, Placement, PlacementRule, find_matches, place
from pipeline.quantsim.qdq import stored_bits
from pipeline.quantsim.sites import find_sites


def weight_bytes(model: DetachedModel, placement: Placement) -> tuple[int, int]:
    """Bytes of all constants, before and after; scales and zero points count."""
    placed = {found.site.tensor: found for found in placement.sites}
    before = after = 0
    for tensor in model.proto.graph.initializer:
        count = math.prod(tensor.dims)
        size = count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        before += size
        found = placed.get(tensor.name)
        if found is None or found.precision is None:
            after += size
            continue
        bits, scales = (
            stored_bits(found.precision, opset_of(model.proto)),
            _count_scales(tuple(tensor.dims), found, placed),
        )
        after += -(-count * bits // 8)
        after += scales if found.precision.scale_type else 4 * scales + -(-scales * bits // 8)
    return before, after


def _count_scales(dims: tuple[int, ...], found: PlacedSite, placed: Mapping[str, PlacedSite]) -> int:
    site, precision = found.site, found.precision
    if site.bias_of is not None:  # its scales are those of the weight
        precision = placed[site.bias_of[1]].precision
        return dims[0] if precision is not None and precision.granularity == "channel" else 1
    if precision is None or precision.granularity == "tensor":
        return 1
    if precision.granularity == "channel":
        return 1 if site.channel_axis is None else dims[site.channel_axis]
    axis = site.summed_axis or 0
    return math.prod(-(-size // precision.block) if place == axis else size for place, size in enumerate(dims))


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Rules to add to `quantsim.rules`, and what the model is with them.

    layers: how many change; of `suggest.units`, how many of these.
    sqnr_db: the least of the outputs, simulated.
    simulations: how many were run to find it.
    metric: of the task, where that is the target.
    """

    goal: str
    is_met: bool
    rules: Mapping[str, Mapping[str, str]]
    layers: int
    sqnr_db: float
    weight_bytes: int
    simulations: int
    metric: float | None = None


@dataclass(frozen=True, slots=True)
class MetricTarget:
    """The metric with a placement, and whether a value of it is good enough."""

    rate: Callable[[Placement], float]
    is_good: Callable[[float], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Layers that change together; by a rule with `selector`, or without one by a rule for each of their tensors."""

    layers: tuple[Layer, ...]
    selector: str = ""


def suggest(
    settings: SuggestConfig,
    model: DetachedModel,
    rules: Sequence[PlacementRule],
    layers: Sequence[Layer],
    sensitivity: Mapping[str, float],
    simulate: Callable[[Placement], float],
    find_limited: Callable[[Placement], Iterable[str]] = lambda _: (),
    metric: MetricTarget | None = None,
) -> Suggestion:
    """The fewest layers whose change meets the target; or all of them where none does. For a metric of these those
    that can be left out one by one, the largest first.

    Args:
        rules: those that are in force now.
        sensitivity: layer, by its output → dB.
        simulate: gives the least ratio of the outputs, in dB, with a placement.
        find_limited: gives the biases that their format does not hold, with a placement.
        metric: with `metric_drop`.

    Raises:
        UsageError: a unit has no layer.
    """
    placement = place(model, rules)
    placed = {found.site.tensor: found for found in placement.quantized()}
    default = FEWER_BITS if settings.size is not None else MORE_BITS if metric is None else MORE_WEIGHT_BITS
    formats = settings.formats or default
    ranked = _rank(settings, model, _find_units(settings.units, model, layers), sensitivity, placed)
    known: dict[tuple[int, ...], float] = {}

    @cache
    def rules_with(chosen: tuple[int, ...]) -> dict[str, FormatsConfig]:
        extra = _rules_of([ranked[number] for number in chosen], placed, formats)
        limited = find_limited(_place_with(model, rules, extra)) if chosen else ()
        return extra | {f"tensor:{glob.escape(name)}": FormatsConfig(activations=FLOAT) for name in limited}

    def placed_with(chosen: tuple[int, ...]) -> Placement:
        return _place_with(model, rules, rules_with(chosen))

    def value_with(chosen: tuple[int, ...]) -> float:
        if chosen not in known:
            known[chosen] = (metric.rate if metric else simulate)(placed_with(chosen))
        return known[chosen]

    def is_enough(chosen: tuple[int, ...]) -> bool:
        if metric is not None:
            return metric.is_good(value_with(chosen))
        if settings.sqnr_db is not None:
            return value_with(chosen) >= settings.sqnr_db
        before, after = weight_bytes(model, placed_with(chosen))
        return after <= (settings.size or 0) * before

    count = _fewest(len(ranked), lambda count: is_enough(tuple(range(count))))
    chosen = tuple(range(len(ranked) if count is None else count))
    if count is None and settings.sqnr_db is not None:
        chosen = max(known, key=known.__getitem__)
    if count is not None and metric is not None:
        chosen = _leave_out(chosen, is_enough, lambda left: weight_bytes(model, placed_with(left))[1])
    return Suggestion(
        _goal(settings),
        count is not None,
        {selector: _as_yaml(entry) for selector, entry in rules_with(chosen).items()},
        len(chosen),
        simulate(placed_with(chosen)) if metric else value_with(chosen),
        weight_bytes(model, placed_with(chosen))[1],
        len(known),
        value_with(chosen) if metric else None,
    )


def _leave_out(
    chosen: tuple[int, ...], is_enough: Callable[[tuple[int, ...]], bool], size_of: Callable[[tuple[int, ...]], int]
) -> tuple[int, ...]:
    """`chosen` without what is not needed; what saves most is tried first."""
    rests = {number: tuple(left for left in chosen if left != number) for number in chosen}
    for number in sorted(chosen, key=lambda number: size_of(rests[number])):
        rest = tuple(left for left in chosen if left != number)
        if is_enough(rest):
            chosen = rest
    return chosen


def _find_units(selectors: Sequence[str], model: DetachedModel, layers: Sequence[Layer]) -> list[Unit]:
    if not selectors:
        return [Unit((layer,)) for layer in layers]
    units: list[Unit] = []
    sites = find_sites(model)
    weights = {site.tensor for site in sites if site.role == "weight"}
    for selector in selectors:
        names = find_matches(PlacementRule(selector), sites, model)
        own = tuple(
            layer for layer in layers if names.intersection((*layer.outputs, *weights.intersection(layer.tensors())))
        )
        if not own:
            raise UsageError(f"quantsim.suggest.units: {selector!r} matches no layer that is quantized")
        units.append(Unit(own, selector))
    return units


def _place_with(model: DetachedModel, rules: Sequence[PlacementRule], extra: Mapping[str, FormatsConfig]) -> Placement:
    return place(model, [*rules, *(_as_rule(selector, found) for selector, found in extra.items())])


def suggestion_text(suggestion: Suggestion) -> str:
    """The suggestion, in a sentence and in YAML."""
    met = "" if suggestion.is_met else " cannot be met; the best that was found"
    what = f"{suggestion.sqnr_db:.2f} dB and {suggestion.weight_bytes / 2**20:.2f} MiB of weights"
    changed = (
        f"{plural(suggestion.layers, 'layer')} in another format" if suggestion.layers else "the rules as they are"
    )
    if suggestion.metric is not None:
        what = f"{suggestion.metric:.4f}, {what}"
    title = f"{suggestion.goal}{met}: {changed} ({what}, {plural(suggestion.simulations, 'simulation')})"
    if not suggestion.rules:
        return title
    rules = {selector: dict(formats) for selector, formats in suggestion.rules.items()}
    return f"{title}\n{yaml.safe_dump({'quantsim': {'rules': rules}}, sort_keys=False, width=1000)}".rstrip()


def _fewest(count: int, is_enough: Callable[[int], bool]) -> int | None:
    """The least number that is enough, if every greater one is too; None if even `count` is not."""
    if is_enough(0):
        return 0
    if not count or not is_enough(count):
        return None
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _rank(
    settings: SuggestConfig,
    model: DetachedModel,
    units: Sequence[Unit],
    sensitivity: Mapping[str, float],
    placed: Mapping[str, PlacedSite],
) -> list[Unit]:
    """The units in the order in which they change; for a size only those with a quantized weight."""
    powers = {name: 10 ** (-ratio / 10) if math.isfinite(ratio) else 0.0 for name, ratio in sensitivity.items()}
    noise = {unit: sum(powers.get(layer.output, 0.0) for layer in unit.layers) for unit in units}
    measured = [unit for unit in units if any(layer.output in powers for layer in unit.layers)]
    if settings.sqnr_db is not None:
        return sorted(measured, key=lambda unit: -noise[unit])
    weights = {
        tensor.name: math.prod(tensor.dims)
        for tensor in model.proto.graph.initializer
        if tensor.name in placed and placed[tensor.name].site.role == "weight"
    }
    sizes = {
        unit: sum(weights.get(name, 0) for name in {name for layer in unit.layers for name in layer.tensors()})
        for unit in measured
    }
    heavy = [unit for unit in measured if sizes[unit]]
    sign = -1 if settings.metric_drop is not None else 1
    return sorted(heavy, key=lambda unit: sign * noise[unit] / sizes[unit])


def _rules_of(
    units: Sequence[Unit], placed: Mapping[str, PlacedSite], formats: FormatsConfig
) -> dict[str, FormatsConfig]:
    """A rule for each unit with a selector, and otherwise for each tensor of its layers that is quantized and is not a
    bias, which follows its factors."""
    found: dict[str, FormatsConfig] = {unit.selector: formats for unit in units if unit.selector}
    layers = [layer for unit in units if not unit.selector for layer in unit.layers]
    for name in (name for layer in layers for name in layer.tensors()):
        site = placed[name].site if name in placed else None
        if site is None or site.role == "bias":
            continue
        kind = "weights" if site.role == "weight" else "activations"
        text = getattr(formats, kind)
        if text is not None:
            found[f"tensor:{glob.escape(name)}"] = FormatsConfig(**{kind: text})
    return found


def _as_rule(selector: str, formats: FormatsConfig) -> PlacementRule:
    return PlacementRule(selector, formats.weight_format(), formats.activation_format())


def _as_yaml(formats: FormatsConfig) -> dict[str, str]:
    return {key: text for key, text in formats.model_dump().items() if text is not None}


def _goal(settings: SuggestConfig) -> str:
    if settings.sqnr_db is not None:
        return f"suggestion for at least {settings.sqnr_db:g} dB"
    if settings.metric_drop is not None:
        return f"suggestion for a metric that loses {settings.metric_drop:g} of its float value at most"
    return f"suggestion for at most {settings.size:g} of the float size"


MORE_BITS: Final = FormatsConfig(weights="int16/channel", activations="uint16")
FEWER_BITS: Final = FormatsConfig(weights="int4/block32")
MORE_WEIGHT_BITS: Final = FormatsConfig(weights="int8/channel")
