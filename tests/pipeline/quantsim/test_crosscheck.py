"""A quantized model of another tool against the float model: where its error jumps."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from benchmarks.handoff.harness import run_tool, write_samples
from passes.weights.detached import DetachedModel, attach, detach
from pipeline.quantsim.crosscheck import compare_values, find_jump
from tests.pipeline.quantsim.pictures_of_qdq import model_of

FLOAT = """two (float[4, 8] x) => (float[4, 8] y) {
    first = MatMul(x, w)
    second = Add(first, b)
    third = Relu(second)
    y = MatMul(third, w)
}"""

BIAS_ADDED_TWICE = """two (float[4, 8] x) => (float[4, 8] y) {
    first = Gemm(x, w, b)
    second = Add(first, b)
    third = Relu(second)
    y = MatMul(third, w)
}"""

NNCF_AT_OPSET_20 = """two (float[4, 8] x) => (float[4, 8] y) {
    first = com.microsoft.MatMulNBits<K = 8, N = 8, bits = 4, block_size = 16>(x, packed, scales, , , b)
    second = Add(first, b)
    third = Relu(second)
    y = MatMul(third, w)
}"""
"""What NNCF 3.4.0 makes of the first two operators: one with the bias, and the Add is still there."""

OTHER_NAMES = """two (float[4, 8] x) => (float[4, 8] y) {
    first = MatMul(x, w)
    renamed = Add(first, b)
    turned = Transpose(renamed)
    third = Relu(turned)
    y = Gemm<transA = 1>(third, w)
}"""


def model(text: str, noise: float = 0.0) -> DetachedModel:
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((8, 8)).astype(np.float32)
    bias = draw.standard_normal(8).astype(np.float32)
    step = weight.max() * noise
    return model_of(text, w=np.rint(weight / step) * step if noise else weight, b=bias)


SAMPLES = [{"x": np.random.default_rng(seed).standard_normal((4, 8)).astype(np.float32)} for seed in range(3)]


def test_a_bias_that_is_added_twice_is_found_where_it_comes_in() -> None:
    jump = find_jump(compare_values(model(FLOAT), model(BIAS_ADDED_TWICE), SAMPLES))
    assert jump is not None
    assert (jump.tensor, jump.op, jump.read_db) == ("first", "MatMul", math.inf)
    assert jump.sqnr_db < 10


def pack_in_4_bits(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight [8, 8] as MatMulNBits reads it: channel by channel, two numbers a byte, 8 for zero, in blocks of 16."""
    scales = np.abs(weight).max(0) / 7
    numbers = np.full((8, 16), 8, np.uint8)
    numbers[:, :8] = np.rint(weight / scales).T + 8
    return (numbers[:, ::2] | numbers[:, 1::2] << 4).reshape(8, 1, 8), scales.astype(np.float32)


def of_nncf(text: str) -> DetachedModel:
    weights = {name: array for name, array in constants_of(model(FLOAT)).items() if name in ("w", "b")}
    packed, scales = pack_in_4_bits(weights["w"])
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>\n{text}')
    arrays = {**weights, "packed": packed, "scales": scales}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return detach(proto)


def constants_of(whole: DetachedModel) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in attach(whole).graph.initializer}


def test_the_second_bias_of_nncf_is_found_and_4_bits_alone_are_no_jump() -> None:
    jump = find_jump(compare_values(model(FLOAT), of_nncf(NNCF_AT_OPSET_20), SAMPLES))
    assert jump is not None
    assert (jump.tensor, jump.op) == ("first", "MatMul")
    once = of_nncf(NNCF_AT_OPSET_20.replace("scales, , , b)", "scales)"))
    values = compare_values(model(FLOAT), once, SAMPLES)
    assert values[0].tensor == "first"
    assert values[0].own_db < 40
    assert find_jump(values) is None


WIDE = """two (float[16, 64] x) => (float[16, 64] y) {
    first = MatMul(x, w)
    second = Add(b, first)
    third = Relu(second)
    y = MatMul(third, w)
}"""


def wide_model(*, bits: int = 0, times: float = 1.0, size: float = 1.0) -> DetachedModel:
    """Products of 64 numbers, whose weights have `bits`, and a bias of the standard deviation `size`, added `times`."""
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((64, 64)).astype(np.float32)
    step = np.abs(weight).max(0) / (2 ** (bits - 1) - 1)
    bias = (size * draw.standard_normal(64)).astype(np.float32)
    text = WIDE if times == 1 else WIDE.replace("MatMul(x, w)", "Gemm(x, w, more)")
    rounded = (np.rint(weight / step) * step).astype(np.float32) if bits else weight
    more = {} if times == 1 else {"more": (times - 1) * bias}
    return model_of(text, w=rounded, b=bias, **more)


WIDE_SAMPLES = [
    {"x": (0.3 + np.random.default_rng(seed).standard_normal((16, 64))).astype(np.float32)} for seed in range(3)
]


