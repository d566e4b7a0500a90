"""Run two models on the same inputs, and compare their values. In the proof worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from passes.errors import StepFailed
from passes.model.sharing import Portable
from passes.proof.numbers import DRAWN, Errors, compare
from passes.proof.precision import Precisions

__all__ = ["Distance", "Pair", "distances"]

Pair = tuple[str, str]
"""The name of a value in the first model, and in the second."""

Distance = tuple[str, Errors]
"""The element type of the first of two values, and how far the second is from it."""


def distances(
    before: Portable,
    after: Portable,
    pairs: Sequence[Pair],
    draws: Sequence[Mapping[str, np.ndarray]],
    computed_in: Precisions,
) -> list[list[Distance | None] | str]:
    """For each draw how far the second value of each pair is from the first, None for what is no tensor, or random; or
    why the second model does not run on it.

    Values are judged by the types that the first model computes them in.

    Raises:
        StepFailed: onnxruntime refuses one of the models, or stops on the first.
    """
    sessions = [
        model.session(list(dict.fromkeys(names)))
        for model, names in zip((before, after), zip(*pairs, strict=True), strict=True)
    ]
    found: list[list[Distance | None] | str] = []
    for feeds in draws:
        old = sessions[0].run(feeds)
        try:
            new = sessions[1].run(feeds)
        except StepFailed as failure:
            found.append(" ".join(str(failure).split()))
            continue
        found.append([_compared(old[one], new[other], computed_in.get(one)) for one, other in pairs])
    return found


def _compared(before: np.ndarray, after: np.ndarray, computed_in: str | None) -> Distance | None:
    if computed_in == DRAWN:
        return None
    is_text = all(isinstance(one, str) for array in (before, after) for one in array.ravel())
    if object in (before.dtype, after.dtype) and not is_text:
        return None
    return str(before.dtype), compare(before, after, computed_in=computed_in)
