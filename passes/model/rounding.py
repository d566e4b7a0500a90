"""Sums that identify a matrix up to rounding and transposition."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class Sums:
    """`size` numbers with this `norm`; `weighed` are sums of all of them with random factors, relative to the norm.

    `unit` is the rounding of their type. Matrices that are not equal have sums about 1 apart.
    """

    size: int
    norm: float
    weighed: tuple[float, ...]
    unit: float

    def is_close(self, other: Sums) -> bool:
        """Whether both may be the same matrix, rounded differently."""
        room = ROUNDINGS * max(self.unit, other.unit)
        return (
            self.size == other.size
            and abs(self.norm - other.norm) <= room * self.norm
            and bool(np.allclose(self.weighed, other.weighed, rtol=0, atol=room))
        )


def sums_of(array: np.ndarray) -> Sums:
    """The sums of a matrix; a stack counts as its matrices joined."""
    rows = array.reshape(array.shape[0] if array.ndim else 1, -1).astype(np.float64)
    norm = float(np.linalg.norm(rows))
    weighed: list[float] = []
    for ones, others in pairwise(np.random.default_rng(0).integers(0, 2**31, FACTORS)):
        left, right = (_factors(seed, rows.shape[0]) for seed in (ones, others))
        above, below = (_factors(seed, rows.shape[1]) for seed in (ones, others))
        # Sorted, since the transposed matrix has the two in the other order.
        weighed += sorted((float(left @ rows @ below), float(right @ rows @ above)))
    unit = float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else UNIT
    return Sums(array.size, norm, tuple(value / norm if norm else 0.0 for value in weighed), unit)


def _factors(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng([int(seed), count]).standard_normal(count)


FACTORS: Final = 4

ROUNDINGS: Final = 64
"""Units of rounding by which sums over a row may differ, such as those of weight norm."""

UNIT: Final = float(np.finfo(np.float32).eps)
"""The rounding for types that are not floats."""
