"""Numbers as the page shows them: seconds, errors, and the output with the greatest error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from passes.proof.numbers import Errors, only_compared


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def error_text(errors: Errors) -> str:
    """The largest absolute error; `0` for equal tensors."""
    return f"{errors.max_abs:.1e}" if errors.max_abs else "0"


def worst_of(many: Iterable[Mapping[str, Errors]]) -> tuple[str, Errors] | None:
    """The output nearest to its limit, or farthest over it, with its errors; None if there is none."""
    pairs = [pair for errors in many for pair in only_compared(errors).items()]
    return max(pairs, key=lambda pair: (not pair[1].ok, pair[1].excess, pair[1].max_abs), default=None)
