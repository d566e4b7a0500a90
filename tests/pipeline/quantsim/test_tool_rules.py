"""The profiles `ort-cpu` and `tensorrt` round what the tools of these targets round."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime import InferenceSession
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

import onnxline
from passes.weights.detached import DetachedModel, attach
from pipeline.config import QuantSimConfig
from pipeline.errors import UsageError
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode, quantize
from pipeline.quantsim.placement import Placement, place
from pipeline.quantsim.profiles import rules_of
from pipeline.quantsim.qdq import insert_qdq
from tests.pipeline.quantsim.pictures_of_qdq import model_of

DRAW = np.random.default_rng(3)

STORED = {
    "image": DRAW.standard_normal((4, 4, 3, 3)).astype(np.float32),
    "square": DRAW.standard_normal((8, 8)).astype(np.float32),
    "row": DRAW.standard_normal((1, 8)).astype(np.float32),
    "vector": DRAW.standard_normal(8).astype(np.float32),
    "four": np.abs(DRAW.standard_normal(4)).astype(np.float32),
    "low": np.float32(0),
    "high": np.float32(6),
    "sizes": np.array([1, 32, 8], np.int64),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
    "half": np.float32(0.5),
    "places": np.array([0, 1], np.int64),
}

MODELS = {
    "a convolution and its Clip": "c = Conv(x, image) y = Clip(c, low, high)",
    "a Relu that is not alone": "c = Conv(x, image) r = Relu(c) y = Add(r, c)",
    "a BatchNormalization in front": "n = BatchNormalization(x, four, four, four, four) r = Relu(n) y = Conv(r, image)",
    "boxes and scores": "b = Conv(x, image) s = Sigmoid(b) y = Concat <axis = 1> (b, s)",
    "pools": "m = MaxPool <kernel_shape = [2, 2]> (x) a = GlobalAveragePool(m) y = Conv(a, one)",
    "products of computed values": "m = MatMul(x, x) h = Mul(m, half) s = Softmax(h) y = MatMul(s, x)",
    "what no kernel is quantized for": "e = Erf(x) t = Transpose <perm = [0, 1, 3, 2]> (e) y = MatMul(t, square)",
    "moved afterwards": "m = MatMul(x, square) r = Reshape(m, sizes) t = Transpose <perm = [0, 2, 1]> (r) y = Tanh(t)",
    "a norm in one operator": "n = LayerNormalization(x, vector, vector) y = MatMul(n, square)",
    "a table": "g = Gather <axis = 3> (x, places) p = Pad(g, pads) y = LeakyRelu(p)",
    "a product with its bias": "f = Reshape(x, flat) y = Gemm(f, square, vector)",
    "chosen": "c = Greater(x, half) s = Sigmoid(x) y = Where(c, s, x)",
}  # fmt: skip


class Samples(CalibrationDataReader):
    def __init__(self, *arrays: np.ndarray) -> None:
        drawn = arrays or np.random.default_rng(4).standard_normal((2, 1, 4, 8, 8)).astype(np.float32)
        self._left = [{"x": array} for array in drawn]

    def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
        return self._left.pop() if self._left else None


def model(text: str) -> DetachedModel:
    stored = {**STORED, "one": np.ones((2, 4, 1, 1), np.float32), "flat": np.array([-1, 8], np.int64)}
    words = re.findall(r"\w+", text)
    read = {name: array for name, array in stored.items() if name in words}
    return model_of(f"g (float[1, 4, 8, 8] x) => (float y) {{ {text} }}", 21, **read)


def placed(profile: str, model: DetachedModel) -> Placement:
    return place(model, rules_of(QuantSimConfig.model_validate({"profile": profile}), model))


@pytest.mark.parametrize("text", MODELS.values(), ids=MODELS.keys())
def test_ort_cpu_rounds_what_quantize_static_rounds(text: str, tmp_path: Path) -> None:
    """What only moves numbers has an encoding here, and none there where its reader has one; biases of norms have 32
    bits there."""
    source = model(text)
    onnx.save(attach(source), tmp_path / "model.onnx")
    paths = (tmp_path / "model.onnx", tmp_path / "quantized.onnx")
    quantize_static(*paths, Samples(), per_channel=True, activation_type=QuantType.QUInt8)
    written = onnx.load(paths[1]).graph
    stored = {tensor.name for tensor in written.initializer}
    theirs = {name.removesuffix("_quantized") for name in stored if name.endswith("_quantized")}
    theirs |= {
        node.input[0].removesuffix("_QuantizeLinear_Input") for node in written.node if node.op_type == "QuantizeLinear"
    }
    found = placed("ort-cpu", source)
    moved = {entry.site.tensor for entry in found.sites if entry.site.moves}
    biases = {entry.site.tensor for entry in found.sites if entry.site.parameter == "bias" and not entry.site.bias_of}
    assert found.formats().keys() - moved == theirs - moved - biases
    scales = {tensor.name: numpy_helper.to_array(tensor) for tensor in written.initializer}
    for name, precision in found.formats().items():
        if f"{name}_zero_point" in scales and precision.bits == 8:
            assert scales[f"{name}_zero_point"].dtype.name == precision.onnx_name.lower(), name


def test_the_scales_of_a_dead_channel_are_those_of_quantize_static(tmp_path: Path) -> None:
    """It widens the scale of weights that are nearly zero until 32 bits hold the bias."""
    weight = np.ones((2, 4, 1, 1), np.float32) * np.array([1, 1e-13], np.float32).reshape(2, 1, 1, 1)
    bias = np.array([0.5, 3], np.float32)
    source = model_of("g (float[1, 4, 8, 8] x) => (float y) { y = Conv(x, dead, bias) }", 21, dead=weight, bias=bias)
    onnx.save(attach(source), tmp_path / "model.onnx")
    paths = (tmp_path / "model.onnx", tmp_path / "quantized.onnx")
    quantize_static(*paths, Samples(), per_channel=True, activation_type=QuantType.QUInt8)
    theirs = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(paths[1]).graph.initializer}
    scale, zero = theirs["x_scale"].astype(np.float64), theirs["x_zero_point"].astype(np.float64)
    ranges = dict.fromkeys(("x", "y"), (float(-zero * scale), float((255 - zero) * scale)))
    found = encode(placed("ort-cpu", source), ranges, source)
    np.testing.assert_allclose(found["dead"].scale, theirs["dead_scale"], rtol=1e-6)
    np.testing.assert_allclose(
        quantize(bias, found["bias"]), theirs["bias_quantized"], rtol=2**-24
    )  # we divide float32


@pytest.mark.parametrize("bits", [8, 16])
def test_the_ranges_of_curves_are_those_of_quantize_static(bits: int, tmp_path: Path) -> None:
    """Tanh and Sin have the range of the samples, and Softmax 0 to 1. So has Sigmoid here, whatever the samples."""
    draw, curves = (
        np.random.default_rng(0),
        {"s": "Sigmoid", "h": "HardSigmoid", "p": "Softmax", "t": "Tanh", "n": "Sin"},
    )
    parts = (f"{name} = {op}(x) {name}y = MatMul({name}, {name}w)" for name, op in curves.items())
    outputs = ", ".join(f"float[2, 4] {name}y" for name in curves)
    weights = {f"{name}w": draw.standard_normal((4, 4)).astype(np.float32) for name in curves}
    source = model_of(f"g (float[2, 4] x) => ({outputs}) {{ {' '.join(parts)} }}", 21, **weights)
    onnx.save(attach(source), tmp_path / "model.onnx")
    x, kind = draw.uniform(-1, 1, (2, 4)).astype(np.float32), QuantType.from_string(f"QUInt{bits}")
    paths = (tmp_path / "model.onnx", tmp_path / "quantized.onnx")
    quantize_static(*paths, Samples(x), per_channel=True, activation_type=kind)
    theirs = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(paths[1]).graph.initializer}
    config = QuantSimConfig.model_validate({"profile": "ort-cpu", "rules": {"op:*": {"activations": f"uint{bits}"}}})
    placement = place(source, rules_of(config, source))
    ours = encode(placement, calibrate(source, placement, [{"x": x}]), source)
    ranges = {name: float(ours[name].scale) * (2**bits - 1) for name in curves}
    own = {name: theirs[f"{name}_scale"].item() * (2**bits - 1) for name in curves}
    assert ranges == pytest.approx(own | {"s": 1, "h": 1}, rel=1e-6)  # scales are float32
    assert own["p"] == pytest.approx(1) and max(own["s"], own["h"]) < 0.8


@pytest.mark.parametrize("dtype", ["float16", "double"])
def test_a_softmax_of_another_float_type_is_refused_in_a_sentence(dtype: str) -> None:
    source = model_of(f"g ({dtype}[2, 4] x) => ({dtype}[2, 4] y) {{ r = Relu(x) y = Softmax(r) }}", 21)
    with pytest.raises(UsageError, match="only float32 is simulated"):
        placed("ort-cpu", source)


def test_tensorrt_rounds_what_products_read_and_what_is_added_to_them() -> None:
    source = model(
        """a = Conv(x, image) n = BatchNormalization(a, four, four, four, four) r = Relu(n)
        c = Conv(r, image) s = Tanh(r) sum = Add(c, s) y = Softmax(sum)"""
    )
    assert set(placed("tensorrt", source).formats()) == {"x", "image", "r", "s"}


@pytest.mark.parametrize("operands", ["main, skip", "skip, main"])
def test_of_two_products_tensorrt_rounds_the_one_that_skips(operands: str) -> None:
    source = model(
        f"""skip = Conv(x, image) b = Conv(x, image) r = Relu(b) main = Conv(r, image)
        sum = Add({operands}) y = Relu(sum)"""
    )
    assert set(placed("tensorrt", source).formats()) == {"x", "image", "r", "skip"}


def test_a_concat_shares_its_scale_on_a_target_that_ties_and_not_on_ort_cpu() -> None:
    """quantize_static gives what a Concat joins, and its result, a scale each; AIMET ties them."""
    source = model("b = Conv(x, image) g = Gelu(b) y = Concat <axis = 1> (b, g)")
    groups = {
        profile: [found.site.group for found in placed(profile, source).sites if found.site.tensor in ("b", "g", "y")]
        for profile in ("ort-cpu", "qnn-htp")
    }
    assert groups == {"ort-cpu": ["b", "g", "y"], "qnn-htp": ["b", "b", "b"]}


def test_a_stack_of_matrices_runs_with_optimizations() -> None:
    """onnxruntime's QLinearMatMul takes no scale for each column of it."""
    text = "g (float[2, 3, 8] x) => (float[2, 3, 8] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }"
    draw = np.random.default_rng(5)
    stacks = {name: draw.standard_normal((2, 8, 8)).astype(np.float32) for name in "wv"}
    model = model_of(text, 21, **stacks)
    placement = place(model, rules_of(QuantSimConfig(profile="ort-cpu"), model))
    ranges = {placed.site.group: (-32.0, 32.0) for placed in placement.quantized_sites()}
    x = draw.standard_normal((2, 3, 8)).astype(np.float32)
    quantized, floats = (
        np.asarray(InferenceSession(attach(each).SerializeToString()).run(None, {"x": x})[0])
        for each in (insert_qdq(model, encode(placement, ranges, model)), model)
    )
    assert np.abs(quantized - floats).max() < np.abs(floats).max() / 10


