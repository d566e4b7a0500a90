"""Seeded inputs for a model: the same seed gives the same numbers on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import ml_dtypes
import numpy as np

__all__ = ["draw_array"]


def draw_array(
    name: str, shape: Sequence[int], dtype: str, seed: int, limits: tuple[float, float] | None = None
) -> np.ndarray:
    """An array for the input `name`: floats uniform in `limits` (default -1..1), integers from `limits` with the upper
    one excluded (default 0..2), booleans by a fair coin. `dtype` is a numpy name, or `bfloat16`.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    random = np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if kind == np.bool_:
        return random.integers(0, 2, shape).astype(np.bool_)
    if kind.kind in "iu":
        low, high = limits or (0, 2)
        return random.integers(int(low), int(high), shape).astype(kind)
    low, high = limits or (-1.0, 1.0)
    return random.uniform(low, high, shape).astype(kind)
