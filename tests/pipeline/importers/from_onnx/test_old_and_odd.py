"""What older opsets mean, what the standard defines by a body, and cases that were once silently wrong."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from pipeline.errors import Unsupported
from pipeline.importers import from_onnx
from pipeline.ir.text import to_text
from pipeline.runtime import compile_graph
from pipeline.runtime.tensors import to_numpy


def model(text: str, opset: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}')


def kinds(text: str, opset: int) -> list[str]:
    return [op.kind for op in from_onnx(model(text, opset)).ops]


def test_a_constant_that_doubles_again_and_again_has_its_size_at_once() -> None:
    steps = " ".join(f"c{place + 1} = Concat <axis = 0> (c{place}, c{place})" for place in range(34))
    text = f"(int64[1] x) => (int64[1] y) <int64[1] c0 = {{1}}> {{ {steps} s = Shape (c34) y = Add (s, x) }}"
    graph = from_onnx(model(text, 18))
    assert {value.name: value.spec.shape for value in graph.values}["c33"] == (2**33,)


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
    "Resize of opset 10": (
        10,
        """(float[1, 1, 2, 4] x) => (float[1, 1, 3, 2] y) <float[4] s = {1, 1, 1.5, 0.6}> { y = Resize (x, s) }""",
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
    x = X if "Pool" not in name else np.nan_to_num(X, nan=4.0)
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    compare_with_onnxruntime(proto, {"x": x.reshape(shape)})


@pytest.mark.parametrize(
    ("dtype", "bias", "opset"),
    [("int32", 1.7, 18), ("int32", 1.7, 17), ("int8", 100.5, 20), ("uint8", -1.7, 20), ("float", 0.1, 18)],
)
def test_shrink_rounds_what_it_has_computed_and_not_its_bias(dtype: str, bias: float, opset: int) -> None:
    text = f"({dtype}[6] x) => ({dtype}[6] y) {{ y = Shrink <bias = {bias}, lambd = 2.5> (x) }}"
    x = np.array([0, 1, 3, 5, 100, 120]) * (1 if dtype[0] == "u" else np.array([-1, 1, -1, -1, 1, 1]))
    compare_with_onnxruntime(model(text, opset), {"x": x.astype(dtype.replace("float", "float32"))})


@pytest.mark.parametrize("axes", ["1", "0, 1", ""])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_logarithm_of_a_sum_of_integers_loses_its_fraction(dtype: str, axes: str) -> None:
    count = len(axes.replace(", ", ""))
    text = f"""({dtype}[2, 3] x) => ({dtype}[a, b] y) <int64[{count}] axes = {{{axes}}}>
        {{ y = ReduceLogSum <noop_with_empty_axes = 1> (x, axes) }}"""
    compare_with_onnxruntime(model(text, 18), {"x": np.array([[1, 3, 5], [6, 12, 3]], dtype)})


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_fractional_index_is_the_index_of_no_place(dtype: type[np.floating]) -> None:
    """onnxruntime has OneHot for float32 and for few types of its values."""
    name = {np.float32: "float", np.float64: "double"}.get(dtype, "float16")
    proto = model(
        f"({name}[7] x) => (float[7, 4] y) <int64 k = {{4}}, float[2] v = {{0, 1}}> {{ y = OneHot (x, k, v) }}", 18
    )
    x = np.array([0, 1, 2.5, -1, -0.5, 7, 3], dtype)
    found = to_numpy(compile_graph(from_onnx(proto)).run({"x": x})["y"])
    np.testing.assert_array_equal(found, ReferenceEvaluator(proto).run(None, {"x": x})[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("to", [17, 18, 19, 20])  # the types of float8
def test_an_integer_that_a_float8_cannot_hold_saturates_as_a_float_does(to: int, saturate: int) -> None:
    casts = f"n = Cast <to = {to}, saturate = {saturate}> (x) y = Cast <to = 1> (n)"
    cast = model(f"(int32[4] x) => (float[4] y) {{ {casts} }}", 21)
    feed = {"x": np.array([500, -1000000, 3, 0], np.int32)}
    (expected,) = ReferenceEvaluator(cast).run(None, feed)
    np.testing.assert_array_equal(to_numpy(compile_graph(from_onnx(cast)).run(feed)["y"]), expected)


def test_broadcasting_before_opset_7_is_a_reshape() -> None:
    text = "(float[2, 3, 4] x, float[3] b) => (float[2, 3, 4] y) { y = Add <broadcast = 1, axis = 1> (x, b) }"
    assert kinds(text, 6) == ["aten.reshape.default", "aten.add.Tensor"]
    x, b = np.ones((2, 3, 4), np.float32), np.array([1, 2, 3], np.float32)
    found = compile_graph(from_onnx(model(text, 6))).run({"x": x, "b": b})["y"]
    np.testing.assert_array_equal(found.numpy(), x + b[:, None])


def test_a_function_is_its_body() -> None:
    assert kinds("(float[2, 3] x) => (float[2, 3] y) { y = Celu <alpha = 2.0> (x) }", 12) == [
        "aten.div.Tensor",
        "aten.elu.default",
        "aten.mul.Tensor",
    ]


def test_what_nothing_reads_needs_no_shape() -> None:
    """SqueezeNet and VGG19 have masks of Dropout without a shape."""
    text = "(float[2, 3] x) => (float[2, 3] y) { d, mask = Dropout (x) y = Neg (d) }"
    assert kinds(text, 9) == ["aten.neg.default"]


def test_an_input_may_be_fixed() -> None:
    text = """(float[2, 3] x, int64 rate) => (float[2, 3] y) {
        k = Constant <value_int = 16000> () fast = Equal (rate, k)
        y = If (fast) < then_branch = t () => (float[2, 3] a) { a = Neg (x) },
                        else_branch = e () => (float[2, 3] b) { b = Exp (x) } >
    }"""
    graph = from_onnx(model(text, 13), values={"rate": np.array(16000)})
    assert [op.kind for op in graph.ops] == ["aten.neg.default"]
    assert "rate" not in to_text(graph)


PADS = [(4, 7, -1), (4, -2, 5), (5, 7, -3), (4, -1, -2), (3, -2, 2)]


@pytest.mark.parametrize(("size", "begin", "end"), PADS)
@pytest.mark.parametrize("mode", ["wrap", "edge", "constant"])
def test_a_negative_pad_takes_away_before_the_other_side_is_padded(mode: str, size: int, begin: int, end: int) -> None:
    """ONNX's reference refuses negative pads; onnxruntime pads what they leave."""
    text = f"""(float[{size}] x) => (float[{size + begin + end}] y)
        {{ p = Constant <value_ints = [{begin}, {end}]> () y = Pad <mode = "{mode}"> (x, p) }}"""
    compare_with_onnxruntime(model(text, 19), {"x": np.arange(size, dtype=np.float32)})


