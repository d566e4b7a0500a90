"""Comparison: what counts as equal, by dtype."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from passes.proof.numbers import TOLERANCES, Tolerance, compare

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


def with_fill(scale: float, fill: float) -> np.ndarray:
    values = (np.random.default_rng(0).standard_normal((64, 64)) * scale).astype(np.float32)
    values[:, 40:] = fill
    return values


@pytest.mark.parametrize("fill", [np.finfo(np.float32).min, -1e9, -1e5])
def test_a_mask_does_not_hide_an_error_in_what_it_leaves(fill: float) -> None:
    expected = with_fill(1.0, fill)
    got = expected.copy()
    got[:, :40] = 0.0
    errors = compare(expected, got)
    assert errors.why
    assert errors.excess > 1000
    assert errors.sqnr_db < 15
    assert compare(expected, expected * np.float32(1 - 1e-6)).ok


def test_a_few_values_near_zero_do_not_make_a_group_of_their_own() -> None:
    """The least of many values may be 1,000 times below the next by chance; its error is that of the whole tensor."""
    expected = np.linspace(50, 100, 1000).astype(np.float32)
    expected[:3] = [1e-6, 1e-2, 0.0]
    assert compare(expected, expected + np.float32(3e-3)).ok


def test_integers_are_not_rounded_to_floats() -> None:
    errors = compare(np.array([2**53], np.int64), np.array([2**53 + 1], np.int64))
    assert errors.why == "1 of 1 elements differ, and int64 has to be equal"


@pytest.mark.parametrize(("expected", "got"), [(1.7e308, -1.7e308), (0.0, 1e300), (1e-200, 1e200), (1e-300, 1e10)])
def test_errors_beyond_float64_are_measured_without_a_warning(expected: float, got: float) -> None:
    errors = compare(np.array([expected, 1e-9]), np.array([got, 1e-9]))
    assert not errors.ok
    assert errors.max_abs == abs(expected - got)
    assert not math.isnan(errors.cosine)
    assert not math.isnan(errors.sqnr_db)
