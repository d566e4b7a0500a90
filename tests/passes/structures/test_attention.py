"""Attention spelled out: softmax(Q·Kᵀ)·V with whatever scale and mask."""

from __future__ import annotations

import pytest

from tests.support.onnx_models import merged_attention
from tests.support.structure_models import drawn, found, lost, names

INPUTS = "float[2, 8, 4] q, float[2, 4, 8] k, float[2, 8, 4] v, bool[1, 8, 8] mask"
HEAD = f"g ({INPUTS}) => (float[2, 8, 4] y) <float[8, 8] mix, float[4, 8] w>"

FORMS = {
    "bare": "s = MatMul (q, k) p = Softmax <axis = -1> (s) y = MatMul (p, v)",
    "scaled, masked, without NaN": """
        root = Constant <value_float = 2.0> ()
        zero = Constant <value_float = 0.0> ()
        low = Constant <value_float = -1e9> ()
        m = Where (mask, zero, low) s0 = MatMul (q, k) s1 = Div (s0, root) s = Add (s1, m)
        p0 = Softmax <axis = -1> (s) nan = IsNaN (p0) p = Where (nan, zero, p0) y = MatMul (p, v)
    """,
    "einsum": """
        s = Einsum <equation = "bqd,bdk->bqk"> (q, k) p = Softmax <axis = -1> (s)
        y = Einsum <equation = "bqk,bkd->bqd"> (p, v)
    """,
    "heads mixed before and after": """
        s0 = MatMul (q, k) s = MatMul (s0, mix) p0 = Softmax <axis = -1> (s) p = MatMul (p0, mix) y = MatMul (p, v)
    """,
    "softmax by exponentials, with a sink": """
        end = Constant <value_ints = [-1]> () one = Constant <value_float = 1.0> ()
        s = MatMul (q, k) top = ReduceMax (s, end) d = Sub (s, top) p = Exp (d) t0 = ReduceSum (p, end)
        t = Add (t0, one) n = Div (p, t) y = MatMul (n, v)
    """,
    "a logarithm of softmax, undone": "s = MatMul (q, k) l = LogSoftmax (s) p = Exp (l) y = MatMul (p, v)",
    "soft cap": "s0 = MatMul (q, k) s1 = Tanh (s0) p = Softmax <axis = -1> (s1) y = MatMul (p, v)",
}
OTHERS = {
    "exponentials that no sum divides": "s = MatMul (q, k) p = Exp (s) y = MatMul (p, v)",
    "a decay by distance": "s = MatMul (q, k) d = Abs (s) n = Neg (d) p = Exp (n) y = MatMul (p, v)",
    "a softmax at the end": "s = MatMul (q, k) p = Softmax (s) r = Relu (p) y = MatMul (r, v)",
    "an exponential of features, as in linear attention": """
        e = Exp (k) state = MatMul (e, v) y = MatMul (q, state)
    """,
    "no softmax": "s = MatMul (q, k) y = MatMul (s, v)",
    "a softmax of no product": """
        p = Softmax (q) t = Transpose <perm = [0, 2, 1]> (p) s = MatMul (p, t) y = MatMul (s, v)
    """,
    "a softmax of scores by weights": "s = MatMul (q, w) p = Softmax (s) y = MatMul (p, v)",
}


@pytest.mark.parametrize("form", FORMS)
def test_finds_each_form_once(form: str) -> None:
    instances = found("attention", drawn(f"{HEAD} {{ {FORMS[form]} }}"))
    assert names(instances) == ["y"]
    assert len(instances[0].pins) == 3


@pytest.mark.parametrize("form", OTHERS)
def test_finds_nothing_else(form: str) -> None:
    assert found("attention", drawn(f"{HEAD} {{ {OTHERS[form]} }}")) == ()


def test_q_k_and_v_may_be_one_matrix() -> None:
    assert names(found("attention", merged_attention())) == ["y"]


def test_another_scale_is_no_loss_and_one_op_is() -> None:
    bare = f"{HEAD} {{ {FORMS['bare']} }}"
    instances = found("attention", drawn(bare))
    scaled = drawn(bare.replace("p = Softmax <axis = -1> (s)", "t = Add (s, mix) p = Softmax <axis = -1> (t)"))
    assert lost("attention", instances, scaled) == {}
    turned = "t = Transpose <perm = [0, 2, 1]> (k)"
    fused = drawn(f"{HEAD} {{ {turned} y = com.microsoft.MultiHeadAttention <num_heads = 1> (q, t, v) }}")
    (why,) = lost("attention", instances, fused).values()
    assert "'y' is made by com.microsoft.MultiHeadAttention" in why


def test_the_op_itself_is_found_and_kept_as_it_is() -> None:
    inputs = ", ".join(f"float[1, 2, 8, 4] {name}" for name in "qkv")
    text = f"g ({inputs}) => (float[1, 2, 8, 4] y) {{ y = Attention (q, k, v) }}"
    assert names(found("attention", drawn(text, opset=23))) == ["y"]


TWO = """
g (float[2, 8, 4] q, float[2, 4, 8] k, float[2, 8, 4] v) => (float[2, 8, 4] y) {
    s = MatMul (q, k)
    p = Softmax <axis = -1> (s)
    c = MatMul (p, v)
    s2 = MatMul (c, k)
    p2 = Softmax <axis = -1> (s2)
    y = MatMul (p2, v)
}"""


@pytest.mark.parametrize(("value", "named"), [("p", "attention"), ("p2", "attention #2")])
def test_of_two_blocks_the_one_that_goes_is_named(value: str, named: str) -> None:
    instances = found("attention", drawn(TWO))
    assert names(instances) == ["c", "y"]
    changed = drawn(TWO.replace(f"{value} = Softmax <axis = -1>", f"{value} = Sigmoid"))
    assert list(lost("attention", instances, changed)) == [named]
