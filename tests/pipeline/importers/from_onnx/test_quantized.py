"""Quantized operators on a plan, against onnxruntime: without a fallback, and equal to the last bit of an integer."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.errors import Unsupported
from pipeline.importers import from_onnx
from pipeline.runtime import compile_graph
from pipeline.runtime.tensors import to_numpy
from tests.pipeline.importers.from_onnx.import_text import ops

HEAD = '<ir_version: 10, opset_import: ["": 21]> '

MODELS = {
    "per tensor": """(float[3, 4] x) => (uint8[3, 4] q, float[3, 4] y) <float s = {0.02}, uint8 z = {120}>
        { q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }""",
    "per channel": """(float[3, 4] x) => (int8[3, 4] q, float[3, 4] y)
        <float[4] s = {0.01, 0.02, 0.03, 0.04}, int8[4] z = {0, 1, -2, 3}>
        { q = QuantizeLinear <axis = 1> (x, s, z) y = DequantizeLinear <axis = 1> (q, s, z) }""",
    "16 bits": """(float[3, 4] x) => (int16[3, 4] q, float[3, 4] y) <float s = {0.0001}, int16 z = {5}>
        { q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }""",
    "float16": """(float[3, 4] x) => (float16[3, 4] y) <float t = {0.02}, int8 z = {3}> {
        s = Cast <to = 10> (t) h = Cast <to = 10> (x) q = QuantizeLinear (h, s, z) y = DequantizeLinear (q, s, z)
    }""",
    "int32": "(int32[3] x) => (float[3] y) <float s = {0.5}> { y = DequantizeLinear (x, s) }",
    "dynamic": """(float[3, 4] x) => (uint8[3, 4] q, float s, uint8 z) { q, s, z = DynamicQuantizeLinear (x) }""",
    "MatMulInteger": """(uint8[2, 4] a, int8[4, 3] b) => (int32[2, 3] y) <uint8 z = {7}>
        { y = MatMulInteger (a, b, z) }""",
    "ConvInteger": """(uint8[1, 2, 5, 5] x, uint8[3, 2, 3, 3] w) => (int32[1, 3, 5, 5] y) <uint8 z = {9}>
        { y = ConvInteger <pads = [1, 1, 1, 1]> (x, w, z) }""",
    "QLinearMatMul": """(uint8[2, 4] a, uint8[4, 3] b) => (uint8[2, 3] y)
        <float s = {0.02}, uint8 z = {9}, float t = {0.03}, float u = {0.5}>
        { y = QLinearMatMul (a, s, z, b, t, z, u, z) }""",
    "QLinearConv": """(uint8[1, 2, 5, 5] x, int8[3, 2, 3, 2] w) => (uint8[1, 3, 5, 5] y)
        <float s = {0.02}, uint8 z = {9}, float[3] t = {0.01, 0.02, 0.03}, int8[3] v = {0, 0, 0}, float u = {0.4}>
        { y = QLinearConv <pads = [1, 0, 1, 1]> (x, s, z, w, t, v, u, z) }""",
}


def feed_of(session: onnxruntime.InferenceSession) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    feed: dict[str, np.ndarray] = {}
    for value in session.get_inputs():
        dtype = value.type.removeprefix("tensor(").removesuffix(")")
        if dtype == "float":
            feed[value.name] = rng.standard_normal(value.shape).astype(np.float32)
        else:
            low = 0 if dtype.startswith("u") else -100
            feed[value.name] = rng.integers(low, 100, value.shape).astype(dtype)
    return feed


def check_against_onnxruntime(model: onnx.ModelProto) -> None:
    options = onnxruntime.SessionOptions()
    # Optimized, it rounds activations beside weights of four bits.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feed: dict[str, Any] = feed_of(session)
    program = compile_graph(from_onnx(model))
    found = program.run({entry.name: feed[entry.name] for entry in program.feed_signature})
    for value, wanted in zip(session.get_outputs(), session.run(None, feed), strict=True):
        made, wanted = to_numpy(found[value.name]), np.asarray(wanted)
        assert made.dtype == wanted.dtype
        tolerance = 0 if wanted.dtype.kind in "iu" else 1e-3 if wanted.dtype == np.float16 else 1e-6
        np.testing.assert_allclose(made, wanted, rtol=tolerance, atol=tolerance, err_msg=value.name)


@pytest.mark.parametrize("name", MODELS)
def test_like_onnxruntime(name: str) -> None:
    check_against_onnxruntime(onnx.parser.parse_model(f"{HEAD} g {MODELS[name]}"))


def blocks(element: int) -> onnx.ModelProto:
    """A weight of four bits in blocks of 16 rows, dequantized and multiplied."""
    rng = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(element)
    low = 0 if element == TensorProto.UINT4 else -8
    arrays = {
        "w": rng.integers(low, low + 16, (32, 3)).astype(dtype),
        "s": rng.random((2, 3), np.float32),
        "z": rng.integers(low, low + 16, (2, 3)).astype(dtype),
    }
    text = f"""{HEAD} g (float[2, 32] x) => (float[2, 3] y) {{
        d = DequantizeLinear <axis = 0, block_size = 16> (w, s, z) y = MatMul (x, d)
    }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


@pytest.mark.parametrize("element", [TensorProto.INT4, TensorProto.UINT4], ids=["int4", "uint4"])
def test_weights_of_four_bits(element: int) -> None:
    check_against_onnxruntime(blocks(element))


@pytest.mark.parametrize("element", [TensorProto.INT4, TensorProto.UINT4], ids=["int4", "uint4"])
def test_a_constant_of_four_bits_is_as_an_initializer(element: int) -> None:
    model = blocks(element)
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.name == "w")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=weight))
    model.graph.initializer.remove(weight)
    check_against_onnxruntime(model)