@pytest.mark.parametrize(("bits", "size"), [(4, 1.2), (4, 0.7), (8, 1.2), (8, 0.1)])
@pytest.mark.parametrize("times", [2.0, 0.0])
def test_a_small_bias_that_comes_twice_or_never_is_found_in_the_noise_of_rounding(
    size: float, bits: int, times: float
) -> None:
    """A bias an eighth as large as the products leaves 17 dB, as weights of 4 bits may; a smaller one still more."""
    values = compare_values(wide_model(size=size), wide_model(bits=bits, times=times, size=size), WIDE_SAMPLES)
    assert values[0].own_db > 12
    jump = find_jump(values)
    assert jump is not None
    assert (jump.tensor, jump.constant) == ("first", "b")


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("size", [8.0, 1.0, 0.1, 0.0])
def test_a_bias_that_comes_once_is_no_jump(bits: int, size: float) -> None:
    values = compare_values(wide_model(size=size), wide_model(bits=bits, size=size), WIDE_SAMPLES)
    assert not any(value.constant for value in values)
    assert find_jump(values, expected_db=5) is None


def test_a_difference_that_a_bias_explains_in_part_is_not_called_a_second_bias() -> None:
    """As of MiniLM whose mask takes all bits: what an attention leaves out has to do with the bias after it."""
    bias = np.asarray(constants_of(wide_model())["b"])
    other = np.random.default_rng(9).standard_normal(64).astype(np.float32)
    shifted = {**constants_of(wide_model()), "more": bias + 1.1 * other}
    found = compare_values(
        wide_model(), model_of(WIDE.replace("MatMul(x, w)", "Gemm(x, w, more)"), **shifted), WIDE_SAMPLES
    )
    assert [value.tensor for value in found] == ["first", "second", "third", "y"]
    assert not any(value.constant for value in found)


def test_a_second_bias_of_a_convolution_is_found() -> None:
    draw = np.random.default_rng(0)
    text = "g (float[1, 4, 8, 8] x) => (float[1, 32, 8, 8] y) { c = Conv <pads = [1, 1, 1, 1]> (x, w, b) y = Relu(c) }"
    weight, bias = (draw.standard_normal(shape).astype(np.float32) for shape in ((32, 4, 3, 3), 32))
    samples = [{"x": draw.standard_normal((1, 4, 8, 8)).astype(np.float32)} for _ in range(2)]
    once, twice = (model_of(text, w=weight, b=bias * times / 4) for times in (1, 2))
    jump = find_jump(compare_values(once, twice, samples))
    assert jump is not None
    assert jump.own_db > 12
    assert (jump.tensor, jump.constant) == ("c", "b")


@pytest.mark.skipif(not os.environ.get("NNCF_PYTHON"), reason="NNCF_PYTHON names no interpreter that has NNCF")
def test_the_second_bias_is_found_in_the_model_that_nncf_writes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    # Where two products share a weight, NNCF writes an invalid model.
    shapes = {"w": ((64, 64), 1), "b": ((64,), 8), "v": ((64, 64), 1)}
    arrays = {name: (draw.standard_normal(shape) * size).astype(np.float32) for name, (shape, size) in shapes.items()}
    text = FLOAT.replace("[4, 8]", "[4, 64]").replace("(third, w)", "(third, v)")
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]>\n{text}')
    for node in proto.graph.node:
        node.name = node.output[0]
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    samples = [{"x": draw.standard_normal((4, 64)).astype(np.float32)} for _ in range(3)]
    folder = write_samples(samples, tmp_path / "samples")
    run = run_tool("nncf-int4", os.environ["NNCF_PYTHON"], path, folder, folder, tmp_path / "out")
    assert not run.failure
    theirs = onnx.load(run.model)
    assert [node.op_type for node in theirs.graph.node][:2] == ["MatMulNBits", "Add"]
    jump = find_jump(compare_values(detach(proto), detach(theirs), samples))
    assert jump is not None
    assert (jump.tensor, jump.op) == ("first", "MatMul")


@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_weights_are_no_jump(bits: int) -> None:
    rounded = model(FLOAT, noise=2.0 ** (1 - bits))
    values = compare_values(model(FLOAT), rounded, SAMPLES)
    assert [value.tensor for value in values] == ["first", "second", "third", "y"]
    assert all(6 * bits - 10 < value.own_db for value in values)
    assert values[0].sqnr_db < 6 * bits + 10
    assert find_jump(values) is None


def test_a_value_without_a_counterpart_passes_on_what_was_known() -> None:
    values = compare_values(model(FLOAT), model(OTHER_NAMES, noise=0.1), SAMPLES)
    first, last = values  # `second` has another name there, and `third` another shape
    assert (first.tensor, last.tensor) == ("first", "y")
    assert last.read_db == first.sqnr_db


def test_a_value_that_overflows_is_the_jump() -> None:
    overflown = model(FLOAT.replace("Relu(second)", "Exp(second)"))
    overflown.proto.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.full(8, 99, np.float32), "b"))
    jump = find_jump(compare_values(model(FLOAT), overflown, SAMPLES))
    assert jump is not None
    values = {value.tensor: value.sqnr_db for value in compare_values(model(FLOAT), overflown, SAMPLES)}
    assert values["third"] == values["y"] == -math.inf


def test_equal_models_differ_nowhere() -> None:
    values = compare_values(model(FLOAT), model(FLOAT), SAMPLES)
    assert {value.sqnr_db for value in values} == {value.own_db for value in values} == {math.inf}
