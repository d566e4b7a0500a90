"""Which tensor is quantized how: rules that say what they matched, and a reason for each tensor that stays in float."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from passes.encodings.encoding import BIAS
from passes.structures import STRUCTURES
from passes.structures.adapters import find_adapted
from passes.structures.view import GraphView
from passes.suggest import is_named, nearest, plural
from passes.weights.detached import DetachedModel
from pipeline.config import KEYS, OptionNames
from pipeline.config.quantsim import FLOAT, Precision
from pipeline.errors import UsageError
from pipeline.quantsim.sites import Role, Site, advise_untie, find_sites, share_encodings


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """The tensors that `selector` matches get these formats; None leaves the format of an earlier rule in force.

    selector: `op:MatMul`, `module:encoder.*`, `node:…`, `tensor:…` with globs, or a structure, such as `qkv`.
    weights: a format as `parse_precision` reads it, or the text `float`.
    activations: of inputs, results and constants that are no weights.
    tensors: what a profile has matched already; `selector` then says which entry of the profile it was.
    limits: the range of these tensors, where it is known whatever the model reads.
    reason: why these tensors stay in float, where the selector does not say it.
    apart: tensors that share no encoding with the tensors whose elements they hold.
    half_open: tensors whose scale at 16 bits is their known range over 2^16, so that its upper end is one step outside.
    """

    selector: str
    weights: Precision | str | None = None
    activations: Precision | str | None = None
    tensors: frozenset[str] | None = None
    limits: tuple[float, float] | None = None
    reason: str = ""
    apart: frozenset[str] = frozenset()
    half_open: frozenset[str] = frozenset()

    def format_for(self, role: Role) -> Precision | str | None:
        return self.weights if role == "weight" else self.activations

    @property
    def formats(self) -> str:
        """What the rule says: `weights int8/channel, activations uint8`."""
        named = {"weights": self.weights, "activations": self.activations}
        return ", ".join(f"{name} {precision}" for name, precision in named.items() if precision is not None)


@dataclass(frozen=True, slots=True)
class RuleMatches:
    """How many tensors a rule matched, and for how many of them no later rule said something else."""

    selector: str
    weights: int
    activations: int
    in_force: int
    formats: str
    """What the rule says, as two rules may have the same selector: one of the profile and one of the configuration."""


@dataclass(frozen=True, slots=True)
class PlacedSite:
    """A tensor with its format, or the reason why it stays in float."""

    site: Site
    precision: Precision | None
    rule: str
    """The selector that decided; empty where none did."""
    reason: str = ""
    limits: tuple[float, float] | None = None
    """Its range, where that is known without a sample."""
    asked: Precision | None = None
    """The format of the rule, where the rule has a scale for each channel or block and the tensor has one scale."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Every float tensor of the model, with what was decided of it. Tensors of one group have one format."""

    sites: tuple[PlacedSite, ...]
    rules: tuple[RuleMatches, ...]
    names: OptionNames = KEYS
    """What messages on its tensors call the options."""

    def quantized_sites(self) -> tuple[PlacedSite, ...]:
        return tuple(placed for placed in self.sites if placed.precision is not None)

    def formats(self) -> dict[str, Precision]:
        """The format of each tensor that is quantized."""
        return {placed.site.tensor: placed.precision for placed in self.sites if placed.precision is not None}

    def left_in_float(self) -> tuple[PlacedSite, ...]:
        return tuple(placed for placed in self.sites if placed.precision is None)

    def notes(self) -> Iterator[str]:
        """Where formats are coarser than their rule says: a sentence for each weight, and for all activations of one
        rule; and a sentence for each weight that a node reads as a table, which wants more bits."""
        formats = self.formats()
        for placed in self.quantized_sites():
            site, bits = placed.site, formats[placed.site.tensor].bits
            consumers = [name for name in site.lent_to if name not in formats or formats[name].bits > bits]
            if consumers:
                yield (
                    f"{site.tensor} has {bits} bits as the weight of {site.node}, and the same values make "
                    f"{' and '.join(consumers)}; {advise_untie(self.names)}"
                )
        coarser = [placed for placed in self.sites if placed.asked is not None]
        for placed in coarser:
            if placed.site.disagreement:
                yield f"{placed.site.tensor} has one scale: {placed.site.disagreement}"
        alone = [placed.site for placed in coarser if placed.site.role == "weight" and not placed.site.disagreement]
        for operator, count in Counter(site.op for site in alone).items():
            first = next(site.tensor for site in alone if site.op == operator)
            yield (
                f"{plural(count, 'weight')} of {operator} ({first}{' …' if count > 1 else ''}) "
                f"{'has' if count == 1 else 'have'} one scale: the channels lie along no single axis"
            )
        others = Counter((placed.rule, str(placed.asked)) for placed in coarser if placed.site.role != "weight")
        for (selector, text), count in others.items():
            yield (
                f"the rule {selector!r} says {text} of {plural(count, 'activation')}: each has one scale, as only "
                "weights have more"
            )