FOUR_BITS = f"""{HEAD} g (float[3] x) => (float[3] y) <float s = {{0.5}}, int4 z = {{1}}>
    {{ q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }}"""


def test_numbers_are_cut_to_four_bits() -> None:
    model = onnx.parser.parse_model(FOUR_BITS)
    found = compile_graph(from_onnx(model)).run({"x": np.array([-90.0, 1.0, 90.0], np.float32)})
    np.testing.assert_array_equal(found["y"].numpy(), [-4.5, 1.0, 3.0])


def test_an_output_of_four_bits_is_refused() -> None:
    text = FOUR_BITS.replace("(float[3] y)", "(int4[3] q)").replace("y = DequantizeLinear (q, s, z)", "")
    with pytest.raises(Unsupported, match="expected a type of whole bytes"):
        from_onnx(onnx.parser.parse_model(text))


# An If of a known condition, by shapes or constants, is the branch that it takes.

# What torch exports for x.squeeze(1): ask for the size, and leave a size other than 1 alone.
SQUEEZE = """
g (float[2, n, 3] x) => (float[2, k] y) {
    all = Shape(x)
    one = Constant <value_ints = [1]> ()
    n = Gather(all, one)
    is_one = Equal(n, one)
    squeezed = If (is_one) <
        then_branch = small () => (s) { axis = Constant <value_ints = [1]> () s = Squeeze(x, axis) },
        else_branch = large () => (i) { i = Identity(x) }
    >
    y = Relu(squeezed)
}
"""


def test_the_condition_decides_at_import() -> None:
    assert ops(SQUEEZE, shapes={"x": (2, 1, 3)}) == (
        '%1 "s": float32[2, 3] = aten.reshape.default(%0) {shape: [2, 3]}\n'
        '%2 "y": float32[2, 3] = aten.relu.default(%1)'
    )
    assert ops(SQUEEZE, dims={"n": 4}) == '%1 "y": float32[2, 4, 3] = aten.relu.default(%0)'


def test_two_ifs_may_use_the_same_names_inside() -> None:
    branch = "then_branch = a () => (t) { t = Neg(x) }, else_branch = b () => (t) { t = Abs(x) }"
    text = (
        "g (float[2] x) => (float[2] y) { c = Constant <value_int = 1> () yes = Cast <to = 9> (c) no = Not(yes) "
        f"p = If (yes) <{branch}> q = If (no) <{branch}> y = Add(p, q) }}"
    )
    assert ops(text).splitlines() == [
        '%1 "t": float32[2] = aten.neg.default(%0)',
        '%2 "t.branch": float32[2] = aten.abs.default(%0)',
        '%3 "y": float32[2] = aten.add.Tensor(%1, %2)',
    ]


def test_a_later_node_may_have_a_name_of_the_branch() -> None:
    branch = "then_branch = a () => (z) { z = Neg(x) }, else_branch = b () => (z) { z = Abs(x) }"
    text = (
        "g (float[2] x) => (float[2] z) { c = Constant <value_int = 1> () yes = Cast <to = 9> (c) "
        f"p = If (yes) <{branch}> z = Exp(p) }}"
    )
    assert ops(text) == '%1 "z.branch": float32[2] = aten.neg.default(%0)\n%2 "z": float32[2] = aten.exp.default(%1)'


def test_an_if_inside_of_an_if() -> None:
    inner = "then_branch = c () => (u) { u = Neg(t) }, else_branch = d () => (u) { u = Abs(t) }"
    text = (
        "g (float[2] x) => (float[2] y) { t = Exp(x) c = Constant <value_int = 1> () yes = Cast <to = 9> (c) "
        f"y = If (yes) <then_branch = a () => (v) {{ no = Not(yes) v = If (no) <{inner}> }}, "
        "else_branch = b () => (w) { w = Identity(x) }> }"
    )
    assert ops(text) == '%1 "t": float32[2] = aten.exp.default(%0)\n%2 "y": float32[2] = aten.abs.default(%1)'


def test_a_condition_of_the_run_is_refused() -> None:
    branch = "then_branch = a () => (t) { t = Neg(x) }, else_branch = b () => (t) { t = Abs(x) }"
    text = f"g (float[2] x, bool c) => (float[2] y) {{ y = If (c) <{branch}> }}"
    with pytest.raises(Unsupported, match=r"- If \(its condition is known only at run time\): 1 × at 'y'"):
        ops(text)
