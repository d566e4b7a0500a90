"""Run two models on the same inputs, and compare their values. In the proof worker."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from passes.errors import StepFailed
from passes.proof.numbers import DRAWN, Errors, compare
from passes.proof.precision import Precisions
from passes.weights.sharing import MappedModel

__all__ = ["Distance", "Pair", "distances"]

Pair = tuple[str, str]
"""The name of a value in the first model, and in the second."""

Distance = tuple[str, Errors]
"""The element type of the first of two values, and how far the second is from it."""


def distances(
    before: MappedModel,
    after: MappedModel,
    pairs: Sequence[Pair],
    draws: Sequence[Mapping[str, np.ndarray]],
    computed_in: Precisions,
    may_collapse: bool,
) -> list[list[Distance | None] | str]:
    """For each draw how far the second value of each pair is from the first, None for what is no tensor, or random; or
    why the second model does not run on it.

    Values are judged by the types that the first model computes them in.

    Args:
        may_collapse: take values as equal in shape if one has neighbouring dims of the other as one: 16×32 for 2×8×32.

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
        values = ((one, old[one], new[other]) for one, other in pairs)
        if may_collapse:
            values = ((name, one, other.reshape(_expanded(other.shape, one.shape))) for name, one, other in values)
        found.append([_compared(one, other, computed_in.get(name)) for name, one, other in values])
    return found


def _expanded(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """`wanted`, if it differs from `shape` in neighbouring dims that are one in either of them; else `shape`."""
    ends, wanted_ends = (set(accumulate(dims, operator.mul)) for dims in (shape, wanted))
    is_alike = math.prod(shape) == math.prod(wanted) and (ends <= wanted_ends or wanted_ends <= ends)
    return wanted if is_alike else shape


def _compared(before: np.ndarray, after: np.ndarray, computed_in: str | None) -> Distance | None:
    if computed_in == DRAWN:
        return None
    is_text = all(isinstance(one, str) for array in (before, after) for one in array.ravel())
    if object in (before.dtype, after.dtype) and not is_text:
        return None
    return str(before.dtype), compare(before, after, computed_in=computed_in)
