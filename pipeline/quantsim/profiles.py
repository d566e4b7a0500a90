"""Targets and profiles: what a target takes, and the rules that come before those of the configuration.

What a target takes, and how it is quantized, stands in one table for each: targets/NAME.yaml, with its sources. A table
may extend another one, and then says what differs; `target_check.py` holds a model against a table. The rules of a
profile are those of a table, or of a file of AIMET.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from passes.suggest import nearest
from passes.weights.detached import DetachedModel
from pipeline.config import AimetProfile, FormatsConfig, QuantSimConfig
from pipeline.config.paths import AIMET_CONFIGS, locate
from pipeline.config.quantsim import EVERYTHING, FLOAT, Precision
from pipeline.config.sections import Section
from pipeline.errors import SourceError, UsageError
from pipeline.quantsim.aimet_config import AimetConfig, read_aimet_config
from pipeline.quantsim.conventions import apply_conventions
from pipeline.quantsim.encodings_file import find_own_quantizers
from pipeline.quantsim.placement import PlacementRule, find_matches
from pipeline.quantsim.sites import Site, find_sites
from pipeline.quantsim.tool_rules import follow_quantize_static, follow_tensorrt


def _split(value: object) -> object:
    return value.split() if isinstance(value, str) else value


Words = Annotated[tuple[StrictStr, ...], BeforeValidator(_split)]


class OperatorGroup(Section):
    """Operators that a target takes alike; `domain::Name` outside of ONNX's own domain.

    dtypes: of the data that they read; none where a source does not say it.
    by: by which of several ways alone the target takes them; empty for all.
    """

    names: Words
    dtypes: Words = ()
    by: StrictStr = ""


class TargetPlacement(Section):
    """How a target quantizes: rules as a configuration has them, or the conventions of AIMET with numbers of bits.

    tool: the tool of the target whose choice of tensors is followed; all others stay in float.
    float_biases: whether biases stay in float.
    half_open: operators with a fixed range whose scale at 16 bits is that range over 2^16, as a kernel asks for it.
    """

    rules: dict[StrictStr, FormatsConfig] = Field(default_factory=dict)
    conventions: AimetConfig | None = None
    weight_bits: StrictInt = 8
    activation_bits: StrictInt = 16
    tool: Literal["quantize_static", "tensorrt"] | None = None
    float_biases: StrictBool = False
    half_open: Words = ()


class TargetSources(Section):
    """Where each part of a table comes from; "none" where no source was had."""

    operators: StrictStr
    opsets: StrictStr
    dtypes: StrictStr
    ranks: StrictStr
    dynamic_shapes: StrictStr
    placement: StrictStr


class TargetTable(Section):
    """One table.

    operators: those that are taken; every one where none are listed.
    ranks: operator → its greatest rank, where that is not `max_rank`.
    restrictions: operator → what a model has to see to besides it, which is named and not checked.
    weights, activations: patterns of the formats that it runs, without who shares a scale; none where no profile has
        this table.
    package: the Python package that is the target or reads ONNX for it, on which other operators are tried; empty for
        none.
    """

    title: StrictStr
    package: StrictStr = ""
    sources: TargetSources
    opsets: tuple[StrictInt, StrictInt]
    dynamic_shapes: StrictBool
    max_rank: StrictInt | None = None
    dtypes: Words = ()
    operators: tuple[OperatorGroup, ...] = ()
    ranks: dict[StrictStr, StrictInt] = Field(default_factory=dict)
    restrictions: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    weights: Words = ()
    activations: Words = ()
    placement: TargetPlacement

    def group_of(self, operator: str) -> OperatorGroup | None:
        """What is said of an operator; None for one that the target does not take."""
        if not self.operators:
            return OperatorGroup(names=(operator,))
        return next((group for group in self.operators if operator in group.names), None)

    def rank_of(self, operator: str) -> int | None:
        return self.ranks.get(operator, self.max_rank)

    def runs(self, precision: Precision, *, is_weight: bool) -> bool:
        """Whether it computes with weights or activations of this format."""
        name = str(precision if precision.scale_type else precision.per_tensor())
        return any(fnmatchcase(name, pattern) for pattern in (self.weights if is_weight else self.activations))


def load_target(name: str) -> TargetTable:
    """The table of a target.

    Raises:
        UsageError: there is none of that name; the message has the nearest.
    """
    if name not in TARGETS:
        raise UsageError(f"no target named {name!r}{nearest(name, TARGETS)}; expected one of {', '.join(TARGETS)}")
    return _read_table(name)


@cache
def _read_table(name: str) -> TargetTable:
    return TargetTable.model_validate(_read_data(name))


def _read_data(name: str) -> dict[str, Any]:
    """The table as it is written, on top of the table that it extends, if any: entry by entry of its sections."""
    data: dict[str, Any] = yaml.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), LOADER)
    base = data.pop("extends", None)
    if base is None:
        return data
    known = _read_data(base)
    sections = {key: {**known[key], **value} for key, value in data.items() if isinstance(value, dict)}
    return {**known, **data, **sections}


LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader in C, where PyYAML was built with it: ten times as fast."""

FOLDER: Final = Path(__file__).parent / "targets"

