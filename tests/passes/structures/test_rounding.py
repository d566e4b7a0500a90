"""Sums know a matrix again that was transposed or rounded, and no other one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from passes.structures.types import sums_of

MATRIX = np.random.default_rng(0).standard_normal((24, 16))

SAME: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda matrix: matrix.T,
    "rounded to float32": lambda matrix: matrix.astype(np.float32),
    "rounded to float16, transposed": lambda matrix: matrix.astype(np.float16).T,
    "computed in another order": lambda matrix: (matrix * 3).astype(np.float32) / np.float32(3),
}


@pytest.mark.parametrize("change", SAME)
def test_the_same_matrix(change: str) -> None:
    assert sums_of(SAME[change](MATRIX)).is_close(sums_of(MATRIX.astype(np.float32)))
    assert sums_of(MATRIX.astype(np.float32)).is_close(sums_of(SAME[change](MATRIX)))


OTHERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "scaled": lambda matrix: 1.01 * matrix,
    "negated": lambda matrix: -matrix,
    "rows exchanged": lambda matrix: matrix[::-1],
    "one number changed": lambda matrix: matrix + 0.1 * (np.arange(matrix.size) == 7).reshape(matrix.shape),
    "cut": lambda matrix: matrix[:-1],
    "of another shape": lambda matrix: matrix.reshape(16, 24),
    "zeros": np.zeros_like,
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_matrix(change: str) -> None:
    assert not sums_of(OTHERS[change](MATRIX).astype(np.float32)).is_close(sums_of(MATRIX.astype(np.float32)))


def test_a_stack_is_its_matrices_side_by_side() -> None:
    stack = MATRIX.reshape(24, 4, 4)
    assert sums_of(stack).is_close(sums_of(MATRIX))
