"""The rules of a profile, which come before those of the configuration: of a target's table, or of a file of AIMET."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from passes.suggest import nearest
from passes.weights.detached import DetachedModel
from pipeline.config import AimetProfile, QuantSimConfig
from pipeline.config.paths import AIMET_CONFIGS, locate
from pipeline.config.precision import FLOAT, Precision
from pipeline.errors import SourceError
from pipeline.quantsim.aimet_config import read_aimet_config
from pipeline.quantsim.conventions import apply_conventions
from pipeline.quantsim.placement import PlacementRule
from pipeline.quantsim.sites import Site, find_sites
from pipeline.quantsim.target_tables import TargetPlacement, TargetTable, load_target


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile as it was asked for. `name` is that of its target, or of the file; `target` may be unknown."""

    name: str
    placement: TargetPlacement
    target: TargetTable | None

    def rules(self, model: DetachedModel) -> tuple[tuple[PlacementRule, ...], tuple[str, ...]]:
        """The rules for a model, and sentences on what the profile says and onnxline does otherwise."""
        placement, sites = self.placement, find_sites(model)
        rules = [
            PlacementRule(selector, formats.weight_format(), formats.activation_format())
            for selector, formats in placement.rules.items()
        ]
        notes: tuple[str, ...] = ()
        if placement.conventions is not None:
            found = apply_conventions(
                placement.conventions, placement.weight_bits, placement.activation_bits, model, sites
            )
            rules += found.rules
            notes = found.notes
        if placement.float_biases:
            rules += _keep_biases(sites, self.name)
        return tuple(rules), tuple(f"quantsim: {self.name}: {note}" for note in notes)


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
    return (*read_profile(config).rules(model)[0], *own_rules(config))


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
            if precision is not None and selector == "op:*":
                formats.clear()
            if isinstance(precision, Precision):
                formats.append(precision)
    return weights + activations


def _keep_biases(sites: Sequence[Site], name: str) -> Iterator[PlacementRule]:
    biases = frozenset(site.tensor for site in sites if site.role == "bias")
    if biases:
        yield PlacementRule(BIASES, FLOAT, FLOAT, biases, reason=f"{name} takes biases in float alone")


BIASES: Final = "biases"
"""What the report calls the rule of biases."""
