"""Run two models on the same inputs, and compare their values. In the proof worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from passes.model.sharing import Portable
from passes.proof.numbers import DRAWN, Errors, compare
from passes.proof.precision import Precisions

__all__ = ["Pair", "distances"]

Pair = tuple[str, str]
"""The name of a value in the first model, and in the second."""


def distances(
    before: Portable,
    after: Portable,
    pairs: Sequence[Pair],
    feeds: Mapping[str, np.ndarray],
    computed_in: Precisions,
) -> list[Errors | None]:
    """How far the second value of each pair is from the first; None for what is no tensor, or random.

    Values are judged by the types that the first model computes them in.

    Raises:
        StepFailed: onnxruntime refuses one of the models, or stops.
    """
    old = before.session(list(dict.fromkeys(name for name, _ in pairs))).run(feeds)
    new = after.session(list(dict.fromkeys(name for _, name in pairs))).run(feeds)
    return [_compared(old[one], new[other], computed_in.get(one)) for one, other in pairs]


def _compared(before: np.ndarray, after: np.ndarray, computed_in: str | None) -> Errors | None:
    if computed_in == DRAWN:
        return None
    is_text = all(isinstance(one, str) for array in (before, after) for one in array.ravel())
    if object in (before.dtype, after.dtype) and not is_text:
        return None
    return compare(before, after, computed_in=computed_in)
