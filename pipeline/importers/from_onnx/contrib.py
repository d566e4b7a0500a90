"""Ops of onnxruntime's own domain, which onnxsim creates, decomposed into ONNX's ops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.importers.from_onnx.moves import emit_reshape, permute, reshape, split
from pipeline.importers.from_onnx.node import Node
from pipeline.importers.from_onnx.specs import qkv_sizes
from pipeline.ir.graph import TensorSpec


def attention(node: Node) -> None:
    """Self-attention whose Q, K and V weights are one matrix: one product, then a split."""
    rest = node.input_names[3:]
    if any(rest) or node.attributes.flag("unidirectional") or node.attributes.flag("do_rotary"):
        raise node.refusal("it has a mask, a past, a causal mask or rotary places, expected none of them")
    if node.is_read(1):
        raise node.refusal("its second output, the keys and values so far, is read")
    node.attributes.settle(
        "mask_filter_value", "rotary_embedding_dim", "past_present_share_buffer"
    )  # none of them here
    heads, sizes = node.attributes.integer("num_heads"), qkv_sizes(node.attributes, node.spec(1))
    batch, places, dtype = *node.spec(0).sizes[:2], node.spec(0).dtype
    merged = TensorSpec((batch, places, sum(sizes)), dtype)
    product = node.step("aten.matmul.default", node.operands(0, 1), merged)
    if node.has(2):
        product = node.step("aten.add.Tensor", [product, node.operand(2)], merged)
    names = [node.fresh(f"{node.output_names[0]}.{role}") for role in "QKV"]
    query, key, value = split(node, product, 2, sizes, names)
    query = split_heads(node, query, heads, (0, 2, 1, 3))
    key = split_heads(node, key, heads, (0, 2, 3, 1))
    value = split_heads(node, value, heads, (0, 2, 1, 3))

    scale = node.attributes.number("scale") or (sizes[0] // heads) ** -0.5
    scores = TensorSpec((batch, heads, places, places), dtype)
    products = node.step("aten.matmul.default", [query, key], scores)
    factor = node.constant_operand(np.array(scale, dtype))
    weights = node.step(
        "aten.softmax.int", [node.step("aten.mul.Tensor", [products, factor], scores)], scores, {"dim": 3}
    )
    context = node.step("aten.matmul.default", [weights, value], node.vid_spec(value))
    emit_reshape(node, permute(node, context, (0, 2, 1, 3)))


def split_heads(node: Node, vid: int, heads: int, perm: Sequence[int]) -> int:
    """(batch, places, hidden) → (batch, places, heads, head), transposed."""
    batch, places, hidden = node.vid_spec(vid).sizes
    return permute(node, reshape(node, vid, (batch, places, heads, hidden // heads)), perm)


IMPORTERS = {"com.microsoft::Attention": attention}