@pytest.mark.parametrize("name", ["first", "second"])
@pytest.mark.parametrize("made_by", ["Exp(x)", "Relu(x)", "Add(x, x)", "Softmax(x)"])
def test_what_nodes_in_float_alone_read_stays_in_float(made_by: str, name: str, tmp_path: Path) -> None:
    """As onnxruntime's quantizer does with `nodes_to_exclude`: what makes the value may ask for it too."""
    source = model(f"a = {made_by} b = Exp(x) y = MatMul(a, b)")
    source.proto.graph.node[-1].name = "second"
    source.proto.graph.node[0].name = "first"
    onnx.save(attach(source), tmp_path / "model.onnx")
    quantize_static(tmp_path / "model.onnx", tmp_path / "q.onnx", Samples(), nodes_to_exclude=[name])
    nodes = onnx.load(tmp_path / "q.onnx").graph.node
    theirs = {node.input[0] for node in nodes if node.op_type == "QuantizeLinear"}
    in_float = {"weights": "float", "activations": "float"}
    config = QuantSimConfig.model_validate({"profile": "ort-cpu", "rules": {f"node:{name}": in_float}})
    ours = place(source, rules_of(config, source)).formats().keys()
    read = {"a", "b"} if name == "second" else {"x", "b"}
    assert ours & read == theirs & read


def test_to_int8_leaves_in_float_what_nodes_that_it_keeps_alone_read() -> None:
    source = attach(model("a = Exp(x) b = Tanh(x) m = MatMul(a, square) y = MatMul(b, square)"))
    source.graph.node[2].name = "product"
    found = onnxline.to_int8(source, samples=2, keep=["product"]).placement.formats().keys()
    assert found & {"a", "b", "m", "y"} == {"b", "y"}


def test_tensorrt_leaves_in_float_what_a_product_in_float_reads() -> None:
    source = model("a = Exp(x) b = Tanh(x) m = MatMul(a, square) y = MatMul(b, square)")
    rules = {"node:m": {"weights": "float", "activations": "float"}}
    config = QuantSimConfig.model_validate({"profile": "tensorrt", "rules": rules})
    assert place(source, rules_of(config, source)).formats().keys() == {"b"}
