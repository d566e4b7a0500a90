"""Seeded inputs: the same words and the same shape give the same numbers on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from passes.load import check_drawn

__all__ = ["draw_array", "dtype_named"]


def draw_array(identity: str, shape: Sequence[int], dtype: str, low: float, high: float) -> np.ndarray:
    """An array of a dtype by its numpy name (or `bfloat16`), drawn by `identity` alone.

    Floats are uniform in [low, high]; whole numbers and bools go from low up to, and without, high; where low equals
    high every element is low.

    Raises:
        ModelMistake: more elements than are drawn in reasonable time and memory.
    """
    check_drawn(identity.rpartition(":")[2], shape)
    words = np.frombuffer(hashlib.sha256(identity.encode()).digest(), np.uint32)
    generator = np.random.default_rng(np.random.SeedSequence(words.tolist()))
    if "float" in dtype:
        return generator.uniform(low, high, shape).astype(dtype_named(dtype))
    first, end = int(low), int(high)
    whole = generator.integers(first, end, shape) if first < end else np.full(shape, first, np.int64)
    return whole.astype(dtype_named(dtype))


def dtype_named(name: str) -> np.dtype:
    """numpy's dtype; bfloat16 comes from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