def place(
    model: DetachedModel,
    rules: Sequence[PlacementRule],
    dtypes: Collection[str] = ("float32",),
    sites: Sequence[Site] = (),
    names: OptionNames = KEYS,
) -> Placement:
    """Decide the format of every float tensor of `dtypes`. A later rule counts before an earlier one.

    Args:
        model: the float model.
        rules: at least one matches each tensor that is quantized.
        dtypes: of the tensors that may be quantized.
        sites: what `find_sites` finds in `model`, where the caller has it.
        names: what messages call the options.

    Raises:
        UsageError: a rule matches no tensor, or nothing that it has a format for; the message says what there is. Or
            the model is one of other floats than float32.
    """
    sites = sites or find_sites(model, names)
    _check_dtypes(sites, dtypes, names)
    matched = _spare_inputs(rules, [find_matches(rule, sites, model) for rule in rules], sites, model)
    limits = _known_ranges(sites, rules)
    sites = share_encodings(sites, _find_apart(sites, rules, matched), limits)
    for rule, tensors in zip(rules, matched, strict=True):
        matches = (site for site in sites if site.tensor in tensors and not site.body_of)
        has_format = any(rule.format_for(site.role) is not None for site in matches)
        if not has_format and rule.tensors is None:
            said = f"{names.rules}: {_nothing_matched(rule, sites, model, tensors)}"
            raise UsageError(said if sites else NO_FLOATS)  # the rule may be one of the profile
    chosen = _choose_rules(sites, rules, matched, find_adapted(GraphView(model)))
    infinite = {site.group: site.tensor for site in constants_without_range(sites, model)}
    handed_out = model.index.initializers.keys() & model.index.outputs.keys()
    decided = {
        site.tensor: PlacedSite(site, None, "", HANDED_OUT)
        if site.tensor in handed_out
        else _decide(site, None if number is None else rules[number], infinite.get(site.group), dtypes)
        for site, number in ((site, chosen[site.tensor]) for site in sites)
    }
    half_open = _find_half_open(sites, rules)
    ranged = (
        replace(found, limits=_fit_limits(limits.get(tensor), found.precision, found.site.group in half_open))
        for tensor, found in decided.items()
    )
    placed = tuple(_decide_bias(found, decided) for found in ranged)
    in_force = Counter(chosen[found.site.tensor] for found in placed if found.rule)
    counted: dict[tuple[object, ...], RuleMatches] = {}
    for number, (rule, tensors) in enumerate(zip(rules, matched, strict=True)):
        key = (rule.selector, rule.formats, number if rule.tensors is None else None)
        counted[key] = _count(rule, tensors, sites, in_force[number], counted.get(key))
    return Placement(placed, tuple(counted.values()), names)


NO_FLOATS: Final = "the model has no tensor of floats, so there is nothing to quantize"

HANDED_OUT: Final = "the stored tensor is an output of the model"


