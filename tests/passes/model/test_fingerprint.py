"""A fingerprint says what a model is built like, on every machine and for every set of weights."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from passes.model.canonical import structure_fingerprint
from tests.support.onnx_models import detached, model_of

TEXT = "g (float[2, 32] x) => (float[2, 32] y) { a = MatMul (x, w) b = Reshape (a, shape) y = Mul (b, scale) }"


def fingerprint(text: str = TEXT, seed: int = 0, shape: tuple[int, int] = (2, 32), scale: float = 0.125) -> str:
    weights = {
        "w": np.random.default_rng(seed).standard_normal((32, 32)).astype(np.float32),
        "shape": np.array(shape, np.int64),
        "scale": np.float32([scale]),
    }
    return structure_fingerprint(detached(model_of(text, **weights)))


def test_it_is_short_and_always_the_same() -> None:
    assert fingerprint() == fingerprint()
    assert len(fingerprint()) == 12


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"scale": 0.125 * (1 + 1e-7)},
        {"text": TEXT.replace("b = ", "renamed = ").replace("(b,", "(renamed,")},
    ],
    ids=["weights", "the last bit of a scale", "names"],
)
def test_what_does_not_count(other: dict) -> None:
    assert fingerprint(**other) == fingerprint()


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (-1, 32)},
        {"scale": 0.25},
        {"text": TEXT.replace("Mul (b", "Add (b")},
        {"text": TEXT.replace("Reshape (a", "Reshape <allowzero = 1> (a")},
        {"text": TEXT.replace("Mul (b, scale)", "Mul (a, scale)")},
    ],
    ids=["a shape", "a scale", "an operator", "an attribute", "an edge"],
)
def test_what_counts(other: dict) -> None:
    assert fingerprint(**other) != fingerprint()


def test_the_shape_and_the_type_of_a_weight_count() -> None:
    def of(array: np.ndarray) -> str:
        return structure_fingerprint(
            detached(model_of("g (float[2, 32] x) => (float[2, N] y) { y = MatMul (x, w) }", w=array))
        )

    prints = {of(np.zeros(shape, dtype)) for shape in ((32, 32), (32, 16)) for dtype in (np.float32, np.float16)}
    assert len(prints) == 4


def test_text_counts_as_a_tensor() -> None:
    model = model_of("g (string[1] x) => (string[1] y) { y = StringConcat (x, w) }")
    model.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.STRING, [1], [b"\xff"]))
    assert structure_fingerprint(detached(model))
