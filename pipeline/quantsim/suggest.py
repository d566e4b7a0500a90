"""Mixed precision for a target: which layers get another format, so that the noise or the size is as asked for.

target        order in which layers change                                            new format
sqnr_db       most noise in the outputs first; after all layers the operators         more bits
              between them, such as sums and norms, whose noise is not estimated
size          least noise for each byte saved first                                   fewer bits
metric_drop   most noise for each byte first                                          more bits

The estimate of the noise decides the order alone. How many layers change is found by bisection, each trial being
simulated; for a metric, layers that turn out not to be needed then go back. Sizes follow from shapes. A bias that 32
bits cannot hold in the scale of the new formats stays in float. A suggestion for `sqnr_db` that misses the target is
the best simulated trial, the rules as they are included.

The layers may be those of several models: the parts of one run, which are rated together, by their chain.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from passes.suggest import bytes_text, plural
from passes.weights.detached import DetachedModel
from pipeline.config import FormatsConfig, SuggestConfig
from pipeline.config.quantsim import FLOAT
from pipeline.errors import UsageError
from pipeline.quantsim.module_rules import name_modules
from pipeline.quantsim.new_formats import new_formats
from pipeline.quantsim.noise import noise_power
from pipeline.quantsim.placement import PlacedSite, Placement, PlacementRule, find_matches, place
from pipeline.quantsim.profiles import TargetTable
from pipeline.quantsim.sensitivity import Layer, group_layers
from pipeline.quantsim.sites import find_sites
from pipeline.quantsim.weight_sizes import weight_bytes


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Rules to add to `quantsim.rules`, and what the model is with them.

    goal: the target, for messages.
    is_met: whether the target is met.
    rules: selector → formats; for a run in parts, the rules that all parts share.
    part_rules: part → the rules of that part alone.
    layers: how many layers change, or how many of `suggest.units`.
    others: how many operators between layers change as well.
    sqnr_db: the least SQNR of the outputs, simulated.
    weight_bytes: of the quantized model.
    simulations: how many were run to find the suggestion.
    metric: the value of the task's metric, if it is the target.
    """

    goal: str
    is_met: bool
    rules: Mapping[str, Mapping[str, str]]
    layers: int
    sqnr_db: float
    weight_bytes: int
    simulations: int
    metric: float | None = None
    part_rules: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    others: int = 0


Placements = Mapping[str, Placement]
"""Model, by its name → its placement."""


@dataclass(frozen=True, slots=True, eq=False)
class LayeredModel:
    """A model whose layers may change.

    rules: the rules of the configuration.
    sensitivity: output of a layer → SQNR in dB of the rated result with this layer alone quantized.
    stored_elsewhere: constants that an earlier model has too, and that are stored once.
    last_rules: rules that stay after all that are added.
    target: what the model is to run on; layers change to formats that it runs. None runs all.
    """

    model: DetachedModel
    rules: Sequence[PlacementRule]
    layers: Sequence[Layer]
    sensitivity: Mapping[str, float]
    stored_elsewhere: Collection[str] = frozenset()
    last_rules: Sequence[PlacementRule] = ()
    target: TargetTable | None = None

    def place_with(self, extra: Mapping[str, FormatsConfig]) -> Placement:
        """The placement with further rules."""
        further = (_as_rule(selector, found) for selector, found in extra.items())
        return place(self.model, [*self.rules, *further, *self.last_rules])


