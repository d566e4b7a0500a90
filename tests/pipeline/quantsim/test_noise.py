"""The noise of each step, against runs of its own."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from passes.weights.detached import attach
from passes.weights.sessions import Session
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.noise import measure_noise, noise_power, sqnr_db
from pipeline.quantsim.placement import place
from pipeline.quantsim.qdq import find_fixed_values, insert_qdq
from pipeline.quantsim.sensitivity import estimate_sensitivity
from tests.pipeline.quantsim.pictures_of_qdq import mlp, model_of, rule
from tests.pipeline.quantsim.test_qdq import RANGES


def round_to(array: np.ndarray, low: float = -4.0, high: float = 4.0) -> np.ndarray:
    """`array` in uint8 over a range that holds zero, by the definition."""
    scale = np.float32((high - low) / 255)
    zero = np.rint(-low / ((high - low) / 255))
    return ((np.clip(np.rint(array / scale) + zero, 0, 255) - zero) * scale).astype(np.float32)


def test_noise_alone_and_in_all() -> None:
    model = mlp()
    encodings = encode(place(model, [rule("op:*", "float", "uint8")]), RANGES, model)
    draw = np.random.default_rng(1)
    samples = [{"x": draw.uniform(-3, 3, (2, 4)).astype(np.float32)} for _ in range(3)]
    noise = measure_noise(model, encodings, ["h", "r", "y"], samples)

    extra = ["h", "r"]
    floats = [Session.of(model, extra).run(sample) for sample in samples]
    whole = [Session.of(insert_qdq(model, encodings)).run(sample) for sample in samples]
    signal = sum(float((found["y"] ** 2).sum()) for found in floats)
    total = sum(float(((one["y"] - two["y"]) ** 2).sum()) for one, two in zip(floats, whole, strict=True))
    assert noise["y"].signal == pytest.approx(signal, rel=1e-5)
    assert noise["y"].total == pytest.approx(total, rel=1e-4)

    # Alone: the step reads the rounded float values of its inputs, and its result is rounded.
    alone = sum(float(((np.maximum(round_to(found["h"]), 0) - found["r"]) ** 2).sum()) for found in floats)
    assert noise["r"].local == pytest.approx(alone, rel=1e-3)
    assert noise["h"].local < noise["h"].signal
    assert noise["r"].total_db == pytest.approx(10 * np.log10(noise["r"].signal / noise["r"].total))


def test_the_noise_of_a_weight_is_the_same_after_a_transpose() -> None:
    """The step alone reads the quantized weight, whose Transpose is no step of its own."""
    weight = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    x = {"x": np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)}
    turned = model_of("g (float[4, 8] x) => (float[4, 3] y) { t = Transpose(w) y = MatMul(x, t) }", w=weight.T.copy())
    straight = model_of("g (float[4, 8] x) => (float[4, 3] y) { y = MatMul(x, w) }", w=weight)
    found = []
    for model in (turned, straight):
        placement = place(model, [rule("op:*", "int4/channel", None)])
        encodings = encode(placement, {}, model)
        found.append((measure_noise(model, encodings, ["y"], [x]), estimate_sensitivity(model, encodings, [x])))
    assert found[0] == found[1]
    assert 15 < found[0][0]["y"].local_db == found[0][0]["y"].total_db < 30


def test_two_results_of_a_step_have_the_noise_that_each_has_alone() -> None:
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal((1, 32, size)).astype(np.float32) / 4 for name, size in (("w", 4), ("r", 8))}
    text = "g (float[3, 1, 4] x) => (float[3, 1, 1, 8] y, float[1, 1, 8] h) { y, h = LSTM <hidden_size = 8> (x, w, r) }"
    model, x = model_of(text, **weights), [{"x": draw.standard_normal((3, 1, 4)).astype(np.float32)}]
    placement = place(model, [rule("op:*", "int8", "uint8")])
    encodings = encode(placement, calibrate(model, placement, x), model)
    together = measure_noise(model, encodings, ["y", "h"], x)
    assert all(measure_noise(model, encodings, [name], x) == {name: noise} for name, noise in together.items())
    assert all(20 < noise.local_db < 80 for noise in together.values())


def test_an_exact_step_is_infinitely_good() -> None:
    model = mlp()
    encodings = encode(place(model, [rule("op:Relu", None, "float"), rule("tensor:y", None, "uint8")]), RANGES, model)
    x = np.ones((2, 4), np.float32)
    noise = measure_noise(model, encodings, ["h", "r"], [{"x": x}])
    assert noise["r"].total_db == noise["r"].local_db == float("inf")
    assert ReferenceEvaluator(attach(model)).run(None, {"x": x})


def test_only_what_follows_from_constants_is_fixed() -> None:
    model = model_of(
        """g (float[2, 4] x) => (float[2, 4] y) {
            noise = RandomNormal <shape = [2, 4]> ()
            t = Transpose(w)
            s = Add(x, noise)
            y = MatMul(s, t)
        }""",
        w=np.eye(4, dtype=np.float32),
    )
    assert find_fixed_values(model.proto.graph, {"w"}) == {"t"}


@pytest.mark.parametrize(
    ("signal", "noise", "ratio"),
    [(100, 1, 20), (1, 0, np.inf), (0, 0, np.inf), (0, 1, -np.inf), (1, np.inf, -np.inf), (1, np.nan, -np.inf)],
)
def test_the_ratio_has_a_number_for_every_noise(signal: float, noise: float, ratio: float) -> None:
    assert sqnr_db(signal, noise) == ratio


def test_a_model_that_computes_nothing_has_no_noise() -> None:
    model = model_of("g (float[2, 4] x) => (float[4, 2] y) { y = Transpose(x) }")
    assert measure_noise(model, {}, [], [{"x": np.ones((2, 4), np.float32)}]) == {}


@pytest.mark.parametrize(("ratio", "power"), [(0.0, 1.0), (20.0, 0.01), (-10.0, 10.0), (np.inf, 0.0), (-np.inf, 0.0)])
def test_the_noise_of_a_ratio(ratio: float, power: float) -> None:
    assert noise_power(ratio) == pytest.approx(power)
