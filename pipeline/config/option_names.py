"""What messages call the options that their reader can set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class OptionNames:
    """The words of messages for what their reader can set: by default keys of a configuration.

    data, encodings, rules: the options of a simulation.
    in_float: leaves a selector, {0}, in float; {1} is weights or activations.
    step: makes {} a step of the preparation.
    numbers: gives the inputs {} other values.
    sizes: gives open dims other sizes; {} are the keys that do so.
    """

    data: str = "quantsim.calibration.data"
    encodings: str = "quantsim.encodings_from"
    rules: str = "quantsim.rules"
    in_float: str = "quantsim.rules, {}: {{{}: float}}"
    step: str = "put {} into quantsim.prepare"
    numbers: str = "say by model.inputs.NAME.range which numbers the inputs may hold ({})"
    sizes: str = "set {} to sizes that fit"


KEYS: Final = OptionNames()
