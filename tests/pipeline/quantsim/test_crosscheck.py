"""A quantized model of another tool against the float model: where its error jumps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from passes.weights.detached import DetachedModel
from pipeline.quantsim.crosscheck import compare_values, find_jump
from tests.pipeline.quantsim.pictures_of_qdq import model_of

FLOAT = """two (float[4, 8] x) => (float[4, 8] y) {
    first = MatMul(x, w)
    second = Add(first, b)
    third = Relu(second)
    y = MatMul(third, w)
}"""

BIAS_ADDED_TWICE = """two (float[4, 8] x) => (float[4, 8] y) {
    first = Gemm(x, w, b)
    second = Add(first, b)
    third = Relu(second)
    y = MatMul(third, w)
}"""

OTHER_NAMES = """two (float[4, 8] x) => (float[4, 8] y) {
    first = MatMul(x, w)
    renamed = Add(first, b)
    turned = Transpose(renamed)
    third = Relu(turned)
    y = Gemm<transA = 1>(third, w)
}"""


def model(text: str, noise: float = 0.0) -> DetachedModel:
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((8, 8)).astype(np.float32)
    bias = draw.standard_normal(8).astype(np.float32)
    step = weight.max() * noise
    return model_of(text, w=np.rint(weight / step) * step if noise else weight, b=bias)


SAMPLES = [{"x": np.random.default_rng(seed).standard_normal((4, 8)).astype(np.float32)} for seed in range(3)]


def test_a_bias_that_is_added_twice_is_found_where_it_comes_in() -> None:
    jump = find_jump(compare_values(model(FLOAT), model(BIAS_ADDED_TWICE), SAMPLES))
    assert jump is not None
    assert (jump.tensor, jump.op, jump.read_db) == ("first", "MatMul", math.inf)
    assert jump.sqnr_db < 10


@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_weights_are_no_jump(bits: int) -> None:
    rounded = model(FLOAT, noise=2.0 ** (1 - bits))
    values = compare_values(model(FLOAT), rounded, SAMPLES)
    assert [value.tensor for value in values] == ["first", "second", "third", "y"]
    assert all(6 * bits - 10 < value.own_db for value in values)
    assert values[0].sqnr_db < 6 * bits + 10
    assert find_jump(values) is None


def test_a_value_without_a_counterpart_passes_on_what_was_known() -> None:
    values = compare_values(model(FLOAT), model(OTHER_NAMES, noise=0.1), SAMPLES)
    first, last = values  # `second` has another name there, and `third` another shape
    assert (first.tensor, last.tensor) == ("first", "y")
    assert last.read_db == first.sqnr_db


def test_equal_models_differ_nowhere() -> None:
    values = compare_values(model(FLOAT), model(FLOAT), SAMPLES)
    assert {value.sqnr_db for value in values} == {value.own_db for value in values} == {math.inf}