@dataclass(frozen=True, slots=True)
class MetricTarget:
    """The task's metric as a target.

    rate: placements → the value of the metric.
    is_good: whether such a value is good enough.
    """

    rate: Callable[[Placements], float]
    is_good: Callable[[float], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Layers that change together.

    layers: (name of the model, layer).
    selector: of the rule that changes them; empty for a rule for each of their tensors.
    is_between: the unit is an operator between layers.
    """

    layers: tuple[tuple[str, Layer], ...]
    selector: str = ""
    is_between: bool = False


def suggest(
    settings: SuggestConfig,
    models: Mapping[str, LayeredModel],
    simulate: Callable[[Placements], float],
    find_limited: Callable[[Placements], Mapping[str, Iterable[str]]] = lambda _: {},
    metric: MetricTarget | None = None,
    *,
    are_alike: bool = False,
) -> Suggestion:
    """Search the fewest layers whose change meets the target.

    Args:
        settings: the target, the units that change together, and the new formats.
        models: by name; a single model has the name "".
        simulate: placements → the least SQNR of the outputs, in dB.
        find_limited: placements → model → the biases that their format cannot hold.
        metric: for the target `metric_drop`.
        are_alike: the models have layers in common, by name, which change together.

    Returns:
        The suggestion. If no number of layers meets the target, it changes all of them, or those with the best SQNR.

    Raises:
        UsageError: a unit has no layer, or a target does not run a format of the settings.
    """
    placed = {
        name: {found.site.tensor: found for found in entry.place_with({}).quantized_sites()}
        for name, entry in models.items()
    }
    ranked = _rank(settings, models, _find_units(settings.units, models, are_alike=are_alike), placed)
    if settings.sqnr_db is not None and not settings.units:
        ranked += _find_others(models, placed, are_alike=are_alike)
    rate = metric.rate if metric else simulate
    formats = new_formats(settings, (entry.target for entry in models.values()))
    trials = _Trials(models, ranked, placed, formats, rate, find_limited)

    def is_enough(chosen: Chosen) -> bool:
        if metric is not None:
            return metric.is_good(trials.value(chosen))
        if settings.sqnr_db is not None:
            return trials.value(chosen) >= settings.sqnr_db
        before, after = trials.weight_bytes(chosen)
        return after <= (settings.size or 0) * before

    count = _fewest(len(ranked), lambda count: is_enough(tuple(range(count))))
    chosen = tuple(range(len(ranked) if count is None else count))
    if count is None and settings.sqnr_db is not None:
        chosen = max(trials.values, key=trials.values.__getitem__)
    if count is not None and metric is not None:
        chosen = _leave_out(chosen, is_enough, lambda rest: trials.weight_bytes(rest)[1])
    rules: Mapping[str, Mapping[str, FormatsConfig]] = trials.rules(chosen)
    if not settings.units:
        rules = {name: name_modules(found, models[name].place_with) for name, found in rules.items()}
    shared, own = _split_rules(rules)
    others = sum(ranked[number].is_between for number in chosen)
    return Suggestion(
        goal=_goal(settings),
        is_met=count is not None,
        rules=shared,
        part_rules=own,
        layers=len(chosen) - others,
        others=others,
        sqnr_db=simulate(trials.placements(chosen)) if metric else trials.value(chosen),
        weight_bytes=trials.weight_bytes(chosen)[1],
        metric=trials.value(chosen) if metric else None,
        simulations=len(trials.values),
    )


Chosen = tuple[int, ...]
"""The units that change, by their ranks, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class _Trials:
    """The model with chosen units in another format: rules, placements, size and rated value, each computed once.

    ranked: the units, in the order in which they change.
    placed: model → tensor → its site with the rules of the configuration.
    formats: what the chosen units change to.
    rate: placements → the value that is compared with the target.
    find_limited: see `suggest`.
    values: the rated trials.
    """

    models: Mapping[str, LayeredModel]
    ranked: Sequence[Unit]
    placed: Mapping[str, Mapping[str, PlacedSite]]
    formats: FormatsConfig
    rate: Callable[[Placements], float]
    find_limited: Callable[[Placements], Mapping[str, Iterable[str]]]
    values: dict[Chosen, float] = field(default_factory=dict)
    _rules: dict[Chosen, dict[str, dict[str, FormatsConfig]]] = field(default_factory=dict)

    def rules(self, chosen: Chosen) -> dict[str, dict[str, FormatsConfig]]:
        """Model → selector → formats; a bias that its new format cannot hold stays in float."""
        if chosen not in self._rules:
            extra = _rules_of([self.ranked[number] for number in chosen], self.placed, self.formats)
            for name, tensors in self.find_limited(self._place(extra)).items() if chosen else ():
                extra[name] |= {f"tensor:{glob.escape(tensor)}": FormatsConfig(activations=FLOAT) for tensor in tensors}
            self._rules[chosen] = extra
        return self._rules[chosen]

    def placements(self, chosen: Chosen) -> dict[str, Placement]:
        return self._place(self.rules(chosen))

    def value(self, chosen: Chosen) -> float:
        """The rated value; the model is run for it, unless this trial was rated before."""
        if chosen not in self.values:
            self.values[chosen] = self.rate(self.placements(chosen))
        return self.values[chosen]

    def weight_bytes(self, chosen: Chosen) -> tuple[int, int]:
        """(bytes of all constants in float, bytes of all constants in this trial)."""
        found = self.placements(chosen)
        sizes = [weight_bytes(entry.model, found[name], entry.stored_elsewhere) for name, entry in self.models.items()]
        return sum(before for before, _ in sizes), sum(after for _, after in sizes)

    def _place(self, rules: Mapping[str, Mapping[str, FormatsConfig]]) -> dict[str, Placement]:
        return {name: entry.place_with(rules[name]) for name, entry in self.models.items()}


Rules = dict[str, dict[str, str]]


def _split_rules(rules: Mapping[str, Mapping[str, FormatsConfig]]) -> tuple[Rules, dict[str, Rules]]:
    """The rules that all models have, and for each model those of its own."""
    texts = {name: {key: _as_yaml(formats) for key, formats in found.items()} for name, found in rules.items()}
    first, *others = texts.values()
    shared = {key: entry for key, entry in first.items() if all(known.get(key) == entry for known in others)}
    own = {name: {key: found[key] for key in found if key not in shared} for name, found in texts.items()}
    return shared, {name: found for name, found in own.items() if found}


def _leave_out(chosen: Chosen, is_enough: Callable[[Chosen], bool], size_of: Callable[[Chosen], int]) -> Chosen:
    """`chosen` without the units that the target does not need; the unit that saves most bytes is tried first."""
    rests = {number: tuple(left for left in chosen if left != number) for number in chosen}
    for number in sorted(chosen, key=lambda number: size_of(rests[number])):
        rest = tuple(left for left in chosen if left != number)
        if is_enough(rest):
            chosen = rest
    return chosen


def _find_units(selectors: Sequence[str], models: Mapping[str, LayeredModel], *, are_alike: bool) -> list[Unit]:
    if not selectors:
        layers = {name: entry.layers for name, entry in models.items()}
        return list(map(Unit, group_layers(layers, are_alike=are_alike)))
    found: list[Unit] = []
    for selector in selectors:
        own = tuple((name, layer) for name, entry in models.items() for layer in _select_layers(selector, entry))
        if not own:
            raise UsageError(f"quantsim.suggest.units: {selector!r} matches no layer that is quantized")
        found.append(Unit(own, selector))
    return found


def _find_others(
    models: Mapping[str, LayeredModel], placed: Mapping[str, Mapping[str, PlacedSite]], *, are_alike: bool
) -> list[Unit]:
    """The operators between layers with a quantized tensor of their own, such as a sum of residuals, in graph order."""
    others: dict[str, list[Layer]] = {name: [] for name in models}
    for name, entry in models.items():
        known = {tensor for layer in entry.layers for tensor in layer.tensors()}
        for node in entry.model.proto.graph.node:
            layer = Layer((node,))
            if node.output and not (placed[name].keys() & {*layer.tensors()}) <= known:
                known.update(layer.tensors())
                others[name].append(layer)
    return [Unit(layers, is_between=True) for layers in group_layers(others, are_alike=are_alike)]


def _select_layers(selector: str, entry: LayeredModel) -> Iterator[Layer]:
    """The layers of which the selector matches a result or a weight."""
    sites = find_sites(entry.model)
    weights = {site.tensor for site in sites if site.role == "weight"}
    names = find_matches(PlacementRule(selector), sites, entry.model)
    for layer in entry.layers:
        if names.intersection((*layer.outputs, *weights.intersection(layer.tensors()))):
            yield layer


def suggestion_text(suggestion: Suggestion) -> str:
    """The suggestion, in a sentence and in YAML."""
    met = "" if suggestion.is_met else " cannot be met; the best that was found"
    what = f"{suggestion.sqnr_db:.2f} dB and {bytes_text(suggestion.weight_bytes)} of weights"
    changed = " and ".join(
        filter(
            None,
            (
                plural(suggestion.layers, "layer") if suggestion.layers else "",
                plural(suggestion.others, "operator") + " between layers" if suggestion.others else "",
            ),
        )
    )
    changed = f"{changed} in another format" if changed else "the rules as they are"
    if suggestion.metric is not None:
        what = f"{suggestion.metric:.4f}, {what}"
    title = f"{suggestion.goal}{met}: {changed} ({what}, {plural(suggestion.simulations, 'simulation')})"
    sections: dict[str, Any] = {}
    if suggestion.rules:
        sections["quantsim"] = {"rules": _as_dicts(suggestion.rules)}
    if suggestion.part_rules:
        parts = {name: {"quantsim": {"rules": _as_dicts(rules)}} for name, rules in suggestion.part_rules.items()}
        sections["parts"] = parts
    return f"{title}\n{yaml.safe_dump(sections, sort_keys=False, width=1000)}".rstrip() if sections else title


def _as_dicts(rules: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    return {selector: dict(formats) for selector, formats in rules.items()}


def _fewest(count: int, is_enough: Callable[[int], bool]) -> int | None:
    """The least number up to `count` for which `is_enough`, which has to hold for all greater ones; None if none is."""
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
    models: Mapping[str, LayeredModel],
    units: Sequence[Unit],
    placed: Mapping[str, Mapping[str, PlacedSite]],
) -> list[Unit]:
    """The units in the order in which they change; for a size only those with a quantized weight."""
    powers = {
        (name, layer): noise_power(ratio)
        for name, entry in models.items()
        for layer, ratio in entry.sensitivity.items()
    }
    noise = {unit: sum(powers.get((name, layer.output), 0.0) for name, layer in unit.layers) for unit in units}
    measured = [unit for unit in units if any((name, layer.output) in powers for name, layer in unit.layers)]
    if settings.sqnr_db is not None:
        return sorted(measured, key=lambda unit: -noise[unit])
    weights = {
        (name, tensor.name): math.prod(tensor.dims)
        for name, entry in models.items()
        for tensor in entry.model.proto.graph.initializer
        if tensor.name in placed[name] and placed[name][tensor.name].site.role == "weight"
        if tensor.name not in entry.stored_elsewhere
    }
    sizes = {
        unit: sum(
            weights.get(key, 0) for key in {(name, tensor) for name, layer in unit.layers for tensor in layer.tensors()}
        )
        for unit in measured
    }
    heavy = [unit for unit in measured if sizes[unit]]
    sign = -1 if settings.metric_drop is not None else 1
    return sorted(heavy, key=lambda unit: sign * noise[unit] / sizes[unit])


def _rules_of(
    units: Sequence[Unit], placed: Mapping[str, Mapping[str, PlacedSite]], formats: FormatsConfig
) -> dict[str, dict[str, FormatsConfig]]:
    """Model → selector → formats: a rule for the selector of each unit, or for each quantized tensor of its layers.

    A bias has no rule: its format follows from the formats of the weight and the input.
    """
    found: dict[str, dict[str, FormatsConfig]] = {model: {} for model in placed}
    for unit in units:
        for model, layer in unit.layers:
            if unit.selector:
                found[model][unit.selector] = formats
                continue
            for name in layer.tensors():
                site = placed[model][name].site if name in placed[model] else None
                if site is None or site.role == "bias":
                    continue
                kind = "weights" if site.role == "weight" else "activations"
                text = getattr(formats, kind)
                if text is not None:
                    found[model][f"tensor:{glob.escape(name)}"] = FormatsConfig(**{kind: text})
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
