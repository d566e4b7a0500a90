"""Blocks whose scales have few bits: MXFP4, MXFP8, NVFP4 and LPBQ, as ONNX's own evaluator and AIMET have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from typer.testing import CliRunner

from passes.encodings.aimet import AimetVersion, from_aimet, to_aimet
from passes.encodings.encoding import NoEncoding, fit_encodings
from passes.encodings.from_qdq import read_qdq
from passes.encodings.stored import EncodedArray, derive_encoding
from passes.errors import UsageError
from passes.weights.detached import attach
from passes.weights.sessions import Session
from pipeline.cli import app
from pipeline.config.quantsim import FormatsConfig, parse_precision
from pipeline.quantsim.encodings import encode_weight, quantize, round_trip
from pipeline.quantsim.qdq import insert_qdq
from tests.pipeline.quantsim.pictures_of_qdq import model_of, nodes_of

FORMATS = ("mxfp4", "mxfp8", "mxfp8e5m2", "nvfp4", "lpbq32", "fp4e2m1/block16")


def draw_weight(rows: int = 24, columns: int = 80) -> np.ndarray:
    """Blocks and rows of very different sizes, and one block of zeros; 80 is no multiple of 32."""
    draw = np.random.default_rng(0)
    sizes = np.exp(draw.normal(size=(rows, 1)) * 3) * np.exp(np.repeat(draw.normal(size=(rows, columns // 16)), 16, 1))
    weight = draw.normal(size=(rows, columns)) * sizes
    weight[0, :32] = 0
    return weight.astype(np.float32)


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_model_computes_with_the_values_of_the_format(text: str, axis: int) -> None:
    weight = draw_weight() if axis else np.ascontiguousarray(draw_weight().T)
    product = "Gemm <transB = 1>(x, w)" if axis else "MatMul(x, w)"
    model = model_of(f"g (float[2, 80] x) => (float[2, 24] y) {{ y = {product} }}", 25, w=weight)
    precision = parse_precision(text)
    assert str(precision) == text
    assert precision is not None
    encoding = encode_weight(weight, precision, axis)
    expected = round_trip(weight, encoding, is_stored=True)
    assert np.abs(expected - weight).max() < np.abs(weight).max() / 3
    quantized = insert_qdq(model, {"w": encoding})
    whole = attach(quantized)
    onnx.checker.check_model(whole, full_check=True)
    x = np.random.default_rng(1).normal(size=(2, 80)).astype(np.float32)
    assert not Session.of(quantized).is_evaluated
    own = Session.of(model_of(f"g (float[2, 80] x) => (float[2, 24] y) {{ y = {product} }}", 25, w=expected))
    np.testing.assert_array_equal(Session.of(quantized).run({"x": x})["y"], own.run({"x": x})["y"])
    whole.graph.output.append(onnx.ValueInfoProto(name="w_dequantized"))  # by ONNX's evaluator alone
    results: Any = ReferenceEvaluator(whole).run(["w_dequantized"], {"x": x})
    np.testing.assert_array_equal(results[0], expected)


@pytest.mark.parametrize(
    ("text", "element"), [("mxfp4", "FLOAT4E2M1"), ("mxfp8", "FLOAT8E4M3FN"), ("mxfp8e5m2", "FLOAT8E5M2")]
)
def test_values_are_rounded_as_quantize_linear_of_onnx_does(text: str, element: str) -> None:
    weight = draw_weight(columns=64)
    precision = parse_precision(text)
    assert precision is not None
    encoding = encode_weight(weight, precision, 1)
    node = helper.make_node(
        "QuantizeLinear", ["w", "s"], ["q"], axis=1, block_size=32, output_dtype=TensorProto.DataType.Value(element)
    )
    scale = numpy_helper.from_array(encoding.scale.astype(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E8M0)), "s")
    info = helper.make_tensor_value_info("w", TensorProto.FLOAT, weight.shape)
    graph = helper.make_graph([node], "g", [info], [onnx.ValueInfoProto(name="q")], [scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    (found,) = ReferenceEvaluator(model).run(None, {"w": weight})
    np.testing.assert_array_equal(quantize(weight, encoding), np.asarray(found).astype(np.float32))


def test_the_scale_of_a_block_is_that_of_the_specification() -> None:
    """OCP's Microscaling Formats 1.0, 6.3: the greatest power of 2 in the block, over that of the element's format."""
    weight = np.zeros((1, 96), np.float32)
    weight[0, [0, 1, 32, 64]] = (7.0, 5.1, 0.24, -(2.0**40))  # 7 is beyond 6, and 5.1 is nearer to 6 than to 4
    precision = parse_precision("mxfp4")
    assert precision is not None
    encoding = encode_weight(weight, precision, 1)
    np.testing.assert_array_equal(encoding.scale, [[1.0, 2.0**-5, 2.0**38]])
    np.testing.assert_array_equal(quantize(weight, encoding)[0, [0, 1, 32, 64]], [6.0, 6.0, 6.0, -4.0])


def test_scales_of_blocks_are_scaled_in_turn() -> None:
    weight = np.zeros((2, 64), np.float32)
    weight[0, [0, 32]], weight[1, [0, 32]] = (7.0, 3.3), (0.7, 0.01)
    lpbq = parse_precision("lpbq32")
    assert lpbq is not None
    encoding = encode_weight(weight, lpbq, 1)
    assert encoding.global_scale is not None
    np.testing.assert_allclose(encoding.global_scale, [[1 / 16], [1 / 160]], rtol=1e-6)
    np.testing.assert_array_equal(encoding.inner_scale(), [[16, 8], [16, 1]])
    assert (lpbq.lowest, lpbq.highest) == (-8, 7)
    model = model_of("g (float[2, 64] x) => (float[2, 2] y) { y = Gemm <transB = 1>(x, w) }", 21, w=weight)
    assert nodes_of(insert_qdq(model, {"w": encoding})) == [
        "w_scale = DequantizeLinear <axis: int = 0> (w_block_scale, w_global_scale)",
        "w_dequantized = DequantizeLinear <axis: int = 1, block_size: int = 32> (w_quantized, w_scale)",
        "y = Gemm <transB: int = 1> (x, w_dequantized)",
    ]
    (row,) = to_aimet({"w": encoding}, {"w"})["param_encodings"]
    assert (row["enc_type"], row["bw"], row["compressed_bw"], row["block_size"]) == ("LPBQ", 8, 4, 32)
    assert (row["offset"], row["per_block_int_scale"]) == ([-128, -128], [16, 8, 16, 1])
    (row,) = to_aimet({"w": encoding}, {"w"}, "2.1.0")["encodings"]
    assert (row["axis"], row["y_scale"]["x"], row["y_scale"]["axis"]) == (1, [[16, 8], [16, 1]], 0)
    nvfp4 = parse_precision("nvfp4")
    assert nvfp4 is not None
    encoding = encode_weight(weight, nvfp4, 1)
    assert encoding.global_scale is not None
    assert float(encoding.global_scale) == pytest.approx(7 / 6 / 448)
    np.testing.assert_allclose(encoding.inner_scale()[:, ::2], [[448, 208], [44, 0.625]], rtol=1e-6)


def test_lpbq_has_the_smallest_scale_that_holds_a_block_as_in_aimet() -> None:
    """-8 counts: aimet-onnx 2.42 gives these integers and scales for the same weight."""
    weight = np.zeros((1, 96), np.float32)
    weight[0, [0, 1, 32, 64]] = (-8.0, 5.0, -3.9, 3.5)
    encoding = encode_weight(weight, parse_precision("lpbq32") or pytest.fail("no format"), 1)
    np.testing.assert_array_equal(encoding.inner_scale(), [[16, 8, 8]])
    np.testing.assert_array_equal(encoding.global_scale, [[1 / 16]])
    np.testing.assert_array_equal(quantize(weight, encoding)[0, [0, 1, 32, 64]], [-8, 5, -8, 7])


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0", "2.1.0"])
@pytest.mark.parametrize(
    ("text", "shape", "axis", "kernel"),
    [
        ("g (float[2, 64] x) => (float[2, 8] y) { y = MatMul(x, w) }", (64, 8), 0, ()),
        ("g (float[2, 64] x) => (float[2, 8] y) { y = Gemm <transB = 1>(x, w) }", (8, 64), 1, ()),
        ("g (float[1, 64, 5, 5] x) => (float[1, 8, 3, 3] y) { y = Conv(x, w) }", (8, 64, 3, 3), 1, (2, 3)),
        ("g (float[1, 64, 5, 5] x) => (float[1, 8, 7, 7] y) { y = ConvTranspose(x, w) }", (64, 8, 3, 3), 0, (2, 3)),
    ],
)
def test_lpbq_is_read_back_from_aimets_files(
    version: AimetVersion, text: str, shape: tuple[int, ...], axis: int, kernel: tuple[int, ...]
) -> None:
    draw = np.random.default_rng(0)
    weight = (draw.normal(size=shape) * np.exp(draw.normal(size=shape))).astype(np.float32)
    encoding = encode_weight(weight, parse_precision("lpbq32") or pytest.fail("no format"), axis, kernel)
    written = to_aimet({"w": encoding}, {"w"}, version)
    found = fit_encodings(from_aimet(written), model_of(text, w=weight))["w"]
    assert (found.precision, found.axis) == (encoding.precision, axis)
    np.testing.assert_array_equal(found.scale, encoding.scale)
    np.testing.assert_array_equal(found.global_scale, encoding.global_scale)
    for row in written["encodings"] if version == "2.0.0" else ():
        row["axis"] -= len(shape)  # counted from the end
        assert from_aimet(written)["w"].axis == axis


@pytest.mark.parametrize("format", ["int4/block32", "int8/block32"])
def test_an_axis_of_blocks_that_is_counted_from_the_end_is_that_axis(format: str) -> None:
    encoding = encode_weight(draw_weight(8, 64), parse_precision(format) or pytest.fail("no format"), 1)
    written = to_aimet({"w": encoding}, {"w"}, "2.0.0")
    written["encodings"][0]["axis"] = -1
    assert from_aimet(written)["w"].axis == 1


@pytest.mark.parametrize("axis", [0, 1])
def test_lpbq_is_read_back_from_the_quantized_model(axis: int) -> None:
    weight = draw_weight(64, 96) if axis else np.ascontiguousarray(draw_weight(64, 96).T)
    product = "Gemm <transB = 1>(x, w)" if axis else "MatMul(x, w)"
    model = model_of(f"g (float[2, 96] x) => (float[2, 64] y) {{ y = {product} }}", 21, w=weight)
    encoding = encode_weight(weight, parse_precision("lpbq32") or pytest.fail("no format"), axis)
    quantized = insert_qdq(model, {"w": encoding})
    ((name, found),) = read_qdq(quantized).items()
    assert name == "w"
    assert (found.precision, found.axis) == (encoding.precision, axis)
    np.testing.assert_array_equal(found.scale, encoding.scale)
    np.testing.assert_array_equal(found.global_scale, encoding.global_scale)
    for attribute in (entry for node in quantized.proto.graph.node for entry in node.attribute if entry.name == "axis"):
        attribute.i -= 2  # counted from the end
    assert read_qdq(quantized)["w"].axis == axis
    assert to_aimet({"w": found}, {"w"}) == to_aimet({"w": encoding}, {"w"})


@pytest.mark.parametrize(("key", "value"), [("compressed_bw", 2), ("per_block_int_scale", [17, 1])])
def test_another_kind_of_lpbq_is_refused(key: str, value: object) -> None:
    encoding = encode_weight(np.ones((1, 64), np.float32), parse_precision("lpbq32") or pytest.fail("no format"), 1)
    data = to_aimet({"w": encoding}, {"w"})
    data["param_encodings"][0][key] = value
    with pytest.raises(UsageError, match=r"expected 4 bits, 8 with the scales, and integers from 1 to 16"):
        from_aimet(data)


def test_a_transpose_keeps_the_scales_of_lpbq_and_a_cut_loses_them() -> None:
    weight = draw_weight(64, 64)
    encoding = encode_weight(weight, parse_precision("lpbq32") or pytest.fail("no format"), 1)
    moved, names = derive_encoding(weight.T, [EncodedArray("w", weight, encoding)])
    assert (names, moved.axis) == (("w",), 0)
    np.testing.assert_array_equal(quantize(weight.T, moved), quantize(weight, encoding).T)
    assert moved.global_scale is not None and moved.global_scale.shape == (1, 64)
    with pytest.raises(NoEncoding, match="only a Transpose keeps these"):
        derive_encoding(weight[:32], [EncodedArray("w", weight, encoding)])


def test_what_cannot_run_a_format_refuses_it(tmp_path: Path) -> None:
    model = model_of("g (float[2, 64] x) => (float[2, 8] y) { y = MatMul(x, w) }", 24, w=draw_weight(64, 16)[:, :8])
    path = tmp_path / "net.onnx"
    onnx.save(attach(model), path)

    settings = ["quantsim.profile=qnn-htp", "quantsim.rules={'op:*': {weights: nvfp4}}"]
    arguments = ["quantsim", str(path), "--out", str(tmp_path / "run"), *(f"--set={text}" for text in settings)]
    refusal = str(CliRunner().invoke(app, arguments).exception)
    assert refusal == (
        "quantsim.rules: w is to be nvfp4, which Qualcomm HTP (QNN) does not dequantize; give it another format, or "
        "take the profile weight-only"
    )
    with pytest.raises(ValueError, match="found activations in mxfp4, expected it for weights alone"):
        FormatsConfig(activations="mxfp4")
    encoding = encode_weight(draw_weight(), parse_precision("mxfp8") or pytest.fail("no format"), 1)
    with pytest.raises(UsageError, match="'w' is mxfp8, which AIMET's files have no form for"):
        to_aimet({"w": encoding}, {"w"})
    with pytest.raises(UsageError, match="expected a matrix or a convolution"):
        encode_weight(np.ones((3, 64, 8), np.float32), parse_precision("lpbq32") or pytest.fail("no format"), 1)
