"""`decompose-attention` and `split-qkv` together: the forms of packed operators that one of them alone leaves."""

from __future__ import annotations

import numpy as np
import pytest

from passes.context import PassContext
from passes.rewrites.attention_operators import DecomposeAttention, is_attention
from passes.rewrites.split_merged import SplitQkv
from passes.structures import STRUCTURES
from passes.weights.sessions import Session
from tests.passes.rewrites.merged_models import TOLERANCE, assert_parts_of
from tests.support.onnx_models import detached
from tests.support.onnx_text import arrays_of, merged_model

DECOMPOSE, SPLIT = DecomposeAttention(), SplitQkv()

FORMS = {
    "Attention with a cache, its weight inside": (
        """g (float[2, 8, 32] x, float[2, 2, 4, 3, 8] past) => (float[2, 8, 32] y, float[2, 2, 4, 11, 8] present)
            <float[32, 96] w, float[96] b> {
            y, present = com.microsoft.Attention <num_heads = 4> (x, w, b, , past)
        }""",
        [DECOMPOSE, SPLIT],
    ),
    "Attention with a mask of lengths": (
        """g (float[2, 8, 32] x, int32[2] ends) => (float[2, 8, 32] y) <float[32, 96] w, float[96] b> {
            y = com.microsoft.Attention <num_heads = 4> (x, w, b, ends)
        }""",
        [DECOMPOSE, SPLIT],
    ),
    "GroupQueryAttention, packed, with a cache": (
        """g (float[1, 1, 32] x, float[1, 2, 3, 8] pk, float[1, 2, 3, 8] pv)
            => (float[1, 1, 32] y, float[1, 2, 4, 8] k, float[1, 2, 4, 8] v) <float[32, 64] w> {
            last = Constant <value = int32[1] {3}> ()
            total = Constant <value = int32 {4}> ()
            qkv = MatMul (x, w)
            y, k, v = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (qkv, , , pk, pv, last, total)
        }""",
        [SPLIT, DECOMPOSE],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_both_together_leave_separate_weights_and_no_operator_of_attention(form: str, context: PassContext) -> None:
    text, steps = FORMS[form]
    model = merged_model(text)
    after = detached(model)
    for step in steps:
        result = step.apply(after, context)
        assert (result.changed, result.why) == (True, None)
        after = result.model
    assert not any(is_attention(node) for node in after.proto.graph.node)
    assert len(STRUCTURES["qkv"].find(after).instances) == 1
    arrays = arrays_of(after)
    assert_parts_of(arrays_of(detached(model))["w"], [arrays[f"w.{role}"] for role in "qkv"])
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {"ends": np.array([8, 5], np.int32)}
    for info in model.graph.input:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        feeds.setdefault(info.name, rng.uniform(-1, 1, shape).astype(np.float32))
    feeds = {info.name: feeds[info.name] for info in model.graph.input}
    was, now = Session.of(detached(model)).run(feeds), Session.of(after).run(feeds)
    for name, value in was.items():
        np.testing.assert_allclose(now[name], value, rtol=0, atol=2 * TOLERANCE)
