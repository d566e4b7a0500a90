"""Which products `split-qkv` splits beside those of the known models, and which it leaves, with the reason."""

from __future__ import annotations

import pytest

from passes.rewrites.split_merged import split_qkv
from tests.passes.rewrites.merged_models import split_and_compare
from tests.support.onnx_models import detached
from tests.support.onnx_text import ATTENTION, ATTENTION_PICTURE, lines_of, merged_model, picture

SPLIT = {
    "a list of pieces, as torch exports it": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 96] w> {
            product = MatMul (x, w)
            list = SplitToSequence <axis = -1> (product, #32)
            q = SequenceAt (list, #0)
            k = SequenceAt (list, #1)
            v = SequenceAt (list, #2)""",
        """
            $ = MatMul (x, w.$)""",
    ),
    "an Einsum": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[96, 32] w> {
            product = Einsum <equation = "abcd,ed->abce"> (x, w)
            q, k, v = Split <axis = -1, num_outputs = 3> (product)""",
        """
            $ = Einsum <equation = 'abcd,ed->abce'> (x, w.$)""",
    ),
    "the weight on the left": (
        """g (float[2, 1, 32, 8] x) => (float[2, 1, 8, 32] y) <float[96, 32] w, float[96, 1] b> {
            product = MatMul (w, x)
            sum = Add (product, b)
            turned = Transpose <perm = [0, 1, 3, 2]> (sum)
            q, k, v = Split <axis = -1, num_outputs = 3> (turned)""",
        """
            product.$ = MatMul (w.$, x)
            sum.$ = Add (product.$, b.$)
            $ = Transpose <perm = [0, 1, 3, 2]> (sum.$)""",
    ),
    "K and V alone": (
        """g (float[2, 1, 8, 32] x, float[2, 1, 5, 32] z) => (float[2, 1, 8, 32] y)
        <float[32, 32] q.weight, float[32, 64] kv.weight> {
            q = MatMul (x, q.weight)
            kv = MatMul (z, kv.weight)
            k, v = Split <axis = -1> (kv, #[32, 32])""",
        """
            q = MatMul (x, q.weight)
            k = MatMul (z, kv.k.weight)
            v = MatMul (z, kv.v.weight)""",
    ),
    "the MLP is in the same matrix": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y, float[2, 1, 8, 64] z) <float[32, 160] fused.weight> {
            product = MatMul (x, fused.weight)
            q, k, mlp, v = Split <axis = -1> (product, #[32, 32, 64, 32])
            z = Relu (mlp)""",
        """
            $ = MatMul (x, fused.$.weight)
            mlp = MatMul (x, fused.rest.weight)
            z = Relu (mlp)""",
    ),
    "the readers of Q take it in two pieces": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 96] w> {
            product = MatMul (x, w)
            q2, k, v, q1 = Split <axis = -1> (product, #[8, 32, 32, 24])
            n = Neg (q1)
            q = Concat <axis = -1> (n, q2)""",
        """
            product.q = MatMul (x, w.q)
            q2, q1 = Split <axis = -1> (product.q, [8,24])
            n = Neg (q1)
            q = Concat <axis = -1> (n, q2)
            k = MatMul (x, w.k)
            v = MatMul (x, w.v)""",
    ),
    "the weight as torch stores it, with a Transpose": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[96, 32] in_proj.weight> {
            turned = Transpose <perm = [1, 0]> (in_proj.weight)
            product = MatMul (x, turned)
            q, k, v = Split <axis = -1, num_outputs = 3> (product)""",
        """
            turned.$ = Transpose <perm = [1, 0]> (in_proj.$.weight)
            $ = MatMul (x, turned.$)""",
    ),
    "a weight of integers with a scale for each channel": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <int8[32, 96] w, float[96] scale> {
            real = DequantizeLinear <axis = 1> (w, scale)
            product = MatMul (x, real)
            q, k, v = Split <axis = -1, num_outputs = 3> (product)""",
        """
            real.$ = DequantizeLinear <axis = 1> (w.$, scale.$)
            $ = MatMul (x, real.$)""",
    ),
    "values of one scale for all channels": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 96] w, float scale, float low, float high> {
            product = MatMul (x, w)
            scaled = Mul (product, scale)
            clipped = Clip (scaled, low, high)
            q, k, v = Split <axis = -1, num_outputs = 3> (clipped)""",
        """
            product.$ = MatMul (x, w.$)
            scaled.$ = Mul (product.$, scale)
            $ = Clip (scaled.$, low, high)""",
    ),
}


@pytest.mark.parametrize("form", SPLIT)
def test_what_is_split(form: str) -> None:
    text, expected = SPLIT[form]
    result = split_and_compare(merged_model(f"{text}\n{ATTENTION}}}"), split_qkv)
    assert sorted(picture(result.model)) == sorted([*lines_of(expected), *ATTENTION_PICTURE])


LEFT = {
    "the product is an output": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y, float[2, 1, 8, 96] product) <float[32, 96] w> {
            product = MatMul (x, w)
            q, k, v = Split <axis = -1, num_outputs = 3> (product)""",
        "w is read whole by the model's output",
    ),
    "a norm over Q, K and V together": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 96] w, float[96] scale> {
            product = MatMul (x, w)
            normal = LayerNormalization (product, scale)
            q, k, v = Split <axis = -1, num_outputs = 3> (normal)""",
        "w is read whole by LayerNormalization",
    ),
    "a weight that is an input": (
        """g (float[2, 1, 8, 32] x, float[32, 96] w) => (float[2, 1, 8, 32] y) <float[32, 96] w> {
            product = MatMul (x, w)
            q, k, v = Split <axis = -1, num_outputs = 3> (product)""",
        "w is an input of the model",
    ),
    "a weight that is computed": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 96] a, float[32, 96] b> {
            w = Add (a, b)
            product = MatMul (x, w)
            q, k, v = Split <axis = -1, num_outputs = 3> (product)""",
        "w is computed by Add",
    ),
    "a Conv in groups": (
        """g (float[2, 32, 8] x) => (float[2, 1, 32, 8] y) <float[96, 16, 1] w> {
            product = Conv <group = 2> (x, w)
            q1, k1, v1 = Split <axis = 1, num_outputs = 3> (product)
            $ = Unsqueeze ($1, #[1])""",
        "w is the weight of a Conv in groups",
    ),
    "channels that K and V share": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 80] w> {
            product = MatMul (x, w)
            q = Slice (product, #[0], #[32], #[3])
            k = Slice (product, #[32], #[64], #[3])
            v = Slice (product, #[48], #[80], #[3])""",
        "w has channels that several of its parts share",
    ),
    "K that is V": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 32] wq, float[32, 32] w> {
            q = MatMul (x, wq)
            k = MatMul (x, w)
            v = Identity (k)""",
        "w has channels that several of its parts share",
    ),
}


@pytest.mark.parametrize("form", LEFT)
def test_what_is_left_says_why(form: str) -> None:
    text, why = LEFT[form]
    model = detached(merged_model(f"{text}\n{ATTENTION}}}"))
    result = split_qkv(model)
    assert result.model is model
    assert result.notes == (why,)


def test_three_matrices_are_left_without_a_word() -> None:
    text = """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 32] a, float[32, 32] b, float[32, 32] c> {
        q = MatMul (x, a)
        k = MatMul (x, b)
        v = MatMul (x, c)"""
    model = detached(merged_model(f"{text}\n{ATTENTION}}}"))
    result = split_qkv(model)
    assert result.model is model
    assert result.notes == ()


def test_the_operator_of_opset_23() -> None:
    text = """g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[32, 64] w> {
        product = MatMul (x, w)
        q, k, v = Split <axis = -1> (product, #[32, 16, 16])
        y = Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, v)
    }"""
    after = picture(split_and_compare(merged_model(text, opset=23), split_qkv).model)
    assert after == [
        "q = MatMul (x, w.q)",
        "k = MatMul (x, w.k)",
        "v = MatMul (x, w.v)",
        "y = Attention <kv_num_heads = 2, q_num_heads = 4> (q, k, v)",
    ]
