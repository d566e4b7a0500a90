"""The run with onnxruntime's optimizations: large models through files, and operators that it leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import pytest

from passes.errors import UsageError
from passes.weights.detached import DetachedModel
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import place
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.simulation import DeviceLike, DroppedOperator, Feeds, compare_outputs, simulate_outputs
from tests.pipeline.quantsim.pictures_of_qdq import model_of, rule

RELU = "g (float[4, 64] x) => (float[4, 64] y) { h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }"


def relu() -> DetachedModel:
    draw = np.random.default_rng(0)
    return model_of(RELU, w=_normal(draw, 64, 64), v=_normal(draw, 64, 64))


def samples() -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(1)
    return [{"x": _normal(draw, 4, 64)} for _ in range(2)]


def quantize(model: DetachedModel, weights: str, activations: str) -> DetachedModel:
    placement = place(model, [rule("op:*", weights, activations)])
    return insert_qdq(model, encode(placement, calibrate(model, placement, samples()), model))


def run_device_like(
    model: DetachedModel, quantized: DetachedModel, samples: Iterable[Feeds], folder: Path
) -> DeviceLike:
    return simulate_outputs(model, quantized, samples, folder)[1]


def _normal(draw: np.random.Generator, *shape: int) -> np.ndarray:
    return draw.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("weights", "activations"), [("int8/channel", "uint8"), ("int16/channel", "uint16")])
def test_above_the_limit_weights_are_in_files_and_numbers_are_the_same(
    weights: str, activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = relu()
    quantized = quantize(model, weights, activations)
    for name in ("inside", "beside"):
        (tmp_path / name).mkdir()
    inside = run_device_like(model, quantized, samples(), tmp_path / "inside")
    monkeypatch.setattr("pipeline.quantsim.simulation.PROTOBUF_LIMIT", 1024)
    beside = run_device_like(model, quantized, samples(), tmp_path / "beside")
    assert beside == inside
    assert not list((tmp_path / "inside").glob("*data"))
    assert sum(file.stat().st_size for file in (tmp_path / "beside").glob("quantized.onnx.*data")) >= 64 * 64
    assert (tmp_path / "beside" / "device_like.onnx.data").exists()
    source = onnx.load(tmp_path / "beside" / "quantized.onnx", load_external_data=False)
    assert source.ByteSize() < 64 * 64 < onnx.load(tmp_path / "inside" / "quantized.onnx").ByteSize()


@pytest.mark.parametrize(
    ("activations", "dtype"),
    [("int4", "int4"), ("fp8e4m3", "float8_e4m3fn"), ("uint4", ""), ("int8", ""), ("uint8", ""), ("int16", "")],
)
def test_a_relu_that_onnxruntime_drops_is_named(activations: str, dtype: str, tmp_path: Path) -> None:
    """uint4 has no number below zero here, so that its quantizer does what the Relu does, and dropping it is right."""
    model = relu()
    quantized = quantize(model, "int8/channel", activations)
    by_specification = compare_outputs(model, quantized, samples())["y"].sqnr_db
    device = run_device_like(model, quantized, samples(), tmp_path)
    lost = by_specification - device.outputs["y"].sqnr_db
    if dtype:
        assert lost > 5
        assert device.dropped == (DroppedOperator("Relu", "r", dtype),)
        assert f"such as the Relu of 'r' before {dtype}" in " ".join(device.notes())
    else:
        assert lost < 1
        assert (device.dropped, list(device.notes())) == ((), [])


def test_a_relu_in_front_of_other_numbers_than_its_own_is_not_named(tmp_path: Path) -> None:
    """What reads the Relu in float keeps it, and a Clip to fewer bits stands between it and the quantizer."""
    model = relu()
    kept = place(model, [rule("op:*", "int8/channel", "int4"), rule("tensor:r", activations="float")])
    quantized = insert_qdq(model, encode(kept, calibrate(model, kept, samples()), model))
    assert run_device_like(model, quantized, samples(), tmp_path).dropped == ()
    clipped = quantize(model, "int8/channel", "int3")
    assert run_device_like(model, clipped, samples(), tmp_path).dropped == ()


@pytest.mark.parametrize(
    ("text", "activations", "reason"),
    [
        (RELU, "int8", "QLinearMatMul"),
        (RELU, "uint8", "QLinearMatMul"),
        (
            "g (float[4, 64] x) => (float[1, 4, 64] y) { h = MatMul (x, w) y = Unsqueeze (h, v) }",
            "int5/asymmetric",
            "output_dtype INT8 does not match",
        ),
    ],
)
def test_what_the_optimizations_make_unable_to_run_is_a_result_with_the_reason(
    text: str, activations: str, reason: str, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    second = _normal(draw, 64, 64) if text == RELU else np.array([0])
    model = model_of(text, w=_normal(draw, 64, 64), v=second)
    quantized = quantize(model, "int8/block32", activations)
    assert compare_outputs(model, quantized, samples())["y"].sqnr_db > 15
    device = run_device_like(model, quantized, samples(), tmp_path)
    assert (device.outputs, device.fused) == ({}, {})
    assert reason in device.not_run
    (note,) = device.notes()
    assert device.not_run in note


def test_a_failure_of_the_float_model_is_not_taken_for_one_of_the_optimizations(tmp_path: Path) -> None:
    model = relu()
    with pytest.raises(UsageError, match="the float model does not run"):
        run_device_like(model, quantize(model, "int8", "uint8"), [{"x": np.zeros((4, 63), np.float32)}], tmp_path)


GEMM = "g (float[4, 64] x) => (float[4, 64] y) { h = Gemm (x, w, b) r = Relu (h) y = Gemm (r, v, b) }"
MOVED = "g (float[4, 64] x) => (float[4, 64] y) { t = Transpose (w) y = Gemm (x, t, b) }"
CONV = "g (float[1, 64, 8, 8] x) => (float[1, 64, 8, 8] y) { y = Conv (x, w, b) }"


@pytest.mark.parametrize(("text", "bits"), [(GEMM, 8), (GEMM, 16), (MOVED, 16), (CONV, 16)])
def test_weights_that_a_rule_leaves_in_float_get_no_8_bits(text: str, bits: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    sizes = (64, 64, 1, 1) if text == CONV else (64, 64)
    model = model_of(text, w=_normal(draw, *sizes), v=_normal(draw, 64, 64), b=_normal(draw, 64))
    shape = (1, 64, 8, 8) if text == CONV else (4, 64)
    feeds = [{"x": _normal(draw, *shape)}]
    placement = place(model, [rule("op:*", "float", f"uint{bits}")])
    quantized = insert_qdq(model, encode(placement, calibrate(model, placement, feeds), model))
    wanted = compare_outputs(model, quantized, feeds)["y"].sqnr_db
    device = run_device_like(model, quantized, feeds, tmp_path)
    assert wanted > (75 if bits == 16 else 30)
    assert device.outputs["y"].sqnr_db == pytest.approx(wanted, abs=0.5)
    assert device.fused["DequantizeLinear"] == device.fused["QuantizeLinear"]


def test_a_bias_in_float_still_has_integer_kernels_where_all_weights_are_quantized(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    model = model_of(GEMM, w=_normal(draw, 64, 64), v=_normal(draw, 64, 64), b=_normal(draw, 64))
    placement = place(model, [rule("op:*", "int8/channel", "uint8"), rule("tensor:b", activations="float")])
    quantized = insert_qdq(model, encode(placement, calibrate(model, placement, samples()), model))
    assert run_device_like(model, quantized, samples(), tmp_path).fused["com.microsoft.QGemm"] == 2
    placement = place(model, [rule("op:*", "int8/channel", "uint8"), rule("tensor:[wxb]", "float", "float")])
    quantized = insert_qdq(model, encode(placement, calibrate(model, placement, samples()), model))
    fused = run_device_like(model, quantized, samples(), tmp_path).fused
    assert fused["com.microsoft.QGemm"] == 1, "a product of floats is none whose weight gets 8 bits"


@pytest.mark.parametrize("formats", ["float", "uint8"])
def test_a_bias_in_float_that_onnxruntime_rounds_is_named(formats: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    b, c = _normal(draw, 64), _normal(draw, 64)
    model = model_of(GEMM.replace("v, b", "v, c"), w=_normal(draw, 64, 64), v=_normal(draw, 64, 64), b=b, c=c)
    placement = place(model, [rule("op:*", "int8/channel", "uint8"), rule("tensor:[bc]", activations=formats)])
    quantized = insert_qdq(model, encode(placement, calibrate(model, placement, samples()), model))
    device = run_device_like(model, quantized, samples(), tmp_path)
    named = "onnxruntime rounds 2 biases in float to 32 bits in the scale of the products, such as 'b'"
    assert device.rounded_biases == (("b", "c") if formats == "float" else ())
    assert (named in " ".join(device.notes())) == (formats == "float")


def test_the_largest_difference_stays_what_is_no_number() -> None:
    size, root = (model_of(f"g (float[2] x) => (float[2] y) {{ y = {op} (x) }}") for op in ("Abs", "Sqrt"))
    feeds = [{"x": np.full(2, number, np.float32)} for number in (4, -4)]
    assert np.isnan(compare_outputs(size, root, feeds)["y"].max_abs)
