"""Comparison: what counts as equal, by dtype."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from passes.numbers import TOLERANCES, Tolerance, compare

NAN, INF = np.nan, np.inf


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("expected", "got", "ok"),
    [
        (f32(1, 2), f32(1, 2), True),
        (f32(1, 2), f32(1, 2.0001), True),
        (f32(1, 2), f32(1, 2.001), False),
        (f32(0, 0), f32(0, 1e-6), True),
        (f32(0, 1000), f32(0.05, 1000), True),  # small against the tensor's own scale
        (f32(1, NAN), f32(1, NAN), True),
        (f32(1, 2), f32(1, NAN), False),
        (f32(1, INF), f32(1, INF), True),
        (f32(1, INF), f32(1, -INF), False),
        (f32(1, 2), f32(1, 2).reshape(1, 2), False),
        (f32(1, 2), f32(1, 2).astype(np.float64), False),
        (np.array([1, 2]), np.array([1, 3]), False),
        (np.array([True]), np.array([True]), True),
        (np.array([1, 2], ml_dtypes.bfloat16), np.array([1, 2.015625], ml_dtypes.bfloat16), True),
        (np.array(["a"], object), np.array(["b"], object), False),
        (f32(), f32(), True),
    ],
)
def test_within_tolerance(expected: np.ndarray, got: np.ndarray, ok: bool) -> None:
    assert compare(expected, got).ok is ok


def test_the_four_numbers() -> None:
    errors = compare(f32(3, 4), f32(3, 4.5))
    assert errors.max_abs == 0.5
    assert errors.max_rel == 0.125
    assert math.isclose(errors.cosine, (9 + 18) / (5 * math.sqrt(9 + 20.25)))
    assert math.isclose(errors.sqnr_db, 20.0)
    assert errors.why == "max abs error 0.5 is over 0.00041"


def test_equal_tensors_have_infinite_sqnr() -> None:
    assert compare(f32(1), f32(1)).sqnr_db == math.inf


def test_a_tolerance_can_be_given() -> None:
    assert compare(f32(1), f32(1.5), {"float32": Tolerance(1, 0)}).ok


def test_every_float_dtype_has_a_tolerance_and_they_widen_as_bits_go() -> None:
    order = ["float64", "float32", "float16", "bfloat16"]
    limits = [TOLERANCES[dtype].rtol for dtype in order]
    assert limits == sorted(limits)
