"""What we set in the configuration of a `transformers` model where its user left it open, since the model exports so.

An entry of the table is set on the configuration before the model is made. A release of transformers that has no such
attribute is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

__all__ = [
    "CONFIG_DEFAULTS",
    "ConfigDefault",
    "is_switchable_experts",
    "notes_on_defaults",
    "set_defaults",
    "sub_configs",
]


@dataclass(frozen=True, slots=True)
class ConfigDefault:
    """`key: value` of `model.transformers.config`. transformers holds it in `attribute`, None where it is open."""

    key: str
    attribute: str
    value: str
    concerns: Callable[[nn.Module], bool]
    """Whether a module computes otherwise because of it: without one, there is nothing to say."""
    reason: str


def set_defaults(config: Any) -> tuple[ConfigDefault, ...]:
    """Set every entry that `config` leaves open, in its sub-configurations too; those that were set come back."""
    return tuple(default for default in CONFIG_DEFAULTS if _set_where_open(config, default))


def notes_on_defaults(module: nn.Module, defaults: tuple[ConfigDefault, ...]) -> tuple[str, ...]:
    """A sentence for the report on each of `defaults` that changes how `module` computes."""
    return tuple(
        f"model.transformers.config: {default.key} was not given and is set to {default.value}, {default.reason}"
        for default in defaults
        if any(default.concerns(child) for child in module.modules())
    )


def is_switchable_experts(module: nn.Module) -> bool:
    """Whether `module` is a mixture of experts whose way of computing transformers' configuration chooses."""
    return hasattr(module, "is_transposed") and hasattr(getattr(module, "config", None), "_experts_implementation")


def _set_where_open(config: Any, default: ConfigDefault) -> bool:
    """transformers' setter overwrites all sub-configurations: what the user set there is set again, from outside in."""
    if getattr(config, default.attribute, "absent") is not None:
        return False
    held = [(part, getattr(part, default.attribute, None)) for part in sub_configs(config)]
    setattr(config, default.attribute, default.value)
    for part, value in held:
        if value is not None:
            setattr(part, default.attribute, value)
    return True


def sub_configs(config: Any) -> Iterator[Any]:
    """The configurations inside of `config`, at any depth: of its text, of its vision tower."""
    for key in getattr(config, "sub_configs", {}):
        part = getattr(config, key, None)
        if part is not None:
            yield part
            yield from sub_configs(part)


CONFIG_DEFAULTS: Final = (
    ConfigDefault(
        key="experts_implementation",
        attribute="_experts_implementation",
        value="batched_mm",
        concerns=is_switchable_experts,
        reason=(
            "which has the same sizes whichever experts the tokens go to; it gathers the weights of an expert for each "
            "token that goes there, so for long inputs set grouped_mm, which multiplies once for each expert and whose "
            "sizes depend on the values"
        ),
    ),
)
