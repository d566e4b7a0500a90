"""float16 and bfloat16: what is converted, what the draws keep in float32, and why."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from passes import PassRun, PolicyError
from passes.context import PassContext
from passes.proof.precision import ValueRange
from passes.tools import to_bf16, to_fp16
from tests.support.onnx_models import biased_attention, matrix, model_of


def computed_in(run: PassRun, dtype: int) -> list[str]:
    """The operators that make values of a type, without casts."""
    graph = onnx.shape_inference.infer_shapes(run.to_proto()).graph
    kinds = {info.name: info.type.tensor_type.elem_type for info in (*graph.value_info, *graph.output)}
    return [node.op_type for node in graph.node if node.op_type != "Cast" and kinds.get(node.output[0]) == dtype]


FLOAT, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16


def test_attention_in_float16(context: PassContext) -> None:
    run = to_fp16(biased_attention(), context=context)
    assert run.rows[-1].reason == "20 nodes in float16"
    assert computed_in(run, FLOAT) == []
    assert {errors.judged_as for errors in run.rows[-1].errors.values()} == {"float16"}


@pytest.mark.parametrize(
    ("body", "kept", "reason"),
    [
        ("m = Mul (x, big)\n y = Tanh (m)", ["Mul", "Tanh"], "m reaches"),
        ("m = Mul (x, mask)\n y = Softmax (m)", ["Mul", "Softmax"], "mask reaches 3.4e+38"),
        (
            "v = Mul (x, x)\n s = Add (v, eps)\n r = Sqrt (s)\n y = Div (x, r)",
            ["Add"],
            "eps is 1e-12 at most, too small",
        ),
        ("m = Exp (x)\n n = Mul (m, big)\n t = Tanh (n)\n y = Add (t, x)", ["Mul", "Tanh"], "n reaches"),
    ],
)
def test_what_leaves_the_range_stays(body: str, kept: list[str], reason: str, context: PassContext) -> None:
    stored = {"big": np.float32(1e6), "mask": np.float32(3.4e38), "eps": np.float32(1e-12)}
    text = f"g (float[4, 8] x) => (float[4, 8] y) {{ {body} }}"
    used = {name: value for name, value in stored.items() if f", {name})" in body}
    run = to_fp16(model_of(text, **used), context=context)
    assert set(kept) <= set(computed_in(run, FLOAT))
    assert reason in run.rows[-1].reason


def test_a_small_difference_of_large_numbers_stays(context: PassContext) -> None:
    """Rounding (x + 1000) leaves nothing of x: the sum and the difference stay, the product does not."""
    text = """
    g (float[4, 8] x) => (float[4, 8] y) <float[8, 8] w> {
      large = Add (x, offset)
      small = Sub (large, offset)
      y = MatMul (small, w)
    }"""
    run = to_fp16(model_of(text, w=matrix(8, 8, 1), offset=np.float32(1000)), context=context)
    assert {"Add", "Sub"} == {*computed_in(run, FLOAT)}
    assert "its SQNR falls from" in run.rows[-1].reason


def test_bodies_quantizers_and_fixed_operands_stay(context: PassContext) -> None:
    text = """
    g (float[1, 2, 4, 4] x, bool p) => (float[1, 2, 8, 8] y) {
      a = Relu (x)
      b = If (p)
        <then_branch = t () => (float[1, 2, 4, 4] u) { u = Neg (a) },
        else_branch = e () => (float[1, 2, 4, 4] v) { v = Abs (a) }>
      q = QuantizeLinear (b, scale, zero)
      d = DequantizeLinear (q, scale, zero)
      y = Resize <mode = "nearest"> (d, , scales)
    }"""
    scales = {"scale": np.float32(0.1), "zero": np.uint8(128), "scales": np.float32([1, 1, 2, 2])}
    run = to_fp16(model_of(text, **scales), context=context)
    assert "its body computes in float32" in run.rows[-1].reason
    assert "its scales are float32" in run.rows[-1].reason
    resize = next(node for node in run.model.proto.graph.node if node.op_type == "Resize")
    assert resize.input[2] == "scales"
    assert "Resize" in computed_in(run, HALF) or resize.output[0].endswith("float16")


def test_what_the_user_keeps(context: PassContext) -> None:
    run = to_fp16(biased_attention(), keep=["Softmax"], context=context)
    assert "Softmax: keep names it" in run.rows[-1].reason
    assert computed_in(run, FLOAT) == ["Softmax"]
    with pytest.raises(PolicyError, match="no node or operator 'Softmaxx'"):
        to_fp16(biased_attention(), keep=["Softmaxx"], context=context)


def test_a_node_whose_name_has_brackets_is_kept_by_its_name(context: PassContext) -> None:
    model = biased_attention()
    next(node for node in model.graph.node if node.op_type == "Softmax").name = "layer[0]/Softmax"
    assert computed_in(to_fp16(model, keep=["layer[0]/Softmax"], context=context), FLOAT) == ["Softmax"]


def test_a_proof_rounds_where_onnxruntime_computes_in_float32(context: PassContext) -> None:
    model = model_of(
        "g (float[1, 1, 4, 4] x) => (float[1, 1, 3, 3] y) { y = Conv (x, w) }", w=np.ones((1, 1, 2, 2), "f")
    )
    (errors,) = to_fp16(model, context=context).rows[-1].errors.values()
    assert errors.max_abs > 1e-5


def test_bfloat16_is_proven_with_each_result_rounded(context: PassContext) -> None:
    run = to_bf16(biased_attention(), context=context)
    (errors,) = run.rows[-1].errors.values()
    assert errors.judged_as == "bfloat16"
    assert errors.max_abs > 1e-3  # rounding shows, so the proof did not run float32
    assert "Add" in computed_in(run, onnx.TensorProto.BFLOAT16)
    assert "onnxruntime's CPU provider has no Relu of opset 14" in run.rows[-1].reason


def test_small_falls_that_add_up(context: PassContext) -> None:
    """Forty products round a little each, and an exponential shows the sum: half of what is left stays at the end."""
    chain = [f"v{place + 1} = Mul (v{place}, {'ab'[place % 2]})" for place in range(40)]
    text = f"g (float[64] v0) => (float[64] y) {{ {chr(10).join(chain)} z = Mul (v40, c) y = Exp (z) }}"
    model = model_of(text, a=np.float32(1.0123), b=np.float32(0.9871), c=np.float32(12))
    run = to_bf16(model, context=context)
    assert 0 < len(computed_in(run, onnx.TensorProto.BFLOAT16)) < 20


def test_ranges() -> None:
    assert ValueRange.of(np.float32([np.inf, 7e4])).describe("float16") == "reaches 7e+04, and float16 ends at 65504"
    assert ValueRange.of(np.float32([np.inf, 7e4])).describe("bfloat16") == ""
    assert ValueRange.of(np.zeros(3, np.float32)).describe("float16") == ""


def test_sequences_stay_in_float32(context: PassContext) -> None:
    """An output keeps its type, and Cast takes no sequence."""
    text = """
        g (float[4, 8] x) => (seq(float[1, 8]) s, float[4, 8] y) { s = SplitToSequence (x)
          y = Relu (x) }
    """
    run = to_fp16(model_of(text), context=context)
    assert "SplitToSequence: it reads or makes a sequence" in run.rows[-1].words
    assert {node.op_type for node in run.to_proto().graph.node} == {"Cast", "Relu", "SplitToSequence"}


def test_random_values_are_the_same_on_both_sides(context: PassContext) -> None:
    text = """
        g (float[4, 8] x) => (float[4, 8] y) { r = RandomUniformLike <high = 8.0> (x)
          s = Add (x, r)
          y = Mul (s, s) }
    """
    run = to_fp16(model_of(text), context=context)
    assert not [node.op_type for node in run.model.proto.graph.node if node.op_type in computed_in(run, FLOAT)]
    assert {errors.judged_as for errors in run.rows[-1].errors.values()} == {"float16"}


def test_a_model_of_float16_has_nothing_to_convert(context: PassContext) -> None:
    run = to_fp16(model_of("g (float16[2] x) => (float16[2] y) { y = Relu (x) }"), context=context)
    assert (run.rows[-1].changed, run.rows[-1].words) == (False, "no node computes in float32")


@pytest.mark.parametrize(
    ("opset", "text"),
    [
        (21, "{ b = Cast<to = 16>(x) v = Cast<to = 16>(w) p = MatMul(b, v) y = Cast<to = 1>(p) }"),
        (23, "{ b = Cast<to = 23>(x) p = Cast<to = 1>(b) y = MatMul(p, w) }"),
    ],
    ids=["a product of bfloat16", "a cast to float4"],
)
def test_a_model_that_onnxruntime_does_not_run_is_measured_by_the_reference(opset: int, text: str) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 11, opset_import: ["": {opset}]> g (float[2, 4] x) => (float[2, 4] y) {text}'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    row = to_fp16(model).rows[-1]
    assert row.changed
    assert "in float16" in row.words
