"""Kinds that draw: the distribution, the seeds, and that runs repeat. No other program draws the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from pipeline.errors import Unsupported
from pipeline.importers import from_onnx
from pipeline.ops import emitter_of
from pipeline.runtime import compile_graph
from pipeline.runtime.operators import random_normal

N = 100_000
FAR = 5 / N**0.5
"""Five standard deviations of a mean of N numbers that have a standard deviation of 1."""


def draw(text: str, runs: int = 1, opset: int = 22, **feeds: np.ndarray) -> list[dict[str, Any]]:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
    program = compile_graph(from_onnx(model, emitter_of=emitter_of))
    return [{name: value.float().numpy() for name, value in program.run(feeds).items()} for _ in range(runs)]


def test_normal_numbers_have_their_mean_and_scale() -> None:
    (actual,) = draw(
        f"g () => (float[{N}] y) {{ y = RandomNormal <shape = [{N}], mean = 3.0, scale = 2.0, seed = 7.0> () }}"
    )
    scaled = (actual["y"] - 3) / 2
    assert abs(scaled.mean()) < FAR and abs(scaled.std() - 1) < FAR
    assert abs((scaled**3).mean()) < 15**0.5 * FAR  # a cube of a normal number has a variance of 15


def test_normal_numbers_have_the_digits_of_their_dtype() -> None:
    """`random_normal` draws float64 in float64: a float32 in its place has 24 of 53 bits."""
    y = random_normal([N], 0.0, 1.0, "float64", 7, None)
    assert (y != y.float().double()).any()


@pytest.mark.parametrize("dtype", ["float16", "float", "double", "bfloat16"])
def test_uniform_numbers_fill_their_range(dtype: str) -> None:
    (actual,) = draw(
        f"g ({dtype}[{N}] x) => ({dtype}[{N}] y) {{ y = RandomUniformLike <low = -1.0, high = 3.0> (x) }}",
        x=np.zeros(N, {"float": np.float32, "double": np.float64}.get(dtype, np.float16))
        if dtype != "bfloat16"
        else np.zeros(N, onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)),
    )
    y = actual["y"]
    assert -1 <= y.min() < -0.99 and 2.98 < y.max() <= 3
    assert abs(y.mean() - 1) < 2 * FAR + 1e-3  # and what rounding to bfloat16 adds


def test_bernoulli_draws_each_element_by_its_own_share() -> None:
    shares = np.repeat([0.0, 0.25, 1.0], N).astype(np.float32).reshape(3, N)
    (actual,) = draw(
        f"g (float[3, {N}] x) => (int32[3, {N}] y) {{ y = Bernoulli <dtype = 6, seed = 1.0> (x) }}", x=shares
    )
    assert set(np.unique(actual["y"])) == {0, 1}
    assert np.allclose(actual["y"].mean(1), [0, 0.25, 1], atol=FAR) and actual["y"][0].max() == 0


def test_multinomial_takes_log_probabilities() -> None:
    logs = np.array([[0.0, 0.0, np.log(2)], [-np.inf, 3.0, -np.inf]], np.float32)  # of no sum in particular
    (actual,) = draw(
        f"g (float[2, 3] x) => (int64[2, {N}] y) {{ y = Multinomial <dtype = 7, sample_size = {N}> (x) }}", x=logs
    )
    counts = [np.bincount(row.astype(int), minlength=3) / N for row in actual["y"]]
    assert np.allclose(counts, [[0.25, 0.25, 0.5], [0, 1, 0]], atol=FAR)


DROPOUT = f"""g (float[{N}] x) => (float[{N}] y, bool[{N}] m) {{
    r = Constant <value_float = 0.2> () t = Constant <value = bool {{1}}> () y, m = Dropout (x, r, t) }}"""


def test_dropout_in_training_scales_what_it_keeps() -> None:
    (actual,) = draw(DROPOUT, x=np.full(N, 4, np.float32))
    assert abs(actual["m"].mean() - 0.8) < FAR
    assert np.allclose(actual["y"], np.where(actual["m"], 5, 0))


def test_dropout_at_inference_keeps_all() -> None:
    (actual,) = draw("g (float[2, 3] x) => (bool[2, 3] m) { y, m = Dropout (x) }", x=np.zeros((2, 3), np.float32))
    assert actual["m"].all() and actual["m"].shape == (2, 3)


def test_runs_repeat_and_two_ops_do_not() -> None:
    first, second = draw(
        "g () => (float[9] a, float[9] b) { a = RandomNormal <shape = [9]> () b = RandomNormal <shape = [9]> () }", 2
    )
    assert np.array_equal(first["a"], second["a"]) and not np.array_equal(first["a"], first["b"])


def test_a_seed_is_what_counts() -> None:
    draws = "a = {0} <seed = 0.1> (x) b = {0} <seed = 0.1> (x) c = {0} <seed = 0.2> (x)".format("RandomUniformLike")
    (actual,) = draw(f"g (float[9] x) => (float[9] a, float[9] b, float[9] c) {{ {draws} }}", x=np.zeros(9, np.float32))
    assert np.array_equal(actual["a"], actual["b"]) and not np.array_equal(actual["a"], actual["c"])


def test_a_dropout_of_all_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"ratio is 1\.0"):
        draw(DROPOUT.replace("0.2", "1.0"), x=np.zeros(N, np.float32))
