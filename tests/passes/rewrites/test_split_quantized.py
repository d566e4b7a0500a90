"""`split-qkv` of merged products whose weights are quantized: packed in blocks, or with whole numbers in and out."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from passes.rewrites.split_merged import split_gate_up, split_qkv
from passes.structures import STRUCTURES
from tests.passes.rewrites.merged_models import assert_parts_of, split_and_compare
from tests.support.onnx_models import detached
from tests.support.onnx_text import ATTENTION, arrays_of, lines_of, merged_model, picture

PACKED = "com.microsoft.MatMulNBits <K = 32, N = 96, bits = 4, block_size = 16>"

PRODUCT = "MatMulNBits <K = 32, N = 32, bits = 4, block_size = 16>"

THREE = "q, k, v = Split <axis = 3> (qkv, #[32, 32, 32])"

FORMS = {
    "scales as a matrix": (
        f"""g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <uint8[96, 2, 8] qkv.packed, float[96, 2] qkv.scales> {{
            qkv = {PACKED} (x, qkv.packed, qkv.scales)
            {THREE}""",
        "(x, qkv.packed.ROLE, qkv.scales.ROLE)",
    ),
    "scales and zero points as vectors, with a bias": (
        f"""g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y)
            <uint8[96, 2, 8] w, float[192] scales, uint8[96] zeros, float[96] bias> {{
            qkv = {PACKED} (x, w, scales, zeros, , bias)
            {THREE}""",
        "(x, w.ROLE, scales.ROLE, zeros.ROLE, , bias.ROLE)",
    ),
    "blocks in another order": (
        f"""g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y)
            <uint8[96, 2, 8] w, float[192] scales, uint8[96] zeros> {{
            order = Constant <value = int32[32] {{{",".join("01" * 16)}}}> ()
            qkv = {PACKED} (x, w, scales, zeros, order)
            {THREE}""",
        "(x, w.ROLE, scales.ROLE, zeros.ROLE, order)",
    ),
    "zero points as floats": (
        f"""g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y)
            <uint8[96, 2, 8] w, float[96, 2] scales, float[96, 2] zeros> {{
            qkv = {PACKED} (x, w, scales, zeros)
            {THREE}""",
        "(x, w.ROLE, scales.ROLE, zeros.ROLE)",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_matrix_is_cut_by_rows_bit_for_bit(form: str) -> None:
    text, inputs = FORMS[form]
    model = merged_model(text + ATTENTION + "}")
    result = split_and_compare(model, split_qkv)
    made = [f"{role} = {PRODUCT} {inputs.replace('ROLE', role)}" for role in "qkv"]
    nodes = [line for line in picture(result.model) if "Constant" not in line]
    assert sorted(nodes) == sorted([*made, *lines_of(ATTENTION)])
    assert result.notes == ()
    before, after = arrays_of(detached(model)), arrays_of(result.model)
    for name in before:
        if f"{name}.ROLE" in inputs:
            parts = [after[one] for one in after if one.replace(".q", "").replace(".k", "").replace(".v", "") == name]
            assert len(parts) == 3
            rows = before[name].reshape(96, -1)
            assert_parts_of(rows, [part.reshape(32, -1) for part in parts], axis=0)
    assert len(STRUCTURES["qkv"].find(result.model).instances) == 1


def test_heads_beside_each_other_are_distinguished_without_a_known_shape() -> None:
    """The shapes after MatMulNBits are known, although ONNX's shape inference has no such operator."""
    text = f"""g (float[N, 8, 32] x) => (float[N, 4, 8, 8] y) <uint8[96, 2, 8] w, float[96, 2] scales> {{
        qkv = {PACKED} (x, w, scales)
        heads = Reshape (qkv, #[0, 8, 4, 24])
        turned = Transpose <perm = [0, 2, 1, 3]> (heads)
        q, k, v = Split <axis = 3, num_outputs = 3> (turned)"""
    model = merged_model(text + ATTENTION + "}")
    result = split_and_compare(model, split_qkv)
    assert [line for line in picture(result.model) if "NBits" in line] == [
        f"qkv.{role} = {PRODUCT} (x, w.{role}, scales.{role})" for role in "qkv"
    ]
    before, after = arrays_of(detached(model)), arrays_of(result.model)
    chosen = np.arange(96).reshape(4, 3, 8)
    for place, role in enumerate("qkv"):
        np.testing.assert_array_equal(after[f"w.{role}"], before["w"][chosen[:, place].reshape(-1)])


def test_a_packed_gate_is_taken_from_its_value() -> None:
    text = f"""g (float[2, 8, 32] x) => (float[2, 8, 48] y) <uint8[96, 2, 8] gate_up, float[96, 2] scales> {{
        both = {PACKED} (x, gate_up, scales)
        gate, up = Split <axis = 2, num_outputs = 2> (both)
        bent = Sigmoid (gate)
        y = Mul (bent, up)
    }}"""
    result = split_and_compare(merged_model(text), split_gate_up)
    product = PRODUCT.replace("N = 32", "N = 48")
    assert picture(result.model) == lines_of(f"""
        gate = {product} (x, gate_up.gate, scales.gate)
        up = {product} (x, gate_up.up, scales.up)
        bent = Sigmoid (gate)
        y = Mul (bent, up)""")


LINEAR = """g (uint8[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <int8[32, 96] w, {scales} w.scale, {zeros} w.zero> {{
    x.scale = Constant <value = float {{0.01}}> ()
    x.zero = Constant <value = uint8 {{100}}> ()
    y.scale = Constant <value = float {{0.5}}> ()
    y.zero = Constant <value = uint8 {{128}}> ()
    whole = QLinearMatMul (x, x.scale, x.zero, w, w.scale, w.zero, y.scale, y.zero)
    qkv = DequantizeLinear (whole, y.scale, y.zero)
    {three}"""


@pytest.mark.parametrize("scales", ["float[96]", "float[1]"])
def test_whole_numbers_in_and_out_stay_the_same(scales: str) -> None:
    text = LINEAR.format(three=THREE, scales=scales, zeros=scales.replace("float", "int8"))
    model = merged_model(text + ATTENTION + "}")
    feeds = {"x": np.random.default_rng(0).integers(0, 255, (2, 1, 8, 32)).astype(np.uint8)}
    result = split_and_compare(model, split_qkv, feeds)
    role = ".ROLE" if "96" in scales else ""
    products = [line for line in picture(result.model) if "QLinear" in line]
    given = f"x.scale, x.zero, w.ROLE, w.scale{role}, w.zero{role}, y.scale, y.zero"
    assert products == [f"whole.{one} = QLinearMatMul (x, {given.replace('ROLE', one)})" for one in "qkv"]
    before, after = arrays_of(detached(model)), arrays_of(result.model)
    assert_parts_of(before["w"], [after[f"w.{one}"] for one in "qkv"])
    assert len(STRUCTURES["qkv"].find(result.model).instances) == 1


LEFT = {
    "a scale for each row of the data": (
        LINEAR.replace("x.scale = Constant <value = float {{0.01}}> ()", "")
        .replace("x.zero = Constant <value = uint8 {{100}}> ()", "")
        .replace("{zeros} w.zero>", "{zeros} w.zero, float[96] x.scale, uint8[96] x.zero>")
        .replace("[2, 1, 8, 32] x)", "[2, 1, 96, 32] x)")
        .replace("(float[2, 1, 8, 32] y)", "(float[2, 1, 96, 32] y)"),
        "w comes with x.scale, which is no bias of one number per channel",
    ),
}


@pytest.mark.parametrize("form", LEFT)
def test_what_is_left_says_why(form: str) -> None:
    text, why = LEFT[form]
    model = detached(merged_model(text.format(three=THREE, scales="float[96]", zeros="int8[96]") + ATTENTION + "}"))
    result = split_qkv(model)
    assert result.model is model
    assert result.notes == (why,)


def test_a_float_matrix_beside_a_packed_one_is_still_typed() -> None:
    """The operator that stands in for a packed product in shape inference is in no model."""
    text, _ = FORMS["scales as a matrix"]
    before = merged_model(text + ATTENTION + "}")
    model = detached(before)
    bytes_before = model.proto.SerializeToString()
    split_qkv(model)
    assert model.proto.SerializeToString() == bytes_before
    assert before.graph.node[0].op_type == "MatMulNBits"
    onnx.checker.check_model(before)
