"""What a proof is made from, and what it says: data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from passes.proof.draws import Draw
from passes.proof.gauges import Readings
from passes.proof.numbers import Errors

__all__ = ["BaselineRun", "DrawErrors", "Measurement", "Reference", "RunRequest", "Sensitivity", "worst_errors"]


@dataclass(frozen=True, slots=True)
class Reference:
    """One draw: input arrays by name, and the outputs that the reference program computed from them."""

    feeds: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    label: str = ""
    draw: Draw | None = None
    """How the inputs were drawn; None where somebody gave them."""
    is_optional: bool = False
    """Whether nobody asked for this draw, so that an export may leave it out."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The worst errors over all draws, for each output and for each value at a kept structure."""

    errors: Mapping[str, Errors]
    inner: Mapping[str, Errors]
    tables: str = ""
    """What is wrong with rows that no draw reads."""

    @property
    def why(self) -> str:
        """What is over tolerance, or wrong where nothing is drawn; empty when all is well."""
        if self.tables:
            return self.tables
        bad = [f"{name}: {errors.why}" for name, errors in {**self.errors, **self.inner}.items() if not errors.ok]
        return "; ".join(bad[:3]) + (f" (and {len(bad) - 3} more)" if len(bad) > 3 else "")

    @property
    def max_abs(self) -> float:
        return max((errors.max_abs for errors in self.errors.values()), default=0.0)


DrawErrors = tuple[dict[str, Errors], dict[str, Errors]]
"""On one draw the errors of the outputs, and those of inner values."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What to compare and to keep of a run, beside the outputs."""

    inner: Sequence[str]
    """Values at kept structures, to compare."""
    keep: Mapping[str, str] = field(default_factory=dict)
    """Value → meaning, of those to hold for later proofs."""
    as_expected: bool = False
    """Whether the values called `inner` are from now on what is expected of those names."""
    is_reference: bool = False
    """Whether the outputs are."""

    @property
    def values(self) -> list[str]:
        """All values to return."""
        return list(dict.fromkeys((*self.inner, *self.keep)))


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """What is found out in a run of the exported model; data only."""

    draws: Sequence[DrawErrors]
    held: frozenset[str]
    nan_outputs: Sequence[str]
    """Those of the reference, with which nothing can be compared."""
    readings: Readings
    drawn: Sequence[Draw] = ()
    """Where the draws were chosen in this run: those that were taken."""
    skipped: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Whether a fault in a kept weight would be seen.

    `margin` is the smallest ratio, over all kept weights, of the error that zeroing it causes to the tolerance there;
    `blind` names the structures where it is below 1.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_inf_nan": "strings"}
    """JSON has no infinity; whoever writes these numbers with pydantic writes the word."""

    margin: float
    blind: tuple[str, ...]


def worst_errors(draws: Sequence[Mapping[str, Errors]]) -> dict[str, Errors]:
    """The worst of each number over several draws, by output; the first complaint stays."""
    worst: dict[str, Errors] = {}
    for errors in draws:
        for name, one in errors.items():
            known = worst.get(name, one)
            worst[name] = Errors(
                max(known.max_abs, one.max_abs),
                max(known.max_rel, one.max_rel),
                min(known.cosine, one.cosine),
                min(known.sqnr_db, one.sqnr_db),
                one.limit if one.excess > known.excess else known.limit,
                max(known.excess, one.excess),
                known.why or one.why,
                known.judged_as or one.judged_as,
            )
    return worst
