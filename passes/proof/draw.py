"""Seeded inputs: the same words and the same shape give the same numbers on every machine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Final

import ml_dtypes
import numpy as np

from passes.load import check_drawn

__all__ = ["draw_array", "dtype_named"]

BLOCK: Final = 2**24 + 43
"""Elements that are drawn one by one; a larger array repeats them. To draw 2²⁷ takes seconds, and to copy them a
tenth of one. The number is prime, so that no two rows of an array are alike."""


def draw_array(identity: str, shape: Sequence[int], dtype: str, low: float, high: float) -> np.ndarray:
    """An array of a dtype by its numpy name (or `bfloat16`), drawn by `identity` alone.

    Floats are uniform in [low, high]; whole numbers and bools go from low up to, and without, high; where low equals
    high every element is low.

    Raises:
        ModelError: more elements than are drawn in reasonable time and memory.
    """
    check_drawn(identity.rpartition(":")[2], shape)
    words = np.frombuffer(hashlib.sha256(identity.encode()).digest(), np.uint32)
    generator = np.random.default_rng(np.random.SeedSequence(words.tolist()))
    size = math.prod(shape)
    block = _draw_block(generator, min(size, BLOCK), dtype, low, high).astype(dtype_named(dtype))
    return np.resize(block, tuple(shape)) if size > BLOCK else block.reshape(shape)


def _draw_block(generator: np.random.Generator, count: int, dtype: str, low: float, high: float) -> np.ndarray:
    if "float" in dtype:
        return generator.uniform(low, high, count)
    first, end = int(low), int(high)
    return generator.integers(first, end, count) if first < end else np.full(count, first, np.int64)


def dtype_named(name: str) -> np.dtype:
    """numpy's dtype; bfloat16 comes from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
