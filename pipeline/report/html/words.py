"""Format numbers for the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from passes.proof.numbers import Errors

__all__ = ["bytes_text", "error_text", "seconds_text", "worst_of"]

STEPS: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def bytes_text(count: int) -> str:
    """`329.1 MiB`."""
    for size, unit in STEPS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def error_text(errors: Errors) -> str:
    """The largest absolute error; `0` for equal tensors."""
    return f"{errors.max_abs:.1e}" if errors.max_abs else "0"


def worst_of(many: Iterable[Mapping[str, Errors]]) -> tuple[str, Errors] | None:
    """The output nearest to its limit, or farthest over it, with its errors; None if there is none."""
    pairs = [pair for errors in many for pair in errors.items()]
    return max(pairs, key=lambda pair: (not pair[1].ok, pair[1].excess, pair[1].max_abs), default=None)
