"""The guard after a softmax: it goes where no row can be masked whole, and the row says why it stays elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from passes.context import PassContext
from passes.rewrites.softmax_guard import DropSoftmaxGuard
from tests.support.onnx_models import detached, model_of

INF = np.float32(np.inf)
LOWEST = np.finfo(np.float32).min
CAUSAL = np.triu(np.full((4, 4), -INF, np.float32), 1)
STRICT = np.triu(np.full((4, 4), -INF, np.float32))
SEES = np.tril(np.ones((4, 4), bool))

GUARDED = """g (float[2, 4, 8] q, float[2, 8, 4] k, {more}) => (float[2, 4, 4] y) {{
    scores = MatMul (q, k)
    {mask}
    p = Softmax <axis = 2> (masked)
    nan = IsNaN (p)
    y = Where (nan, zero, p)
}}"""

FLOAT, BOOL = "float[2, 4, 4] fed", "bool[2, 4, 4] fed"


@pytest.mark.parametrize(
    ("mask", "more", "stays"),
    [
        ("masked = Identity (scores)", FLOAT, ""),
        ("scaled = Mul (scores, half) masked = Add (scaled, causal)", FLOAT, ""),
        ("masked = Where (sees, scores, minus)", FLOAT, ""),
        ("masked = Where (fed, scores, lowest)", BOOL, ""),
        ("bias = Where (fed, zero, lowest) masked = Add (scores, bias)", BOOL, ""),
        ("capped = Tanh (scores) bias = Expand (causal, size) masked = Add (bias, capped)", FLOAT, ""),
        ("range = Range (from, to, by) rows = Unsqueeze (range, last) "
         "seen = LessOrEqual (range, rows) masked = Where (seen, scores, minus)", FLOAT, ""),
        ("full = Trilu <upper = 1> (whole, by) masked = Add (scores, full)", FLOAT, ""),
        ("masked = Add (scores, fed)", FLOAT, "fed, which may mask a row whole"),
        ("bias = Where (fed, zero, minus) masked = Add (scores, bias)", BOOL, "chosen by fed"),
        ("both = And (fed, sees) masked = Where (both, scores, minus)", BOOL, "chosen by both"),
        ("masked = Add (scores, strict)", FLOAT, "strict masks a row whole"),
        ("masked = Where (sees, minus, scores)", FLOAT, "chosen by sees"),
        ("a = Add (scores, lowest) masked = Add (a, lowest)", FLOAT, "masks that together may reach -inf"),
        ("masked = Add (scores, column)", FLOAT, "column masks a row whole"),
        ("turned = Transpose <perm = [1, 0]> (bias) bias = Expand (causal, size) masked = Add (scores, turned)",
         FLOAT, "cuts the rows of a mask"),
        ("whole_mask = Add (scores, strict) masked = Clip (whole_mask, lowest, zero)", FLOAT, ""),
        ("whole_mask = Add (scores, strict) masked = Clip (whole_mask, , zero)", FLOAT, "strict masks a row whole"),
        ("large = Where (fed, zero, big) bias = Mul (large, minus_big) masked = Add (scores, bias)", BOOL,
         "may make a row of -inf"),
        ("first = Neg (by) seen = Trilu <upper = 0> (true, first) masked = Where (seen, scores, minus)",
         FLOAT, "chosen by seen"),
        ("far = Where (fed, scores, far_low) half_far = Cast <to = 10> (far) masked = Cast <to = 1> (half_far)", BOOL,
         "rounds a mask to -inf"),
        ("far = Where (fed, scores, lowest) half_far = Cast <to = 16> (far) masked = Cast <to = 1> (half_far)", BOOL,
         "rounds a mask to -inf"),
        ("logs = Log (fed) masked = Add (scores, logs)", FLOAT, "may make a row of -inf"),
    ],
)  # fmt: skip
def test_a_guard_goes_only_where_each_row_sees_a_key(mask: str, more: str, stays: str, context: PassContext) -> None:
    weights = {"causal": CAUSAL, "strict": STRICT, "sees": SEES, "column": CAUSAL[:, 3:]}
    scalars = {"zero": np.float32(0), "half": np.float32(0.5), "minus": -INF, "lowest": LOWEST}
    scalars |= {"big": np.float32(1e30), "minus_big": np.float32(-1e30), "far_low": np.float32(-1e9)}
    ints = {"size": np.array([4, 4]), "from": np.array(0), "to": np.array(4), "by": np.array(1), "last": np.array([1])}
    weights["true"] = np.ones((4, 4), bool)
    weights["whole"] = np.full((4, 4), -INF, np.float32)
    model = model_of(GUARDED.format(mask=mask, more=more), **weights, **scalars, **ints)
    result = DropSoftmaxGuard().apply(detached(model), context)
    ops = [node.op_type for node in result.model.proto.graph.node]
    assert ("IsNaN" in ops) == bool(stays), result.why
    assert stays in (result.why or "")
    assert not DropSoftmaxGuard().apply(result.model, context).changed


def test_a_mask_in_half_precision_may_round_to_infinity(context: PassContext) -> None:
    text = GUARDED.format(mask="bias = Where (fed, zero, low) masked = Add (scores, bias)", more=BOOL)
    weights = {"zero": np.float16(0), "low": np.finfo(np.float16).min}
    model = model_of(text.replace("float[", "float16["), **weights)
    result = DropSoftmaxGuard().apply(detached(model), context)
    assert not result.changed and "adds a mask that may reach -inf" in (result.why or "")


def test_a_causal_mask_in_half_precision_leaves_a_score_in_each_row(context: PassContext) -> None:
    text = GUARDED.format(mask="masked = Add (scores, mask)", more=FLOAT).replace("float[", "float16[")
    lowest = np.finfo(np.float16).min
    causal = np.triu(np.full((4, 4), lowest, np.float16), 1)
    zero, masks = (
        np.float16(0),
        {"causal": causal, "strict": np.triu(np.full((4, 4), lowest, np.float16)), "high": -causal},
    )
    for name, mask in masks.items():
        result = DropSoftmaxGuard().apply(detached(model_of(text, zero=zero, mask=mask)), context)
        assert result.changed == (name == "causal"), name


def test_other_choices_stay(context: PassContext) -> None:
    """A Where that replaces NaN of something else, or by a computed value, is no guard."""
    text = """g (float[2, 4] x) => (float[2, 4] y, float[2, 4] z) {
        p = Softmax (x) nan = IsNaN (x) y = Where (nan, zero, p) own = IsNaN (p) z = Where (own, x, p)
    }"""
    result = DropSoftmaxGuard().apply(detached(model_of(text, zero=np.float32(0))), context)
    assert (result.changed, result.why) == (False, "no guard follows a softmax")
