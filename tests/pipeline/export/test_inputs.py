"""Draws: seeded, in range, of every dtype."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from passes.proof.draws import dtype_named
from pipeline.config import DTYPES, InputConfig
from pipeline.errors import SourceError
from pipeline.export import InputSpec, draw_inputs
from pipeline.export.source import input_spec, named_dims

X = InputSpec("x", ("batch", 8), "float32", -1.0, 1.0)


def test_a_draw_depends_on_seed_and_name_and_on_nothing_else() -> None:
    sizes = {"batch": 2}
    first = draw_inputs([X], sizes, 0)["x"]
    beside_another = draw_inputs([replace(X, name="y"), X], sizes, 0)
    np.testing.assert_array_equal(first, beside_another["x"])
    assert not np.array_equal(first, beside_another["y"])
    assert not np.array_equal(first, draw_inputs([X], sizes, 1)["x"])
    assert not np.array_equal(first, draw_inputs([replace(X, seed=5)], sizes, 0)["x"])


def test_the_numbers_are_the_same_on_every_machine() -> None:
    drawn = draw_inputs([InputSpec("ids", (4,), "int64", 0, 1000)], {}, 0)["ids"]
    assert drawn.tolist() == IDS


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_drawn_in_its_range(dtype: str) -> None:
    spec = input_spec("x", InputConfig(), (200,), dtype)
    drawn = draw_inputs([spec], {}, 3)["x"]
    assert drawn.dtype == dtype_named(dtype)
    values = drawn.astype(np.float64)
    if "float" in dtype:
        assert values.min() < -0.5
        assert values.max() > 0.5
        assert np.abs(values).max() <= 1.0
    else:
        assert sorted(set(values)) == [0.0, 1.0]


def test_bfloat16_is_ml_dtypes() -> None:
    assert draw_inputs([replace(X, dtype="bfloat16")], {"batch": 1}, 0)["x"].dtype == ml_dtypes.bfloat16


def test_whole_numbers_stop_before_the_upper_end() -> None:
    spec = input_spec("x", InputConfig(range=(3, 5)), (500,), "int32")
    assert set(draw_inputs([spec], {}, 0)["x"].tolist()) == {3, 4}
    constant = input_spec("x", InputConfig(range=(7, 7)), (3,), "int32")
    assert draw_inputs([constant], {}, 0)["x"].tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("dtype", "bounds", "message"),
    [
        ("int64", (0.5, 2.0), "input 'x': range [0.5, 2] for int64, expected integers"),
        ("uint8", (0.0, 300.0), "input 'x': range [0, 300] leaves uint8, which holds 0 to 255"),
        ("float16", (0.0, 1e6), "input 'x': range [0, 1e+06] leaves float16, which ends at 65504"),
        ("float64", (-1e308, 1e308), "input 'x': range [-1e+308, 1e+308] leaves float64, which ends at 1.79769e+308"),
        ("bool", (0.0, 3.0), "input 'x': range [0, 3] leaves bool, which holds 0 to 1"),
    ],
)
def test_a_range_that_does_not_suit_the_dtype(dtype: str, bounds: tuple[float, float], message: str) -> None:
    with pytest.raises(SourceError) as caught:
        input_spec("x", InputConfig(range=bounds), (1,), dtype)
    assert str(caught.value) == message


def test_named_dims_need_a_size() -> None:
    assert named_dims([X, replace(X, shape=("seq", "batch"))]) == ("batch", "seq")
    with pytest.raises(SourceError) as caught:
        draw_inputs([X], {"seq": 2}, 0)
    assert str(caught.value) == "input 'x': no size for the dim 'batch'; put it into model.dims"


# numpy promises that PCG64 streams stay as they are; a change of our seeding would move every recorded figure.
IDS = [342, 749, 630, 154]