TARGETS: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
"""The names of all targets."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile as it was asked for. `name` is that of its target, or of the file; `target` may be unknown."""

    name: str
    placement: TargetPlacement
    target: TargetTable | None

    def rules(
        self,
        model: DetachedModel,
        given: Collection[str] = (),
        sites: Sequence[Site] = (),
        own: Sequence[PlacementRule] = (),
    ) -> tuple[tuple[PlacementRule, ...], tuple[str, ...]]:
        """The rules for a model, and sentences on what the profile says and onnxline does otherwise.

        Args:
            given: the tensors that a file has encodings of; that the target's tool would not round them says nothing.
            sites: what `find_sites` finds in `model`, where the caller has it.
            own: the rules of the configuration. The target's tool leaves out the nodes that they leave in float.
        """
        placement, sites = self.placement, sites or find_sites(model)
        rules = [
            PlacementRule(selector, formats.weight_format(), formats.activation_format())
            for selector, formats in placement.rules.items()
        ]
        notes: tuple[str, ...] = ()
        if placement.conventions is not None:
            found = apply_conventions(
                placement.conventions, placement.weight_bits, placement.activation_bits, model, sites
            )
            ends = {site.tensor for site in sites if site.op in placement.half_open and site.role == "activation"}
            rules += (replace(rule, half_open=(rule.tensors or frozenset()) & ends) for rule in found.rules)
            notes = found.notes
        if placement.tool is not None:
            chosen = TOOLS[placement.tool](model, sites, _find_float_nodes(own, sites, model))
            rules += (replace(rule, tensors=(rule.tensors or frozenset()).difference(given)) for rule in chosen)
        if placement.float_biases:
            rules += _keep_biases(sites, self.name)
        return tuple(rules), tuple(f"{self.name}: {note}" for note in notes)

    def find_asymmetric(self, model: DetachedModel, sites: Sequence[Site]) -> frozenset[str]:
        """The tensors whose quantizer is asymmetric in AIMET whatever they share; none where the profile is not its."""
        conventions = self.placement.conventions
        if conventions is None or conventions.defaults.ops.is_symmetric:
            return frozenset()
        return find_own_quantizers(model, sites)


TOOLS: Final = {"quantize_static": follow_quantize_static, "tensorrt": follow_tensorrt}


def read_profile(config: QuantSimConfig) -> Profile:
    """The profile that a configuration names.

    Raises:
        ConfigError: it is a file that AIMET's configurations do not look like.
        SourceError: there is no such file.
    """
    profile = config.profile
    if isinstance(profile, AimetProfile):
        path = _locate_config(profile.aimet_config)
        placement = TargetPlacement(
            conventions=read_aimet_config(path),
            weight_bits=profile.weight_bits,
            activation_bits=profile.activation_bits,
        )
        return Profile(path.name, placement, load_target(profile.target) if profile.target else None)
    target = load_target(profile)
    return Profile(profile, target.placement, target)


def _locate_config(text: str) -> Path:
    """The file of a configuration of AIMET; where it is missing, the message has AIMET's own names too."""
    try:
        return locate(text)
    except SourceError as error:
        error.add_note(
            f"AIMET's own configurations are named {', '.join(AIMET_CONFIGS)}{nearest(Path(text).name, AIMET_CONFIGS)}"
        )
        raise


def rules_of(config: QuantSimConfig, model: DetachedModel) -> tuple[PlacementRule, ...]:
    """The rules of the profile for a model, and then those of the configuration."""
    own = own_rules(config)
    return (*read_profile(config).rules(model, own=own)[0], *own)


def own_rules(config: QuantSimConfig) -> tuple[PlacementRule, ...]:
    """The rules of the configuration itself."""
    return tuple(
        PlacementRule(name, formats.weight_format(), formats.activation_format())
        for name, formats in config.rules.items()
    )


def formats_of(config: QuantSimConfig) -> list[Precision]:
    """The formats that the profile and the rules of a configuration can give to a tensor, before a model is known.

    A rule for every operator replaces the formats of the rules before it.
    """
    placement = read_profile(config).placement
    weights, activations = [Precision(8, signed=True, symmetric=True)], [Precision(8, signed=False, symmetric=False)]
    if placement.conventions is not None:
        weights = [Precision(placement.weight_bits, signed=True, symmetric=True, granularity="channel")]
        activations = [Precision(placement.activation_bits, signed=False, symmetric=False)]
    for selector, rule in (*placement.rules.items(), *config.rules.items()):
        for formats, precision in ((weights, rule.weight_format()), (activations, rule.activation_format())):
            if precision is not None and selector == EVERYTHING:
                formats.clear()
            if isinstance(precision, Precision):
                formats.append(precision)
    return weights + activations


def _find_float_nodes(rules: Iterable[PlacementRule], sites: Iterable[Site], model: DetachedModel) -> frozenset[str]:
    """The names of the nodes whose weights and results the rules of a configuration leave in float."""
    is_left: dict[str, bool] = {}
    for rule in rules:
        if rule.selector.startswith(("op:", "node:", "module:")):
            matched = find_matches(rule, sites, model)
            names = [site.node for site in sites if site.role == "activation" and site.tensor in matched]
            is_left |= dict.fromkeys(names, rule.weights == FLOAT == rule.activations)
    return frozenset(name for name, left in is_left.items() if left)


def _keep_biases(sites: Sequence[Site], name: str) -> Iterator[PlacementRule]:
    biases = frozenset(site.tensor for site in sites if site.role == "bias")
    if biases:
        yield PlacementRule(BIASES, FLOAT, FLOAT, biases, reason=f"{name} takes biases in float alone")


BIASES: Final = "biases"
"""What the report calls the rule of biases."""
