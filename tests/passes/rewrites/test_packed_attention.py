"""onnxruntime's attention operators with Q, K and V in one: what they are written out as, with the same outputs.

onnxruntime's CPU has no kernel for MultiHeadAttention with packed Q, K and V: there the picture has to do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from passes.rewrites.split_merged import split_qkv
from passes.structures import STRUCTURES
from tests.passes.rewrites.merged_models import assert_parts_of, split_and_compare
from tests.support.onnx_models import detached
from tests.support.onnx_text import arrays_of, lines_of, merged_model, picture

ATTENTION = """g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[32, 96] qkv.weight, float[96] qkv.bias> {
    y = com.microsoft.Attention <num_heads = 4, unidirectional = 1> (x, qkv.weight, qkv.bias)
}"""

FORMS = {
    "Attention, which has the weight inside": (
        ATTENTION,
        """
            y.qkv_product.$ = MatMul (x, qkv.$.weight)
            y.$ = Add (y.qkv_product.$, qkv.$.bias)
            y = MultiHeadAttention <num_heads = 4, unidirectional = 1> (y.q, y.k, y.v)""",
    ),
    "Attention with a mask of places and a width of V of its own": (
        """g (float[2, 8, 32] x, int32[2, 8] mask) => (float[2, 8, 64] y) <float[32, 96] w, float[96] b> {
            y = com.microsoft.Attention <num_heads = 4, qkv_hidden_sizes = [16, 16, 64]> (x, w, b, mask)
        }""",
        """
            y.qkv_product.$ = MatMul (x, w.$)
            y.$ = Add (y.qkv_product.$, b.$)
            y = MultiHeadAttention <num_heads = 4> (y.q, y.k, y.v, , mask)""",
    ),
    "GroupQueryAttention, packed": (
        """g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[32, 64] w> {
            ends = Constant <value = int32[2] {7, 7}> ()
            total = Constant <value = int32[1] {8}> ()
            qkv = MatMul (x, w)
            y = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (qkv, , , , , ends, total)
        }""",
        """
            ends = Constant <value = int32[2] [7, 7]> ()
            total = Constant <value = int32[1] [8]> ()
            y.$ = MatMul (x, w.$)
            y = GroupQueryAttention <kv_num_heads = 2, num_heads = 4> (y.q, y.k, y.v, , , ends, total)""",
    ),
    "QAttention, whose products of integers stay exact": (
        """g (uint8[2, 8, 32] x) => (float[2, 8, 32] y) <int8[32, 96] w, float[96] b> {
            of_x = Constant <value = float {0.01}> ()
            of_w = Constant <value = float {0.001}> ()
            zero = Constant <value = uint8 {100}> ()
            y = com.microsoft.QAttention <num_heads = 4> (x, w, b, of_x, of_w, , zero)
        }""",
        """
            of_x = Constant <value = float 0.009999999776482582> ()
            of_w = Constant <value = float 0.0010000000474974513> ()
            zero = Constant <value = uint8 100> ()
            y.qkv_product.$ = MatMulInteger (x, w.$, zero)
            y.qkv_float.$ = Cast <to = 1> (y.qkv_product.$)
            y.qkv_of_input.$ = Mul (y.qkv_float.$, of_x)
            y.qkv_scaled.$ = Mul (y.qkv_of_input.$, of_w)
            y.$ = Add (y.qkv_scaled.$, b.$)
            y = MultiHeadAttention <num_heads = 4> (y.q, y.k, y.v)""",
    ),
}


QUANTIZED = """g (uint8[2, 8, 32] x, float[2, 2, 4, 3, 8] past) => (float[2, 8, 32] y, float[2, 2, 4, 11, 8] present)
    <int8[32, 96] w, float[96] b> {
    of_x = Constant <value = float {0.01}> ()
    of_w = Constant <value = float {0.001}> ()
    zero = Constant <value = uint8 {100}> ()
    y, present = com.microsoft.QAttention <num_heads = 4, unidirectional = 1> (x, w, b, of_x, of_w, , zero, , past)
}"""


def test_a_cache_of_qattention_is_taken_apart() -> None:
    model = merged_model(QUANTIZED)
    result = split_and_compare(model, split_qkv, feeds_of(model))
    lines = picture(result.model)
    assert "y.past_value = Gather <axis = 0> (past, 1)" in lines
    assert "present = Concat <axis = 0> (y.present_key_apart, y.present_value_apart)" in lines
    assert len(STRUCTURES["qkv"].find(result.model).instances) == 1


def test_a_cache_that_qattention_begins_is_taken_apart() -> None:
    text = QUANTIZED.replace(", float[2, 2, 4, 3, 8] past", "").replace(", , past)", ")").replace("11, 8]", "8, 8]")
    model = merged_model(text)
    result = split_and_compare(model, split_qkv, feeds_of(model))
    assert "present = Concat <axis = 0> (y.present_key_apart, y.present_value_apart)" in picture(result.model)


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    draws: dict[int, Callable[[list[int]], np.ndarray]] = {
        onnx.TensorProto.FLOAT: lambda shape: rng.uniform(-1, 1, shape).astype(np.float32),
        onnx.TensorProto.UINT8: lambda shape: rng.integers(0, 255, shape).astype(np.uint8),
        onnx.TensorProto.INT32: lambda shape: (np.arange(shape[1]) < shape[1] - 2).astype(np.int32)[None].repeat(2, 0),
    }
    infos = {info.name: info.type.tensor_type for info in model.graph.input}
    return {name: draws[int(one.elem_type)]([dim.dim_value for dim in one.shape.dim]) for name, one in infos.items()}


@pytest.mark.parametrize("form", FORMS)
def test_before_and_after(form: str) -> None:
    text, expected = FORMS[form]
    model = merged_model(text)
    result = split_and_compare(model, split_qkv, feeds_of(model))
    assert sorted(picture(result.model)) == sorted(lines_of(expected))
    assert result.notes == ()
    before, after = arrays_of(detached(model)), arrays_of(result.model)
    (merged,) = result.split
    parts = [after[merged.replace(".weight", "") + f".{role}" + ".weight" * ("." in merged)] for role in "qkv"]
    assert_parts_of(before[merged], parts)
    assert len(STRUCTURES["qkv"].find(result.model).instances) == 1


PACKED = {
    "Q, K and V": (
        """g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[32, 96] w> {
            qkv = MatMul (x, w)
            five = Reshape (qkv, #[2, 8, 4, 3, 8])
            y = com.microsoft.MultiHeadAttention <num_heads = 4> (five)
        }""",
        """
            qkv.$ = MatMul (x, w.$)
            y.$.heads = Reshape (qkv.$, [2,8,4,8])
            y.$ = Reshape (y.$.heads, [0,0,32])
            y = MultiHeadAttention <num_heads = 4> (y.q, y.k, y.v)""",
    ),
    "K and V": (
        """g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[32, 32] wq, float[32, 64] w> {
            q = MatMul (x, wq)
            kv = MatMul (x, w)
            five = Reshape (kv, #[2, 8, 4, 2, 8])
            y = com.microsoft.MultiHeadAttention <num_heads = 4> (q, five)
        }""",
        """
            q = MatMul (x, wq)
            kv.k = MatMul (x, w.k)
            y.k.heads = Reshape (kv.k, [2,8,4,8])
            y.k = Reshape (y.k.heads, [0,0,32])
            kv.v = MatMul (x, w.v)
            y.v.heads = Reshape (kv.v, [2,8,4,8])
            y.v = Reshape (y.v.heads, [0,0,32])
            y = MultiHeadAttention <num_heads = 4> (q, y.k, y.v)""",
    ),
}


@pytest.mark.parametrize("form", PACKED)
def test_packed_multi_head_attention(form: str) -> None:
    text, expected = PACKED[form]
    result = split_qkv(detached(merged_model(text)))
    assert sorted(picture(result.model)) == sorted(lines_of(expected))
    assert len(STRUCTURES["qkv"].find(result.model).instances) == 1


LEFT = {
    "a cache": (
        """g (float[2, 8, 32] x, float[2, 2, 4, 3, 8] past) => (float[2, 8, 32] y) <float[32, 96] w, float[96] b> {
            y = com.microsoft.Attention <num_heads = 4> (x, w, b, , past)
        }""",
        "y, a com.microsoft.Attention, is not taken apart: it has a past; put decompose-attention before split-qkv",
    ),
    "a mask of lengths": (
        """g (float[2, 8, 32] x, int32[2] ends) => (float[2, 8, 32] y) <float[32, 96] w, float[96] b> {
            y = com.microsoft.Attention <num_heads = 4> (x, w, b, ends)
        }""",
        "y, a com.microsoft.Attention, is not taken apart: it has a mask of lengths; "
        "put decompose-attention before split-qkv",
    ),
    "a weight that is computed": (
        """g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[32, 96] a, float[96] b> {
            w = Exp (a)
            y = com.microsoft.Attention <num_heads = 4> (x, w, b)
        }""",
        "w is computed by Exp",
    ),
    "packed values that are an output": (
        """g (float[2, 8, 32] x) => (float[2, 8, 32] y, float[2, 8, 64] qkv) <float[32, 64] w> {
            ends = Constant <value = int32[2] {7, 7}> ()
            total = Constant <value = int32[1] {8}> ()
            qkv = MatMul (x, w)
            y = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (qkv, , , , , ends, total)
        }""",
        "w is read whole by the model's output",
    ),
}


@pytest.mark.parametrize("form", LEFT)
def test_what_is_left_says_why(form: str) -> None:
    text, why = LEFT[form]
    model = detached(merged_model(text))
    result = split_qkv(model)
    assert result.model is model
    assert result.notes == (why,)