def _check_dtypes(sites: Sequence[Site], taken: Collection[str], names: OptionNames) -> None:
    """Refuse a model whose weights, or whose tensors where it has no weights, are all of other floats than float32."""
    weights = [site for site in sites if site.role == "weight"]
    dtypes = {site.dtype for site in weights or sites}
    if dtypes and dtypes.isdisjoint(taken):
        what, found = "weights" if weights else "tensors", " and ".join(sorted(dtypes))
        is_half = dtypes <= {"float16", "bfloat16"}
        advice = names.step.format("to-float32") if is_half else "export the model in float32 (module.float())"
        raise UsageError(f"the {what} of the model are {found}, and only float32 is simulated; {advice}")


def constants_without_range(sites: Iterable[Site], model: DetachedModel) -> Iterator[Site]:
    """The constants that hold infinity or NaN, such as -inf in a Max: no scale can express them."""
    stored = model.index.initializers
    for site in sites:
        tensor = stored.get(site.tensor) if site.role == "constant" else None
        if tensor is not None and not model.is_unread(tensor) and not np.isfinite(model.array(tensor)).all():
            yield site


def _find_apart(
    sites: Iterable[Site], rules: Sequence[PlacementRule], matched: Sequence[frozenset[str]]
) -> frozenset[str]:
    """The tensors that share no encoding with what they read: as a rule says it, or because a rule leaves in float what
    puts several tensors together, such as a Concat. Then each of these keeps a format and a range of its own."""
    found = {name for rule in rules for name in rule.apart}
    for site in sites:
        said = [
            form
            for rule, names in zip(rules, matched, strict=True)
            if site.tensor in names and (form := rule.format_for(site.role)) is not None
        ]
        if len(site.shares) > 1 and said and said[-1] == FLOAT:
            found.add(site.tensor)
    return frozenset(found)


def _known_ranges(sites: Iterable[Site], rules: Iterable[PlacementRule]) -> dict[str, tuple[float, float]]:
    """The tensors whose range is known whatever the model reads, by their operator or by a rule."""
    found = {site.tensor: UNIT_RANGE for site in sites if site.role == "activation" and site.op in UNIT_OPS}
    for rule in rules:
        if rule.limits is not None:
            found |= dict.fromkeys(rule.tensors or (), rule.limits)
    return found


def _find_half_open(sites: Iterable[Site], rules: Iterable[PlacementRule]) -> set[str]:
    """The groups whose values all come from operators whose upper end is one step outside."""
    tensors = frozenset[str]().union(*(rule.half_open for rule in rules))
    members = [(site.group, site.tensor in tensors) for site in sites if not site.moves]
    return {group for group, is_open in members if is_open} - {group for group, is_open in members if not is_open}


def _fit_limits(
    limits: tuple[float, float] | None, precision: Precision | None, is_half_open: bool
) -> tuple[float, float] | None:
    """A known range; where its upper end is outside at 16 bits, the one whose scale is a power of 2."""
    if limits is None or not is_half_open or precision is None or precision.bits != 16:
        return limits
    low, high = limits
    if precision.signed:
        return precision.lowest * max(-low, high) / 2**15, precision.highest * max(-low, high) / 2**15
    if precision.symmetric:
        high = max(-low, high) * (2**16 - 1) / 2**16
        return -high, high
    return low, high - (high - low) / 2**16


UNIT_OPS: Final = frozenset({"Softmax", "Sigmoid", "HardSigmoid"})
"""Ops whose results lie between zero and one whatever they read."""

UNIT_RANGE: Final = (0.0, 1.0)


def _choose_rules(
    sites: Iterable[Site], rules: Sequence[PlacementRule], matched: Sequence[frozenset[str]], adapted: Mapping[str, str]
) -> dict[str, int | None]:
    """The number of the rule that decides each tensor: the last that has a format for it, for one of its group, or, of
    a weight of an adapter, for the weight that it adapts."""
    last: dict[str, int] = {}
    for site in sites:
        key = _key(site)
        numbers = (
            index
            for index, rule in enumerate(rules)
            if site.tensor in matched[index] and rule.format_for(site.role) is not None
        )
        last[key] = max(last.get(key, -1), *numbers, -1)
    for name, base in adapted.items():
        own, other = f"weight {name}", f"weight {base}"
        if own in last:
            last[own] = max(last[own], last.get(other, -1))
    return {site.tensor: last[_key(site)] if last[_key(site)] >= 0 else None for site in sites}


