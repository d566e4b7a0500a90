"""The configuration's tolerances, in the words of the comparison."""

from __future__ import annotations

from passes.proof.numbers import Tolerance
from pipeline.config import RunConfig

__all__ = ["tolerances_of"]


def tolerances_of(config: RunConfig) -> dict[str, Tolerance]:
    """By dtype, those that `verify.tolerances` says otherwise than the documented ones."""
    return {dtype: Tolerance(one.atol, one.rtol) for dtype, one in config.verify.tolerances.items()}
