"""What older opsets mean, what the standard defines by a body, and cases that were once silently wrong."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from pipeline.importers import from_onnx
from pipeline.ir.text import to_text
from pipeline.runtime import compile_graph
from pipeline.runtime.tensors import to_numpy


def model(text: str, opset: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}')


def kinds(text: str, opset: int) -> list[str]:
    return [op.kind for op in from_onnx(model(text, opset)).ops]


X = np.array([[-3.0, np.nan, 2.0, 0.0], [1.0, -1.0, 5.0, -0.5]], np.float32)


POOL = "(float[1, 1, 2, 4] x) => (float[a, b, c, d] y)"
FLAT = "(float[2, 4] x) => (float[2, 4] y)"

CASES: dict[str, tuple[int, str]] = {
    "MaxPool": (11, f"{POOL} {{ y = MaxPool <kernel_shape = [1, 1], strides = [1, 3], ceil_mode = 1> (x) }}"),
    "AveragePool": (19, f"{POOL} {{ y = AveragePool <kernel_shape = [1, 1], strides = [2, 2], ceil_mode = 1> (x) }}"),
    "ReduceL2": (18, f"{FLAT} {{ y = ReduceL2 <noop_with_empty_axes = 1> (x) }}"),
    "ReduceSumSquare": (18, f"{FLAT} {{ y = ReduceSumSquare <noop_with_empty_axes = 1> (x) }}"),
    "Sign": (13, f"{FLAT} {{ y = Sign (x) }}"),
    "Pad": (
        19,
        """(float[2, 4] x) => (float[2, 7] y)
        { p = Constant <value_ints = [0, 2, 0, 1]> () y = Pad <mode = "wrap"> (x, p) }""",
    ),
    "Resize": (
        13,
        f"""{POOL} {{ s = Constant <value_floats = [1.0, 1.0, 2.0, 0.5]> ()
        y = Resize <coordinate_transformation_mode = "tf_half_pixel_for_nn"> (x, , s) }}""",
    ),
    "cubic": (
        13,
        f"""{POOL} {{ s = Constant <value_floats = [1.0, 1.0, 2.5, 1.5]> ()
        y = Resize <mode = "cubic", exclude_outside = 1> (x, , s) }}""",
    ),
    "Mish": (18, f"{FLAT} {{ y = Mish (x) }}"),
    "LayerNormalization": (
        17,
        """(float[2, 4] x) => (float[2, 4] y, float[2, 1] m) <float[4] g = {1, 2, 3, 4}>
        { y, m = LayerNormalization (x, g) }""",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_like_onnxruntime(name: str) -> None:
    opset, text = CASES[name]
    proto = model(text, opset)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    x = X if "Pool" not in name else np.nan_to_num(X, nan=4.0)
    feed = {"x": x.reshape(session.get_inputs()[0].shape)}
    found = compile_graph(from_onnx(proto)).run(feed)
    for value, wanted in zip(session.get_outputs(), session.run(None, feed), strict=True):
        np.testing.assert_allclose(to_numpy(found[value.name]), np.asarray(wanted), rtol=1e-5, atol=1e-6)


def test_broadcasting_before_opset_7_is_a_reshape() -> None:
    text = "(float[2, 3, 4] x, float[3] b) => (float[2, 3, 4] y) { y = Add <broadcast = 1, axis = 1> (x, b) }"
    assert kinds(text, 6) == ["Reshape", "Add"]
    x, b = np.ones((2, 3, 4), np.float32), np.array([1, 2, 3], np.float32)
    found = compile_graph(from_onnx(model(text, 6))).run({"x": x, "b": b})["y"]
    np.testing.assert_array_equal(found.numpy(), x + b[:, None])


def test_a_function_is_its_body() -> None:
    assert kinds("(float[2, 3] x) => (float[2, 3] y) { y = Celu <alpha = 2.0> (x) }", 12) == ["Div", "Elu", "Mul"]


def test_what_nothing_reads_needs_no_shape() -> None:
    """SqueezeNet and VGG19 have masks of Dropout without a shape."""
    text = "(float[2, 3] x) => (float[2, 3] y) { d, mask = Dropout (x) y = Neg (d) }"
    assert kinds(text, 9) == ["Neg"]


def test_an_input_may_be_fixed() -> None:
    text = """(float[2, 3] x, int64 rate) => (float[2, 3] y) {
        k = Constant <value_int = 16000> () fast = Equal (rate, k)
        y = If (fast) < then_branch = t () => (float[2, 3] a) { a = Neg (x) },
                        else_branch = e () => (float[2, 3] b) { b = Exp (x) } >
    }"""
    graph = from_onnx(model(text, 13), values={"rate": np.array(16000)})
    assert [op.kind for op in graph.ops] == ["Neg"]
    assert "rate" not in to_text(graph)