def test_a_reflection_reads_nothing_that_was_taken_away() -> None:
    text = (
        """(float[4] x) => (float[5] y) { p = Constant <value_ints = [-1, 2]> () y = Pad <mode = "reflect"> (x, p) }"""
    )
    assert kinds(text, 19) == ["aten.index.Tensor"]
    compare_with_onnxruntime(model(text, 19), {"x": np.arange(4, dtype=np.float32)})


@pytest.mark.parametrize(
    ("mode", "pads", "why"),
    [
        ("constant", "-3, 5", r"its pads \[-3, 5\] take away more than the \[2\] elements"),
        ("wrap", "-2, 5", r"it pads in the mode 'wrap' an axis without elements: \[0\]"),
    ],
)
def test_a_pad_of_nothing_is_refused(mode: str, pads: str, why: str) -> None:
    text = f"""(float[2] x) => (float[n] y)
        {{ p = Constant <value_ints = [{pads}]> () y = Pad <mode = "{mode}"> (x, p) }}"""
    with pytest.raises(Unsupported, match=why):
        from_onnx(model(text, 19))


@pytest.mark.parametrize("coordinates", ["tf_half_pixel_for_nn", "pytorch_half_pixel"])
@pytest.mark.parametrize("mode", ["nearest", "cubic", "linear"])
@pytest.mark.parametrize(("size", "scale"), [(7, 0.3), (4, 0.6), (5, 0.2), (3, 0.5), (2, 0.5), (3, 1.0), (4, 2.5)])
def test_resize_counts_as_onnxruntime_does(coordinates: str, mode: str, size: int, scale: float) -> None:
    """Its place is rounded in float32, an axis that keeps its size is not moved, and one element is the first."""
    outer = "1, 1" if mode == "linear" else "1, 1, 1"  # torch has an operator for a line, and onnxruntime a cubic image
    text = f"""(float[{outer}, {size}] x) => (float[{outer}, {int(size * scale)}] y)
        <float[0] r = {{}}, float[{outer.count("1") + 1}] s = {{{outer.replace("1", "1.0")}, {scale}}}>
        {{ y = Resize <mode = "{mode}", coordinate_transformation_mode = "{coordinates}"> (x, r, s) }}"""
    x = np.random.default_rng(0).normal(size=(*(1 for _ in outer.split(",")), size)).astype(np.float32)
    compare_with_onnxruntime(model(text, 11), {"x": x})


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_attention_with_a_mask_is_its_body(opset: int, mask: str) -> None:
    """From opset 24 on a mask may be shorter than the keys: the body pads it, by a number that CastLike makes."""
    text = f"""(float[1, 2, 3, 4] q, float[1, 2, 5, 4] k, float[1, 2, 5, 4] v, {mask}[3, 5] m)
        => (float[1, 2, 3, 4] y) {{ y = Attention (q, k, v, m) }}"""
    proto = model(text, opset)
    random = np.random.default_rng(0)
    shapes = {"q": (1, 2, 3, 4), "k": (1, 2, 5, 4), "v": (1, 2, 5, 4)}
    feed = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    seen = np.tri(3, 5, 2, bool)
    feed["m"] = seen if mask == "bool" else np.where(seen, 0, -np.inf).astype(np.float32)
    (wanted,) = ReferenceEvaluator(proto).run(None, feed)
    found = compile_graph(from_onnx(proto)).run(feed)["y"]
    np.testing.assert_allclose(to_numpy(found), wanted, rtol=1e-5, atol=1e-6)


def compare_with_onnxruntime(proto: onnx.ModelProto, feed: dict[str, np.ndarray]) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    found = compile_graph(from_onnx(proto)).run(feed)
    for value, wanted in zip(session.get_outputs(), session.run(None, feed), strict=True):
        np.testing.assert_allclose(to_numpy(found[value.name]), np.asarray(wanted), rtol=1e-5, atol=1e-6)
