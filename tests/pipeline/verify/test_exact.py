"""Two right results in float32 may differ by cancellation: float64 says so, and no wrong result is excused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from passes.proof.numbers import compare
from pipeline.verify.backends import OnnxFile
from pipeline.verify.exact import compute_in_double, excuse_rounding

NORM = """<ir_version: 10, opset_import: ["": 20]> m (float[4,64] x) => (float[4,64] y) <float[64] scale = {1}> {
    y = LayerNormalization (x, scale)
}"""


@pytest.fixture
def model(tmp_path: Path) -> OnnxFile:
    made = onnx.parser.parse_model(NORM)
    made.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones(64, np.float32), "scale"))
    onnx.save(made, tmp_path / "m.onnx")
    return OnnxFile(tmp_path / "m.onnx")


def normalize(x: np.ndarray, dtype: type, *, by_squares: bool) -> np.ndarray:
    """A normalization of rows; `by_squares` by E[x²] − E[x]², which cancels where the mean is large."""
    x = x.astype(dtype)
    mean = x.mean(-1, keepdims=True)
    variance = (
        (x * x).mean(-1, keepdims=True) - mean * mean if by_squares else ((x - mean) ** 2).mean(-1, keepdims=True)
    )
    return ((x - mean) / np.sqrt(variance + dtype(1e-5))).astype(np.float32)


def test_a_result_that_is_nearer_to_float64_than_the_reference_is_right(model: OnnxFile) -> None:
    x = (100 + np.random.default_rng(0).normal(size=(4, 64))).astype(np.float32)
    exact = compute_in_double(model, {"x": x})["y"]
    np.testing.assert_allclose(exact, normalize(x, np.float64, by_squares=False), rtol=1e-6, atol=1e-6)
    expected, found = {"y": normalize(x, np.float32, by_squares=True)}, {"y": exact.astype(np.float32)}
    errors = {"y": compare(expected["y"], found["y"])}
    assert not errors["y"].ok
    excused, sentences = excuse_rounding(model, {"x": x}, expected, found, errors)
    assert excused["y"].ok
    assert len(sentences) == 1 and "which is rounding: a computation in float64 is" in sentences[0]


@pytest.mark.parametrize("planted", [0.01, -0.5, np.nan])
def test_a_wrong_result_is_not_excused(model: OnnxFile, planted: float) -> None:
    x = (100 + np.random.default_rng(0).normal(size=(4, 64))).astype(np.float32)
    expected = {"y": normalize(x, np.float32, by_squares=True)}
    found = {"y": compute_in_double(model, {"x": x})["y"].astype(np.float32)}
    found["y"][2, 3] += planted
    errors = {"y": compare(expected["y"], found["y"])}
    assert excuse_rounding(model, {"x": x}, expected, found, errors) == (errors, [])


def test_a_reference_that_is_far_from_float64_excuses_nothing(model: OnnxFile) -> None:
    """Something else than rounding is wrong then."""
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    expected, found = (
        {"y": 2 * normalize(x, np.float32, by_squares=False)},
        {"y": normalize(x, np.float32, by_squares=False)},
    )
    errors = {"y": compare(expected["y"], found["y"])}
    assert excuse_rounding(model, {"x": x}, expected, found, errors) == (errors, [])
