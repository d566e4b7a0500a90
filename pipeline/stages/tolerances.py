"""The configuration's tolerances, in the words of the comparison."""

from __future__ import annotations

from passes.proof.numbers import TOLERANCES, Tolerance
from pipeline.config import RunConfig

__all__ = ["tolerances_of"]


def tolerances_of(config: RunConfig) -> dict[str, Tolerance]:
    """By dtype: the documented ones, where `verify.tolerances` does not say otherwise."""
    own = {dtype: Tolerance(one.atol, one.rtol) for dtype, one in config.verify.tolerances.items()}
    return {**TOLERANCES, **own}
