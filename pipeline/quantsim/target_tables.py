"""What each target takes and how it is quantized, from one table for each: targets/NAME.yaml, with its sources.

A table may extend another one, and then says what differs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from passes.suggest import nearest
from pipeline.config import FormatsConfig
from pipeline.config.sections import Section
from pipeline.errors import UsageError
from pipeline.quantsim.aimet_config import AimetConfig


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

    float_biases: whether biases stay in float.
    """

    rules: dict[StrictStr, FormatsConfig] = Field(default_factory=dict)
    conventions: AimetConfig | None = None
    weight_bits: StrictInt = 8
    activation_bits: StrictInt = 16
    float_biases: StrictBool = False


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
    restrictions: operator → what a model has to see to beside it, which is named and not checked.
    """

    title: StrictStr
    sources: TargetSources
    opsets: tuple[StrictInt, StrictInt]
    dynamic_shapes: StrictBool
    max_rank: StrictInt | None = None
    dtypes: Words = ()
    operators: tuple[OperatorGroup, ...] = ()
    ranks: dict[StrictStr, StrictInt] = Field(default_factory=dict)
    restrictions: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    placement: TargetPlacement

    def group_of(self, operator: str) -> OperatorGroup | None:
        """What is said of an operator; None for one that the target does not take."""
        if not self.operators:
            return OperatorGroup(names=(operator,))
        return next((group for group in self.operators if operator in group.names), None)

    def rank_of(self, operator: str) -> int | None:
        return self.ranks.get(operator, self.max_rank)


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
    """The table as it is written, over the one that it extends, if any: entry by entry of its sections."""
    data: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    base = data.pop("extends", None)
    if base is None:
        return data
    known = _read_data(base)
    sections = {key: {**known[key], **value} for key, value in data.items() if isinstance(value, dict)}
    return {**known, **data, **sections}


FOLDER: Final = Path(__file__).parent / "targets"

TARGETS: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
"""The names of all targets."""
