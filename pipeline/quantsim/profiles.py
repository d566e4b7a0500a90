"""Rules of targets: what they quantize by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pipeline.config import FormatsConfig, QuantSimConfig
from pipeline.quantsim.placement import PlacementRule

__all__ = ["PROFILES", "rules_of"]


def rules_of(config: QuantSimConfig) -> tuple[PlacementRule, ...]:
    """The rules of the profile, and then those of the configuration."""
    entries = (*PROFILES[config.profile].items(), *config.rules.items())
    return tuple(PlacementRule(name, one.weight_format(), one.activation_format()) for name, one in entries)


PROFILES: Final[Mapping[str, Mapping[str, FormatsConfig]]] = {
    "ort-cpu": {"op:*": FormatsConfig(weights="int8/channel", activations="uint8")},
    "qnn-htp": {"op:*": FormatsConfig(weights="int8/channel", activations="uint16")},
    "tensorrt": {"op:*": FormatsConfig(weights="int8/channel", activations="int8")},
    "weight-only": {"op:*": FormatsConfig(weights="int4/block32", activations="float")},
}
"""Profile → selector → formats, in order. onnxruntime's kernels for the CPU take uint8 activations; the Hexagon
processor 16 bits of activations beside 8 of weights; TensorRT symmetric int8; and weights alone are read from memory in
4 bits and multiplied in float."""
