"""`split-gate-up`: gated MLPs with one matrix, before and after as pictures; and what looks like one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import passes
from passes import PolicyError, why_weights
from passes.context import PassContext
from passes.provenance.annotations import annotations_of
from passes.rewrites.split_merged import split_gate_up, split_qkv
from passes.weights.detached import read_model
from tests.passes.rewrites.merged_models import assert_parts_of, split_and_compare
from tests.support.onnx_models import attention, detached
from tests.support.onnx_text import arrays_of, lines_of, merged_model, picture
from tests.support.pass_runs import ops

FORMS = {
    "Phi-3: two Slices, and silu in two ops": (
        """g (float[2, 8, 32] x) => (float[2, 8, 48] y) <float[32, 96] gate_up_proj.weight> {
            product = MatMul (x, gate_up_proj.weight)
            gate = Slice (product, #[0], #[48], #[2])
            up = Slice (product, #[48], #[96], #[2])
            curve = Sigmoid (gate)
            silu = Mul (gate, curve)
            y = Mul (up, silu)
        }""",
        """
            gate = MatMul (x, gate_up_proj.gate.weight)
            curve = Sigmoid (gate)
            silu = Mul (gate, curve)
            up = MatMul (x, gate_up_proj.up.weight)
            y = Mul (up, silu)""",
    ),
    "ModernBERT: the gate is the second half, and goes through no activation": (
        """g (float[2, 8, 32] x) => (float[2, 8, 48] y) <float[32, 96] Wi.weight, float[96] Wi.bias> {
            product = MatMul (x, Wi.weight)
            sum = Add (product, Wi.bias)
            first, second = Split <axis = -1, num_outputs = 2> (sum)
            curve = Gelu (first)
            y = Mul (curve, second)
        }""",
        """
            product.gate = MatMul (x, Wi.gate.weight)
            first = Add (product.gate, Wi.gate.bias)
            curve = Gelu (first)
            product.up = MatMul (x, Wi.up.weight)
            second = Add (product.up, Wi.up.bias)
            y = Mul (curve, second)""",
    ),
    "an activation of onnxruntime": (
        """g (float[2, 8, 32] x) => (float[2, 8, 48] y) <float[32, 96] Wi.weight> {
            product = MatMul (x, Wi.weight)
            first, second = Split <axis = -1, num_outputs = 2> (product)
            curve = com.microsoft.QuickGelu (first)
            y = Mul (curve, second)
        }""",
        """
            first = MatMul (x, Wi.gate.weight)
            curve = QuickGelu (first)
            second = MatMul (x, Wi.up.weight)
            y = Mul (curve, second)""",
    ),
    "gpt-oss: interleaved, with a stack of experts, a clip and a scale": (
        """g (float[3, 8, 32] x) => (float[3, 8, 16] y)
        <float[3, 32, 32] gate_up_proj, float alpha, float low, float high, float one> {
            product = MatMul (x, gate_up_proj)
            gate = Slice (product, #[0], #[32], #[2], #[2])
            up = Slice (product, #[1], #[9999], #[-1], #[2])
            low_gate = Clip (gate, , high)
            mid_up = Clip (up, low, high)
            scaled = Mul (low_gate, alpha)
            curve = Sigmoid (scaled)
            glu = Mul (low_gate, curve)
            more = Add (mid_up, one)
            y = Mul (more, glu)
        }""",
        """
            gate = MatMul (x, gate_up_proj.gate)
            low_gate = Clip (gate, , high)
            scaled = Mul (low_gate, alpha)
            curve = Sigmoid (scaled)
            glu = Mul (low_gate, curve)
            up = MatMul (x, gate_up_proj.up)
            mid_up = Clip (up, low, high)
            more = Add (mid_up, one)
            y = Mul (more, glu)""",
    ),
    "Conformer: a Conv, and a GLU over its channels": (
        """g (float[2, 16, 8] x) => (float[2, 16, 8] y) <float[32, 16, 1] conv.weight, float[32] conv.bias> {
            product = Conv (x, conv.weight, conv.bias)
            up, gate = Split <axis = 1, num_outputs = 2> (product)
            curve = Sigmoid (gate)
            y = Mul (up, curve)
        }""",
        """
            gate = Conv (x, conv.gate.weight, conv.gate.bias)
            curve = Sigmoid (gate)
            up = Conv (x, conv.up.weight, conv.up.bias)
            y = Mul (up, curve)""",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_before_and_after(form: str) -> None:
    text, expected = FORMS[form]
    model = merged_model(text)
    result = split_and_compare(model, split_gate_up)
    assert sorted(picture(result.model)) == sorted(lines_of(expected))
    before, after = arrays_of(detached(model)), arrays_of(result.model)
    (merged,) = result.split
    names = [one for one in after if one not in before and after[one].ndim == before[merged].ndim]
    assert_parts_of(before[merged], [after[name] for name in names], 0 if "conv" in merged else -1)
    assert result.notes == ()


LEFT = {
    "one value and its own sigmoid": """
        g (float[2, 8, 32] x) => (float[2, 8, 48] y) <float[32, 48] w> {
            product = MatMul (x, w)
            curve = Sigmoid (product)
            y = Mul (product, curve)
        }""",
    "two matrices": """
        g (float[2, 8, 32] x) => (float[2, 8, 48] y) <float[32, 48] a, float[32, 48] b> {
            gate = MatMul (x, a)
            up = MatMul (x, b)
            curve = Gelu (gate)
            y = Mul (curve, up)
        }""",
    "both halves go through a curve, as in an LSTM": """
        g (float[2, 8, 32] x) => (float[2, 8, 48] y) <float[32, 96] w> {
            product = MatMul (x, w)
            first, second = Split <axis = -1, num_outputs = 2> (product)
            gate = Sigmoid (first)
            cell = Tanh (second)
            y = Mul (gate, cell)
        }""",
    "a scale and a shift of adaptive norms": """
        g (float[2, 8, 32] x, float[2, 1, 16] c) => (float[2, 8, 32] y)
        <float[16, 64] w, float[32] weight, float one> {
            product = MatMul (c, w)
            scale, shift = Split <axis = -1, num_outputs = 2> (product)
            normal = LayerNormalization (x, weight)
            more = Add (scale, one)
            scaled = Mul (normal, more)
            y = Add (scaled, shift)
        }""",
}


@pytest.mark.parametrize("form", LEFT)
def test_what_is_no_gated_mlp_is_left(form: str) -> None:
    model = detached(merged_model(LEFT[form]))
    result = split_gate_up(model)
    assert result.model is model
    assert result.notes == ()


def test_a_product_that_is_an_output_is_left_with_a_note() -> None:
    text = FORMS["Phi-3: two Slices, and silu in two ops"][0].replace("y) <", "y, float[2, 8, 96] product) <")
    result = split_gate_up(detached(merged_model(text)))
    assert result.split == ()
    assert result.notes == ("gate_up_proj.weight is read whole by the model's output",)


def test_half_precision_stays_half_precision() -> None:
    text = FORMS["Conformer: a Conv, and a GLU over its channels"][0].replace("float[", "float16[")
    model = merged_model(text)
    result = split_gate_up(detached(model))
    after = arrays_of(result.model)
    assert {array.dtype for array in after.values()} == {np.dtype("float16")}
    assert_parts_of(arrays_of(detached(model))["conv.weight"], [after["conv.gate.weight"], after["conv.up.weight"]], 0)


# `split-qkv` and `split-gate-up` in a run: proven, kept from there on, named, and with a word on what is left.

QKV = """g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[96, 32] attn.in_proj.weight> {
    h = Relu (x)
    w = Transpose <perm = [1, 0]> (attn.in_proj.weight)
    product = MatMul (h, w)
    q, k, v = Split <axis = -1, num_outputs = 3> (product)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}"""

NORMED = QKV.replace(
    "q, k, v = Split <axis = -1, num_outputs = 3> (product)",
    """
    normal = LpNormalization (product)
    q, k, v = Split <axis = -1, num_outputs = 3> (normal)""",
)

GATED = """g (float[2, 8, 32] x) => (float[2, 8, 48] y) <float[32, 96] mlp.gate_up.weight> {
    product = MatMul (x, mlp.gate_up.weight)
    gate, up = Split <axis = -1, num_outputs = 2> (product)
    curve = Gelu (gate)
    y = Mul (curve, up)
}"""


def test_what_was_split_is_kept_from_there_on(context: PassContext) -> None:
    recipe = ["split-qkv", "fold_constants", "fuse_qkv"]
    kept = passes.optimize(merged_model(QKV), recipe, keep=["qkv"], context=context)
    free = passes.optimize(merged_model(QKV), recipe, context=context)
    assert (ops(kept)["Split"], ops(free)["Split"]) == (0, 1)
    assert [(one.kind, one.kept) for one in kept.structures] == [("qkv", True)]
    assert [(one.kept, one.broken_by) for one in free.structures] == [(False, "fuse_qkv")]
    assert [row.status for row in kept.rows] == ["ran", "ran", "ran"]


def test_what_a_pass_has_merged_is_taken_apart_again(context: PassContext) -> None:
    run = passes.optimize(attention(), ["fuse_qkv", "fold_constants", "split-qkv"], context=context)
    assert [(one.name, one.kept, one.broken_by) for one in run.structures] == [("attention 0", True, "fuse_qkv")]
    recipe = ["fuse_qkv", "fold_constants", "split-qkv", "eliminate_deadend", "fuse_qkv"]
    again = passes.optimize(attention(), recipe, context=context)
    assert [one.kept for one in again.structures] == [False]
    assert [row.lost for row in again.rows] == [("qkv attention 0",), (), (), (), ("qkv attention 0",)]


def test_parts_are_named_after_the_merged_weight(context: PassContext) -> None:
    run = passes.optimize(merged_model(QKV), ["fold_constants", "split-qkv", "default"], keep=["qkv"], context=context)
    stored = {tensor.name: tensor for tensor in run.model.proto.graph.initializer if len(tensor.dims) == 2}
    assert list(stored) == [f"attn.in_proj.{role}.weight_transposed" for role in "qkv"]
    assert {annotations_of(tensor).replaced for tensor in stored.values()} == {("attn.in_proj.weight",)}
    (origin,) = why_weights(run.model, "attn.in_proj.q.weight_transposed")
    assert (origin.sources, origin.part, origin.form) == (("attn.in_proj.weight",), "q", "transposed")
    made = [annotations_of(node) for node in run.model.proto.graph.node if node.output[0] in ("q", "k", "v")]
    assert [one.author for one in made] == ["split-qkv"] * 3


def test_a_keep_without_a_match_after_the_split_is_a_mistake(context: PassContext) -> None:
    with pytest.raises(PolicyError, match=r"keep: qkv matches nothing .* one matrix in the source already"):
        passes.optimize(merged_model(NORMED), ["split-qkv"], keep=["qkv"], context=context)


def test_the_row_says_what_is_left_and_why(context: PassContext) -> None:
    run = passes.optimize(merged_model(NORMED), ["split-qkv"], context=context)
    assert [(row.changed, row.reason) for row in run.rows] == [
        (False, "attn.in_proj.weight is read whole by LpNormalization")
    ]


def test_a_gated_mlp_is_proven_by_numbers(context: PassContext) -> None:
    run = passes.optimize(merged_model(GATED), ["split-gate-up"], context=context)
    [row] = run.rows
    assert (row.status, row.changed, row.reason, row.diff) == ("ran", True, "", {"MatMul": 1, "Split": -1})
    assert {name: error.max_abs < 2e-6 for name, error in row.errors.items()} == {"y": True}
    names = {tensor.name for tensor in run.to_proto().graph.initializer}
    assert names == {"mlp.gate_up.gate.weight", "mlp.gate_up.up.weight"}
    onnx.checker.check_model(run.to_proto(), full_check=True)


def test_rows_of_an_unread_weight_are_places_in_its_file(tmp_path: Path) -> None:
    whole = merged_model(QKV)
    merged = onnx.numpy_helper.to_array(whole.graph.initializer[0])
    onnx.save(whole, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=1024)
    model = read_model(tmp_path / "model.onnx", unread=True)
    result = split_qkv(model)
    assert result.model.unread() == [f"attn.in_proj.{role}.weight" for role in "qkv"]
    stored = {tensor.name: result.model.array(tensor) for tensor in result.model.proto.graph.initializer}
    for at, role in enumerate("qkv"):
        np.testing.assert_array_equal(stored[f"attn.in_proj.{role}.weight"], merged[32 * at : 32 * at + 32])


def test_an_unread_weight_with_its_parts_in_between_is_left(tmp_path: Path) -> None:
    interleaved = QKV.replace(
        "q, k, v = Split <axis = -1, num_outputs = 3> (product)",
        """five = Reshape (product, #[2, 8, 32, 3])
        q = Gather <axis = 3> (five, #0)
        k = Gather <axis = 3> (five, #1)
        v = Gather <axis = 3> (five, #2)""",
    )
    path = tmp_path / "model.onnx"
    onnx.save(merged_model(interleaved), path, save_as_external_data=True, location="model.data", size_threshold=1024)
    assert split_qkv(read_model(path)).split == ("attn.in_proj.weight",)
    result = split_qkv(read_model(path, unread=True))
    assert result.notes == ("attn.in_proj.weight stays unread, and its parts are not consecutive rows of it",)