def _key(site: Site) -> str:
    """What decides the format: a weight stands for itself, all else goes with its group."""
    return f"weight {site.tensor}" if site.role == "weight" else site.group


def _decide(site: Site, rule: PlacementRule | None, infinite: str | None, dtypes: Collection[str]) -> PlacedSite:
    """What `rule` says. `infinite` is a constant of the same group that holds infinity or NaN, if there is one."""
    if site.stored_as:
        return PlacedSite(site, None, "", f"the model stores it as {site.stored_as} already")
    if site.body_of:
        what = "made" if site.role == "activation" else "read"
        return PlacedSite(site, None, "", f"{what} in a body of {site.body_of}")
    if site.dtype not in dtypes:
        return PlacedSite(site, None, "", f"holds {site.dtype}, and only float32 is quantized")
    if rule is None:
        what = "weights" if site.role == "weight" else "activations"
        return PlacedSite(site, None, "", f"no rule says anything of {what} of {site.op or 'the inputs'}")
    precision = rule.format_for(site.role)
    if not isinstance(precision, Precision):
        return PlacedSite(site, None, rule.selector, rule.reason or f"the rule {rule.selector!r} says {FLOAT}")
    if infinite is not None and site.role != "weight":
        return PlacedSite(site, None, rule.selector, f"the constant {infinite} holds infinity or NaN")
    if precision.granularity == "block" and 0 < site.summed_size <= precision.block:
        precision = replace(precision, granularity="channel", block=0, scale_type=None)  # a block is a whole channel
    axis = site.summed_axis if precision.granularity == "block" else site.channel_axis
    is_coarser = precision.granularity != "tensor" and axis is None  # only weights have axes
    asked, given = (precision, precision.per_tensor()) if is_coarser else (None, precision)
    return PlacedSite(site, given, rule.selector, asked=asked)


def _decide_bias(placed: PlacedSite, decided: Mapping[str, PlacedSite]) -> PlacedSite:
    """A bias has 32 bits, and the scale of the products that it is added to; so both factors have to have one."""
    site = placed.site
    if site.bias_of is None or placed.precision is None:
        return placed
    if site.disagreement:
        return PlacedSite(site, None, placed.rule, site.disagreement)
    factors = [decided.get(name) for name in site.bias_of]
    if any(factor is None or factor.precision is None for factor in factors):
        return PlacedSite(site, None, placed.rule, f"{' and '.join(site.bias_of)} are not both quantized")
    if any(factor is not None and factor.precision is not None and factor.precision.float_type for factor in factors):
        return PlacedSite(
            site, None, placed.rule, "its factors are rounded to floats, and products of floats are added in float"
        )
    weight = factors[1]
    if weight is not None and weight.precision is not None and weight.precision.granularity == "block":
        return PlacedSite(site, None, placed.rule, f"the weight {site.bias_of[1]} has a scale for each block")
    return PlacedSite(site, BIAS, placed.rule)


def _count(
    rule: PlacementRule, names: frozenset[str], sites: Iterable[Site], in_force: int, before: RuleMatches | None
) -> RuleMatches:
    """What a rule matches, with what `before` has matched by the same entry of a profile: two of its rules, where one
    decides late, as for the result of a Concat."""
    roles = Counter(site.role == "weight" for site in sites if site.tensor in names)
    found = RuleMatches(rule.selector, roles[True], roles[False], in_force, rule.formats)
    if before is None:
        return found
    weights, activations = found.weights + before.weights, found.activations + before.activations
    return replace(found, weights=weights, activations=activations, in_force=in_force + before.in_force)


