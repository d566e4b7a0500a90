"""`split-gate-up`: gated MLPs with one matrix, before and after as pictures; and what looks like one."""

from __future__ import annotations

import numpy as np
import pytest

from passes.rewrites.split_merged import split_gate_up
from tests.passes.rewrites.merged_models import (
    arrays_of,
    assert_parts_of,
    lines_of,
    merged_model,
    picture,
    split_and_compare,
)
from tests.support.onnx_models import detached

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
