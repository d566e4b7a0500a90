"""What a layer alone adds to its result is what the quantized model adds, where there is no other layer."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.quant_sensitivity import measure_each_alone
from passes.encodings.encoding import Encoding, Precision
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import place
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.sensitivity import estimate_sensitivity, find_layers
from pipeline.quantsim.torch_nodes import QuantizedLayers
from pipeline.runtime.tensors import as_tensor
from tests.pipeline.quantsim.pictures_of_qdq import model_of, rule

INT8, UINT8 = Precision(8, signed=True, symmetric=True), Precision(8, signed=False, symmetric=False)


def encoding(precision: Precision, scale: float, zero: int = 0) -> Encoding:
    return Encoding(precision, np.array(scale, np.float32), np.array(zero))


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def measure_differences(
    model: DetachedModel, encodings: dict[str, Encoding], feeds: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    layers = find_layers(model, encodings)
    read = {name for layer in layers for node in layer.nodes for name in (*node.input, *node.output) if name}
    made = [name for node in model.proto.graph.node for name in node.output if name in read]
    values = {**feeds, **Session.of(model, made).run(feeds)}
    quantized = QuantizedLayers(model, encodings, [layer.nodes for layer in layers])
    tensors = {name: as_tensor(values[name]) for name in values}
    return {
        name: difference
        for layer in layers
        for name, difference in quantized.measure_differences(layer.nodes, tensors).items()
    }


PRODUCT = "g (float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }"

CLIPPED = {"w": np.full((4, 4), -2.0, np.float32)}
"""-1 is the lowest of a stored weight, and one step below that of an activation."""

RESHAPED = "g (float[2, 4] x) => (float[2, 4] y) { w = Reshape(stored, shape) y = MatMul(x, w) }"

GRU = """g (float[5, 2, 4] x, int32[2] lengths) => (float[5, 1, 2, 3] y, float[1, 2, 3] h) {
    y, h = GRU <hidden_size = 3, clip = 1.0> (x, w, r, b, lengths)
}"""


@pytest.mark.parametrize(
    ("text", "constants", "encodings"),
    [
        (PRODUCT, CLIPPED, {"w": encoding(INT8, 1 / 127)}),
        (
            PRODUCT,
            CLIPPED,
            {"w": encoding(INT8, 1 / 127), "x": encoding(INT8, 1 / 256), "y": encoding(UINT8, 1 / 9, 99)},
        ),
        (RESHAPED, {"stored": draw(16), "shape": np.array([4, 4])}, {"stored": encoding(INT8, 1 / 32)}),
        (GRU, {"w": draw(1, 9, 4), "r": draw(1, 9, 3), "b": draw(1, 18)}, {"w": encoding(INT8, 1 / 8)}),
    ],
    ids=["clipped", "activations", "reshaped", "cell"],
)
def test_a_layer_differs_as_the_quantized_model_does(
    text: str, constants: dict[str, np.ndarray], encodings: dict[str, Encoding]
) -> None:
    model = model_of(text, **constants)
    feeds = {"x": draw(5, 2, 4), "lengths": np.array([5, 2], np.int32)} if text == GRU else {"x": draw(2, 4)}
    before, after = (Session.of(each).run(feeds) for each in (model, insert_qdq(model, encodings)))
    found = measure_differences(model, encodings, feeds)
    assert found.keys() == before.keys()
    for name, difference in found.items():
        assert np.abs(difference).max() > 0
        np.testing.assert_allclose(difference, after[name] - before[name], atol=1e-6)


def test_a_computed_constant_with_a_format_of_its_own_is_rounded_to_that_alone() -> None:
    """What another layer does to the tensor that it is computed from is no noise of this one."""
    stored = draw(4, 4)
    model = model_of(
        """g (float[2, 4] x) => (float[2, 4] y, float[2, 4] z) {
            y = MatMul(x, stored)
            w = Mul(stored, two)
            z = MatMul(x, w)
        }""",
        stored=stored,
        two=np.array(2, np.float32),
    )
    feeds = {"x": draw(2, 4)}
    found = measure_differences(model, {"stored": encoding(INT8, 1 / 4), "w": encoding(INT8, 1 / 16)}, feeds)
    rounded = {
        name: np.rint(numbers * steps) / steps for name, numbers, steps in (("y", stored, 4), ("z", 2 * stored, 16))
    }
    for name, numbers in (("y", stored), ("z", 2 * stored)):
        np.testing.assert_allclose(found[name], feeds["x"] @ (rounded[name] - numbers), atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_a_softmax_of_few_classes_has_a_direction_that_moves_it(seed: int) -> None:
    """Four signs are all equal in one of eight draws, and the sum that a Softmax gives never moves."""
    random = np.random.default_rng(seed)
    text = "g (float[1, 8] x) => (float[1, 4] y) { a = MatMul(x, w) b = MatMul(a, v) y = Softmax(b) }"
    weights = (random.normal(size=shape).astype(np.float32) / 4 for shape in ((8, 8), (8, 4)))
    model = model_of(text, **dict(zip("wv", weights, strict=True)))
    feeds = [{"x": random.normal(size=(1, 8)).astype(np.float32)}]
    placement = place(model, [rule("op:*", "int4", "float")])
    found = estimate_sensitivity(model, encode(placement, {}, model), feeds)
    assert found.keys() == {"a", "b"}
    assert all(10 < ratio < 60 for ratio in found.values()), found


@pytest.mark.parametrize(
    ("graph", "shape"),
    [
        ("g (float[1, 64, 32] x) => (float[1, 32] y) { v = MatMul(x, w) y = ReduceMean <keepdims = 0> (v, axis) }", ()),
        ("g (float[1, 32, 8, 8] x) => (float[1, 32, 1, 1] y) { v = Conv(x, w) y = GlobalAveragePool(v) }", (1, 1)),
    ],
)
def test_errors_of_one_weight_do_not_get_smaller_in_a_mean(graph: str, shape: tuple[int, ...]) -> None:
    """The 64 rows or places are nearly alike. By squares of elements the estimate would be 18 dB too high."""
    weight = np.random.default_rng(0).standard_normal((32, 32, *shape)).astype(np.float32)
    model = model_of(graph, w=weight, axis=np.array([1]))
    encodings = encode(place(model, [rule("op:*", "int4/channel", None)]), {}, model)
    size = (4, 1, 32, 8, 8) if shape else (4, 1, 64, 32)
    data = [{"x": 3 + array / 10} for array in np.random.default_rng(5).standard_normal(size, np.float32)]
    measured = measure_each_alone(model, encodings, find_layers(model, encodings), data)
    assert estimate_sensitivity(model, encodings, data)["v"] == pytest.approx(measured["v"], abs=2)