def find_matches(rule: PlacementRule, sites: Iterable[Site], model: DetachedModel) -> frozenset[str]:
    """The tensors that the selector of a rule matches.

    Raises:
        UsageError: the selector is of no kind that there is.
    """
    if rule.tensors is not None:
        return rule.tensors
    refuse_selector(rule.selector)
    kind, colon, pattern = rule.selector.partition(":")
    if not colon:
        return _structure_tensors(rule.selector, model)
    names_of = SELECTORS[kind]
    return frozenset(site.tensor for site in sites if any(is_named(name, pattern) for name in names_of(site)))


def _spare_inputs(
    rules: Sequence[PlacementRule], matched: Sequence[frozenset[str]], sites: Sequence[Site], model: DetachedModel
) -> list[frozenset[str]]:
    """What each rule matches, without inputs that a rule leaves in float with the first node that reads them, and that
    other nodes read too: as onnxruntime's quantizer has it where it excludes nodes."""
    leaves = [rule.activations == FLOAT and rule.tensors is None for rule in rules]
    in_float = {name for is_left, names in zip(leaves, matched, strict=True) if is_left for name in names}
    made = {site.tensor for site in sites if site.role == "activation"} - in_float
    read = {name for node in model.index.nodes if made.intersection(node.output) for name in node.input}
    spared = {site.tensor for site in sites if site.role == "input" and site.tensor in read}
    return [
        names - spared if is_left and not rule.selector.startswith("tensor:") else names
        for rule, is_left, names in zip(rules, leaves, matched, strict=True)
    ]


def refuse_selector(selector: str) -> None:
    """Refuse a selector of no kind that there is.

    Raises:
        UsageError: the message says what there is.
    """
    kind, colon, pattern = selector.partition(":")
    if colon and (kind not in SELECTORS or not pattern):
        raise UsageError(
            f"quantsim.rules: found {selector!r}, expected {', '.join(f'{key}:GLOB' for key in SELECTORS)} or a "
            f"structure ({', '.join(sorted(STRUCTURES))})"
        )
    if not colon and kind not in STRUCTURES:
        raise UsageError(
            f"quantsim.rules: found {kind!r}, expected a structure ({', '.join(sorted(STRUCTURES))}) or "
            f"{', '.join(f'{key}:GLOB' for key in SELECTORS)}{nearest(kind, STRUCTURES)}"
        )


def _structure_tensors(kind: str, model: DetachedModel) -> frozenset[str]:
    """The weights of the structures of a kind, and the values where they end."""
    names = set[str]()
    for instance in STRUCTURES[kind].find(model).instances:
        names.update(weight.name for weight in instance.weights)
        names.update(info.name for site in instance.pins for info in (site.tight, site.after_bias))
    return frozenset(names)


def _nothing_matched(rule: PlacementRule, sites: Sequence[Site], model: DetachedModel, names: frozenset[str]) -> str:
    kind, colon, pattern = rule.selector.partition(":")
    owners = {site.body_of for site in sites if site.tensor in names}
    if names and "" not in owners:
        return (
            f"{rule.selector!r} matches {plural(len(names), 'tensor')} in bodies of "
            f"{' and '.join(sorted(owners))}, where nothing is quantized, and no other tensor"
        )
    if names:
        what = "weights" if rule.activations is None else "activations"
        return f"{rule.selector!r} matches {len(names)} tensors, and none of them is among the {what}"
    if not colon:
        return f"the model has no {kind}; it has {STRUCTURES[kind].find(model).instead or 'none'}"
    known = Counter(name for site in sites for name in SELECTORS[kind](site) if name)
    if not known:
        return f"{rule.selector!r} matches no tensor; no {kind} of the model has a name"
    shown = ", ".join(name for name, _ in known.most_common(SHOWN))
    more = " …" if len(known) > SHOWN else ""
    return f"{rule.selector!r} matches no tensor; the model has {shown}{more}{nearest(pattern, known)}"


SHOWN: Final = 8
"""How many names a message lists."""

SELECTORS: Final[Mapping[str, Callable[[Site], Sequence[str]]]] = {
    "op": lambda site: (site.op,),
    "module": lambda site: site.modules,
    "node": lambda site: (site.node,),
    "tensor": lambda site: (site.tensor,),
}
"""The kinds of selectors → what their globs are compared with."""
