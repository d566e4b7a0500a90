"""`split-qkv`: each form in which Q, K and V are merged, before and after as pictures, with numbers and weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.rewrites.split_merged import split_qkv
from passes.structures import STRUCTURES
from tests.passes.rewrites.merged_models import (
    ATTENTION,
    arrays_of,
    assert_parts_of,
    lines_of,
    merged_model,
    picture,
    split_and_compare,
)
from tests.support.onnx_models import detached

TAIL = lines_of("""
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
""")

FORMS = {
    "GPT-2: a Gemm of all positions, and Split": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 8] y) <float[32, 96] c_attn.weight, float[96] c_attn.bias> {
            flat = Reshape (x, #[-1, 32])
            qkv = Gemm (flat, c_attn.weight, c_attn.bias)
            wide = Reshape (qkv, #[2, 8, 96])
            qw, kw, vw = Split <axis = 2> (wide, #[32, 32, 32])
            qh = Reshape (qw, #[2, 8, 4, 8])
            q = Transpose <perm = [0, 2, 1, 3]> (qh)
            kh = Reshape (kw, #[2, 8, 4, 8])
            k = Transpose <perm = [0, 2, 1, 3]> (kh)
            vh = Reshape (vw, #[2, 8, 4, 8])
            v = Transpose <perm = [0, 2, 1, 3]> (vh)""",
        """
            flat = Reshape (x, [-1,32])
            qkv.q = Gemm (flat, c_attn.q.weight, c_attn.q.bias)
            qw = Reshape (qkv.q, [2,8,32])
            qh = Reshape (qw, [2,8,4,8])
            q = Transpose <perm = [0, 2, 1, 3]> (qh)
            qkv.k = Gemm (flat, c_attn.k.weight, c_attn.k.bias)
            kw = Reshape (qkv.k, [2,8,32])
            kh = Reshape (kw, [2,8,4,8])
            k = Transpose <perm = [0, 2, 1, 3]> (kh)
            qkv.v = Gemm (flat, c_attn.v.weight, c_attn.v.bias)
            vw = Reshape (qkv.v, [2,8,32])
            vh = Reshape (vw, [2,8,4,8])
            v = Transpose <perm = [0, 2, 1, 3]> (vh)""",
    ),
    "three Slices of a product with a bias behind it": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 96] qkv.weight, float[96] qkv.bias> {
            product = MatMul (x, qkv.weight)
            sum = Add (qkv.bias, product)
            q = Slice (sum, #[0], #[32], #[3], #[1])
            k = Slice (sum, #[32], #[64], #[-1])
            v = Slice (sum, #[64], #[9223372036854775807], #[3])""",
        """
            product.q = MatMul (x, qkv.q.weight)
            q = Add (qkv.q.bias, product.q)
            product.k = MatMul (x, qkv.k.weight)
            k = Add (qkv.k.bias, product.k)
            product.v = MatMul (x, qkv.v.weight)
            v = Add (qkv.v.bias, product.v)""",
    ),
    "GPT-NeoX: each head has its Q, K and V beside each other": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 8] y) <float[32, 96] qkv.weight> {
            product = MatMul (x, qkv.weight)
            heads = Reshape (product, #[2, 8, 4, 24])
            turned = Transpose <perm = [0, 2, 1, 3]> (heads)
            q, k, v = Split <axis = 3, num_outputs = 3> (turned)""",
        """
            product.q = MatMul (x, qkv.q.weight)
            q.heads = Reshape (product.q, [2,8,4,8])
            q = Transpose <perm = [0, 2, 1, 3]> (q.heads)
            product.k = MatMul (x, qkv.k.weight)
            k.heads = Reshape (product.k, [2,8,4,8])
            k = Transpose <perm = [0, 2, 1, 3]> (k.heads)
            product.v = MatMul (x, qkv.v.weight)
            v.heads = Reshape (product.v, [2,8,4,8])
            v = Transpose <perm = [0, 2, 1, 3]> (v.heads)""",
    ),
    "Bloom: Gather behind a Reshape, with the features of a head last": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 8] y) <float[32, 96] qkv.weight> {
            product = MatMul (x, qkv.weight)
            heads = Reshape (product, #[2, 8, 4, 3, 8])
            qh = Gather <axis = 3> (heads, #0)
            kh = Gather <axis = -2> (heads, #-2)
            vh = Gather <axis = 3> (heads, #2)
            q = Transpose <perm = [0, 2, 1, 3]> (qh)
            k = Transpose <perm = [0, 2, 1, 3]> (kh)
            v = Transpose <perm = [0, 2, 1, 3]> (vh)""",
        """
            product.q = MatMul (x, qkv.q.weight)
            qh = Reshape (product.q, [2,8,4,8])
            q = Transpose <perm = [0, 2, 1, 3]> (qh)
            product.k = MatMul (x, qkv.k.weight)
            kh = Reshape (product.k, [2,8,4,8])
            k = Transpose <perm = [0, 2, 1, 3]> (kh)
            product.v = MatMul (x, qkv.v.weight)
            vh = Reshape (product.v, [2,8,4,8])
            v = Transpose <perm = [0, 2, 1, 3]> (vh)""",
    ),
    "timm: unbind of the first axis, by Split and Squeeze": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 8] y) <float[32, 96] qkv.weight> {
            product = MatMul (x, qkv.weight)
            five = Reshape (product, #[2, 8, 3, 4, 8])
            turned = Transpose <perm = [2, 0, 3, 1, 4]> (five)
            q1, k1, v1 = Split <axis = 0, num_outputs = 3> (turned)
            q = Squeeze (q1, #[0])
            k = Squeeze (k1, #[0])
            v = Squeeze (v1, #[0])""",
        """
            product.q = MatMul (x, qkv.q.weight)
            q.heads = Reshape (product.q, [2,8,4,8])
            q = Transpose <perm = [0, 2, 1, 3]> (q.heads)
            product.k = MatMul (x, qkv.k.weight)
            k.heads = Reshape (product.k, [2,8,4,8])
            k = Transpose <perm = [0, 2, 1, 3]> (k.heads)
            product.v = MatMul (x, qkv.v.weight)
            v.heads = Reshape (product.v, [2,8,4,8])
            v = Transpose <perm = [0, 2, 1, 3]> (v.heads)""",
    ),
    "Falcon: groups of two heads of Q with a K and a V, repeated": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 8] y) <float[32, 64] qkv.weight> {
            product = MatMul (x, qkv.weight)
            groups = Reshape (product, #[2, 8, 2, 4, 8])
            q5 = Slice (groups, #[0], #[-2], #[3])
            k5 = Gather <axis = 3> (groups, #[-2])
            v5 = Slice (groups, #[-1], #[9], #[3])
            kw = Expand (k5, #[2, 8, 2, 2, 8])
            vw = Expand (v5, #[2, 8, 2, 2, 8])
            q4 = Reshape (q5, #[2, 8, 4, 8])
            k4 = Reshape (kw, #[2, 8, 4, 8])
            v4 = Reshape (vw, #[2, 8, 4, 8])
            q = Transpose <perm = [0, 2, 1, 3]> (q4)
            k = Transpose <perm = [0, 2, 1, 3]> (k4)
            v = Transpose <perm = [0, 2, 1, 3]> (v4)""",
        """
            product.q = MatMul (x, qkv.q.weight)
            q5 = Reshape (product.q, [2,8,2,2,8])
            q4 = Reshape (q5, [2,8,4,8])
            q = Transpose <perm = [0, 2, 1, 3]> (q4)
            product.k = MatMul (x, qkv.k.weight)
            k5 = Reshape (product.k, [2,8,2,1,8])
            kw = Expand (k5, [2,8,2,2,8])
            k4 = Reshape (kw, [2,8,4,8])
            k = Transpose <perm = [0, 2, 1, 3]> (k4)
            product.v = MatMul (x, qkv.v.weight)
            v5 = Reshape (product.v, [2,8,2,1,8])
            vw = Expand (v5, [2,8,2,2,8])
            v4 = Reshape (vw, [2,8,4,8])
            v = Transpose <perm = [0, 2, 1, 3]> (v4)""",
    ),
    "SAM: batch and heads are one axis before the parts are taken": (
        """g (float[2, 8, 32] x) => (float[1, 8, 8, 8] y) <float[32, 96] qkv.weight> {
            product = MatMul (x, qkv.weight)
            five = Reshape (product, #[2, 8, 3, 4, 8])
            turned = Transpose <perm = [2, 0, 3, 1, 4]> (five)
            rows = Reshape (turned, #[3, 8, 8, 8])
            q, k, v = Split <axis = 0, num_outputs = 3> (rows)""",
        """
            product.q = MatMul (x, qkv.q.weight)
            q.heads = Reshape (product.q, [2,8,4,8])
            q.turned = Transpose <perm = [0, 2, 1, 3]> (q.heads)
            q = Reshape (q.turned, [1,8,8,8])
            product.k = MatMul (x, qkv.k.weight)
            k.heads = Reshape (product.k, [2,8,4,8])
            k.turned = Transpose <perm = [0, 2, 1, 3]> (k.heads)
            k = Reshape (k.turned, [1,8,8,8])
            product.v = MatMul (x, qkv.v.weight)
            v.heads = Reshape (product.v, [2,8,4,8])
            v.turned = Transpose <perm = [0, 2, 1, 3]> (v.heads)
            v = Reshape (v.turned, [1,8,8,8])""",
    ),
    "a 1×1 Conv, and Split of its channels": (
        """g (float[2, 32, 8] x) => (float[2, 1, 8, 32] y) <float[96, 32, 1] to_qkv.weight, float[96] to_qkv.bias> {
            product = Conv (x, to_qkv.weight, to_qkv.bias)
            q1, k1, v1 = Split <axis = 1, num_outputs = 3> (product)
            q2 = Transpose <perm = [0, 2, 1]> (q1)
            k2 = Transpose <perm = [0, 2, 1]> (k1)
            v2 = Transpose <perm = [0, 2, 1]> (v1)
            q = Unsqueeze (q2, #[1])
            k = Unsqueeze (k2, #[1])
            v = Unsqueeze (v2, #[1])""",
        """
            q1 = Conv (x, to_qkv.q.weight, to_qkv.q.bias)
            q2 = Transpose <perm = [0, 2, 1]> (q1)
            q = Unsqueeze (q2, [1])
            k1 = Conv (x, to_qkv.k.weight, to_qkv.k.bias)
            k2 = Transpose <perm = [0, 2, 1]> (k1)
            k = Unsqueeze (k2, [1])
            v1 = Conv (x, to_qkv.v.weight, to_qkv.v.bias)
            v2 = Transpose <perm = [0, 2, 1]> (v1)
            v = Unsqueeze (v2, [1])""",
    ),
    "LeViT: BatchNormalization over the channels, and parts of other widths": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 16] y)
        <float[32, 128] qkv.weight, float[128] bn.weight, float[128] bn.bias, float[128] bn.mean, float[128] bn.var> {
            product = MatMul (x, qkv.weight)
            rows = Reshape (product, #[16, 128])
            normal = BatchNormalization <epsilon = 0.5> (rows, bn.weight, bn.bias, bn.mean, bn.var)
            back = Reshape (normal, #[2, 8, 4, 32])
            q1, k1, v1 = Split <axis = 3> (back, #[8, 8, 16])
            q = Transpose <perm = [0, 2, 1, 3]> (q1)
            k = Transpose <perm = [0, 2, 1, 3]> (k1)
            v = Transpose <perm = [0, 2, 1, 3]> (v1)""",
        """
            product.q = MatMul (x, qkv.q.weight)
            product.q.flat = Reshape (product.q, [-1,32])
            normal.q = BatchNormalization <epsilon = 0.5> (product.q.flat, bn.q.weight, bn.q.bias, bn.mean.q, bn.var.q)
            q1 = Reshape (normal.q, [2,8,4,8])
            q = Transpose <perm = [0, 2, 1, 3]> (q1)
            product.k = MatMul (x, qkv.k.weight)
            product.k.flat = Reshape (product.k, [-1,32])
            normal.k = BatchNormalization <epsilon = 0.5> (product.k.flat, bn.k.weight, bn.k.bias, bn.mean.k, bn.var.k)
            k1 = Reshape (normal.k, [2,8,4,8])
            k = Transpose <perm = [0, 2, 1, 3]> (k1)
            product.v = MatMul (x, qkv.v.weight)
            product.v.flat = Reshape (product.v, [-1,64])
            normal.v = BatchNormalization <epsilon = 0.5> (product.v.flat, bn.v.weight, bn.v.bias, bn.mean.v, bn.var.v)
            v1 = Reshape (normal.v, [2,8,4,16])
            v = Transpose <perm = [0, 2, 1, 3]> (v1)""",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_before_and_after(form: str) -> None:
    text, expected = FORMS[form]
    model = merged_model(f"{text}\n{ATTENTION}}}")
    result = split_and_compare(model, split_qkv)
    assert sorted(picture(result.model)) == sorted([*lines_of(expected), *TAIL])
    assert result.notes == ()
    before, after = arrays_of(detached(model)), arrays_of(result.model)
    (merged,) = result.split
    axis = 0 if before[merged].ndim == 3 else -1
    assert_parts_of(before[merged], [after[name] for name in part_names(merged)], axis)
    triples = STRUCTURES["qkv"].find(result.model).instances
    assert [[weight.name for weight in one.weights] for one in triples] == [part_names(merged)]


def part_names(merged: str) -> list[str]:
    return [merged.replace(".weight", f".{role}.weight") for role in "qkv"]


OTHERS = {
    "a list of pieces, as torch exports it": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 96] w> {
            product = MatMul (x, w)
            list = SplitToSequence <axis = -1> (product, #32)
            q = SequenceAt (list, #0)
            k = SequenceAt (list, #1)
            v = SequenceAt (list, #2)""",
        """
            q = MatMul (x, w.q)
            k = MatMul (x, w.k)
            v = MatMul (x, w.v)""",
    ),
    "an Einsum": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[96, 32] w> {
            product = Einsum <equation = "abcd,ed->abce"> (x, w)
            q, k, v = Split <axis = -1, num_outputs = 3> (product)""",
        """
            q = Einsum <equation = 'abcd,ed->abce'> (x, w.q)
            k = Einsum <equation = 'abcd,ed->abce'> (x, w.k)
            v = Einsum <equation = 'abcd,ed->abce'> (x, w.v)""",
    ),
    "the weight on the left": (
        """g (float[2, 1, 32, 8] x) => (float[2, 1, 8, 32] y) <float[96, 32] w, float[96, 1] b> {
            product = MatMul (w, x)
            sum = Add (product, b)
            turned = Transpose <perm = [0, 1, 3, 2]> (sum)
            q, k, v = Split <axis = -1, num_outputs = 3> (turned)""",
        """
            product.q = MatMul (w.q, x)
            sum.q = Add (product.q, b.q)
            q = Transpose <perm = [0, 1, 3, 2]> (sum.q)
            product.k = MatMul (w.k, x)
            sum.k = Add (product.k, b.k)
            k = Transpose <perm = [0, 1, 3, 2]> (sum.k)
            product.v = MatMul (w.v, x)
            sum.v = Add (product.v, b.v)
            v = Transpose <perm = [0, 1, 3, 2]> (sum.v)""",
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
            q = MatMul (x, fused.q.weight)
            k = MatMul (x, fused.k.weight)
            v = MatMul (x, fused.v.weight)
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
            turned.q = Transpose <perm = [1, 0]> (in_proj.q.weight)
            q = MatMul (x, turned.q)
            turned.k = Transpose <perm = [1, 0]> (in_proj.k.weight)
            k = MatMul (x, turned.k)
            turned.v = Transpose <perm = [1, 0]> (in_proj.v.weight)
            v = MatMul (x, turned.v)""",
    ),
    "a weight of integers with a scale for each channel": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <int8[32, 96] w, float[96] scale> {
            real = DequantizeLinear <axis = 1> (w, scale)
            product = MatMul (x, real)
            q, k, v = Split <axis = -1, num_outputs = 3> (product)""",
        """
            real.q = DequantizeLinear <axis = 1> (w.q, scale.q)
            q = MatMul (x, real.q)
            real.k = DequantizeLinear <axis = 1> (w.k, scale.k)
            k = MatMul (x, real.k)
            real.v = DequantizeLinear <axis = 1> (w.v, scale.v)
            v = MatMul (x, real.v)""",
    ),
    "values of one scale for all channels": (
        """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 96] w, float scale, float low, float high> {
            product = MatMul (x, w)
            scaled = Mul (product, scale)
            clipped = Clip (scaled, low, high)
            q, k, v = Split <axis = -1, num_outputs = 3> (clipped)""",
        """
            product.q = MatMul (x, w.q)
            scaled.q = Mul (product.q, scale)
            q = Clip (scaled.q, low, high)
            product.k = MatMul (x, w.k)
            scaled.k = Mul (product.k, scale)
            k = Clip (scaled.k, low, high)
            product.v = MatMul (x, w.v)
            scaled.v = Mul (product.v, scale)
            v = Clip (scaled.v, low, high)""",
    ),
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_else_is_taken_apart(form: str) -> None:
    text, expected = OTHERS[form]
    result = split_and_compare(merged_model(f"{text}\n{ATTENTION}}}"), split_qkv)
    assert sorted(picture(result.model)) == sorted([*lines_of(expected), *TAIL])


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
            q = Unsqueeze (q1, #[1])
            k = Unsqueeze (k1, #[1])
            v = Unsqueeze (v1, #[1])""",
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


def test_sizes_that_are_open_are_read_where_the_model_reads_them() -> None:
    """GPT-2 with an open batch and an open length: its Gemm knows only their product."""
    text = """g (float[b, n, 32] x) => (float[b, 4, n, 8] y) <float[32, 96] w.weight> {
        flat = Reshape (x, #[-1, 32])
        qkv = Gemm (flat, w.weight)
        size = Shape <start = 0, end = 2> (x)
        wide_size = Concat <axis = 0> (size, #[96])
        wide = Reshape (qkv, wide_size)
        qw, kw, vw = Split <axis = -1, num_outputs = 3> (wide)
        qh = Reshape (qw, #[0, 0, 4, 8])
        kh = Reshape (kw, #[0, 0, 4, 8])
        vh = Reshape (vw, #[0, 0, 4, 8])
        q = Transpose <perm = [0, 2, 1, 3]> (qh)
        k = Transpose <perm = [0, 2, 1, 3]> (kh)
        v = Transpose <perm = [0, 2, 1, 3]> (vh)"""
    feeds = {"x": np.random.default_rng(0).uniform(-1, 1, (3, 5, 32)).astype(np.float32)}
    result = split_and_compare(merged_model(f"{text}\n{ATTENTION}}}"), split_qkv, feeds)
    assert "qw = Reshape (qkv.q, qw.shape)" in picture(result.model)
    assert "qw.shape = Concat <axis = 0> (wide_size.0, wide_size.1, [32])" in picture(result.model)


def test_the_size_of_the_product_is_read_from_its_data() -> None:
    """torch's older exporter asks the merged value for its sizes, as Bloom's code does."""
    text = """g (float[b, n, 32] x) => (float[b, 4, n, 8] y) <float[32, 96] w.weight, float[96] w.bias> {
        product = MatMul (x, w.weight)
        sum = Add (product, w.bias)
        size = Shape (sum)
        batch = Gather <axis = 0> (size, #[0])
        length = Gather <axis = 0> (size, #[1])
        width = Gather <axis = 0> (size, #[2])
        three = Div (width, #[12])
        five = Reshape (sum, #[0, 0, 4, 3, 8])
        qh = Gather <axis = 3> (five, #0)
        kh = Gather <axis = 3> (five, #1)
        vh = Gather <axis = 3> (five, #2)
        q = Transpose <perm = [0, 2, 1, 3]> (qh)
        k = Transpose <perm = [0, 2, 1, 3]> (kh)
        v4 = Transpose <perm = [0, 2, 1, 3]> (vh)
        whole = Concat <axis = 0> (batch, #[4], length, three)
        v = Reshape (v4, whole)"""
    feeds = {"x": np.random.default_rng(0).uniform(-1, 1, (3, 5, 32)).astype(np.float32)}
    after = picture(split_and_compare(merged_model(f"{text}\n{ATTENTION}}}"), split_qkv, feeds).model)
    assert [line for line in after if line.startswith("size")] == [
        "size.data = Shape (x)",
        "size.positions = Gather <axis = 0> (size.data, [0,1])",
        "size = Concat <axis = 0> (size.positions, [96])",
    ]


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


def test_layers_that_share_a_matrix_share_its_parts() -> None:
    layer = """
        m{n} = MatMul ({x}, w.weight)
        q{n}, k{n}, v{n} = Split <axis = -1, num_outputs = 3> (m{n})
        t{n} = Transpose <perm = [0, 2, 1]> (k{n})
        s{n} = MatMul (q{n}, t{n})
        p{n} = Softmax <axis = -1> (s{n})
        {y} = MatMul (p{n}, v{n})"""
    body = layer.format(n=1, x="x", y="h") + layer.format(n=2, x="h", y="y")
    text = f"g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[32, 96] w.weight> {{{body} }}"
    result = split_and_compare(merged_model(text), split_qkv)
    stored = [name for name in arrays_of(result.model) if "weight" in name]
    assert stored == ["w.q.weight", "w.k.weight", "w.v.weight"]


def test_metadata_and_names_of_nodes_go_to_the_parts() -> None:
    text, _ = FORMS["three Slices of a product with a bias behind it"]
    model = merged_model(f"{text}\n{ATTENTION}}}")
    product = model.graph.node[0]
    product.name = "node_linear"
    product.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layer.0.attn', 'linear']")
    made = {node.output[0]: node for node in split_qkv(detached(model)).model.proto.graph.node}
    for role in "qkv":
        node = made[f"product.{role}"]
        assert node.name == f"node_linear.{role}"
        assert list(node.metadata_props) == list(product.metadata_props)


def test_a_weight_that_the_exporter_counted_is_called_by_its_module() -> None:
    text, _ = FORMS["three Slices of a product with a bias behind it"]
    model = merged_model(f"{text}\n{ATTENTION}}}".replace("qkv.weight", "val_27"))
    scopes = "['', 'layer.0.attn', 'linear']"
    model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    stored = arrays_of(split_qkv(detached(model)).model)
    assert "layer.0.attn.q.weight" in stored


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, str]:
    """The order of groups, parts and features in the matrix; groups; heads of Q in a group; how parts are taken."""
    order = tuple(draw(st.permutations((0, 1, 2))))
    return order, draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from(("Split", "Slice", "Gather")))


@settings(max_examples=40, deadline=None)
@given(interleavings())
def test_any_interleaving_is_found_as_the_permutation_that_it_is(case: tuple[tuple[int, ...], int, int, str]) -> None:
    """A matrix whose channels are groups × (heads of Q, a K, a V) × 4 features, in any order of the three."""
    order, groups, heads, how = case
    sizes = (groups, heads + 2, 4)
    shape = [2, 5, *(sizes[at] for at in order)]
    back = [0, 1, *(2 + order.index(at) for at in range(3))]  # to (batch, length, groups, parts, features)
    taken = {"q": range(heads), "k": [heads], "v": [heads + 1]}
    take = {
        "Split": f"q0, k0, v0 = Split <axis = 3> (t, #{[heads, 1, 1]})",
        "Slice": "".join(f"{role}0 = Slice (t, #[{at[0]}], #[{at[-1] + 1}], #[3]) " for role, at in taken.items()),
        "Gather": "".join(f"{role}0 = Gather <axis = 3> (t, #{list(at)}) " for role, at in taken.items()),
    }[how]
    text = f"""g (float[2, 5, 32] x) => (float[2, {groups}, {5 * heads}, 4] y) <float[32, {np.prod(sizes)}] w.weight> {{
        m = MatMul (x, w.weight)
        r = Reshape (m, #{shape})
        t = Transpose <perm = {back}> (r)
        {take}
        q1 = Transpose <perm = [0, 2, 3, 1, 4]> (q0)
        k1 = Transpose <perm = [0, 2, 3, 1, 4]> (k0)
        v1 = Transpose <perm = [0, 2, 3, 1, 4]> (v0)
        q = Reshape (q1, #[2, {groups}, {5 * heads}, 4])
        k = Reshape (k1, #[2, {groups}, 5, 4])
        v = Reshape (v1, #[2, {groups}, 5, 4])
        {ATTENTION} }}"""
    model = merged_model(text)
    result = split_and_compare(model, split_qkv)
    assert result.notes == ()
    merged, after = arrays_of(detached(model))["w.weight"], arrays_of(result.model)
    numbers = np.arange(np.prod(sizes)).reshape([sizes[at] for at in order])
    numbers = numbers.transpose([order.index(at) for at in range(3)])
    for role, places in taken.items():
        channels = set(numbers[:, list(places)].reshape(-1).tolist())
        part = after[f"w.{role}.weight"]
        assert {column.tobytes() for column in part.T} == {merged[:, one].tobytes() for one in channels}
        assert part.shape[1] == len(channels)


def test_a_name_that_is_taken_gets_a_number() -> None:
    text, _ = OTHERS["K and V alone"]
    model = merged_model(f"{text}\n{ATTENTION}}}".replace("q.weight", "kv.k.weight"))
    result = split_and_compare(model, split_qkv)
    assert "k = MatMul (z, kv.k.weight_2)" in picture(result.model)
