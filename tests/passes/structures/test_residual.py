"""Residual: x + f(x), where f has weights; and what is added for other reasons."""

from __future__ import annotations

import pytest

from tests.support.structure_models import drawn, found, lost, names

HEAD = """
g (float[2, 4, 8] x, float[2, 4, 8] z, float[2, 4, 4] mask) => (float[2, 4, 8] y)
<float[8, 8] w, float[8, 8] v, float[8] b, float[8] s>
"""

BESIDE = "n = LayerNormalization (x, s) f = MatMul (n, w) h0 = MatMul (n, v) h = Relu (h0)"

FORMS = {
    "before the norm": ("n = LayerNormalization (x, s) f0 = MatMul (n, w) f = Add (f0, b) y = Add (x, f)", ["y"]),
    "after the norm": (
        "i = Identity (x) f = MatMul (i, w) a = Add (f, x) n = LayerNormalization (a, s) y = Relu (n)",
        ["a"],
    ),
    "two in a row": ("f = MatMul (x, w) a = Add (x, f) h = MatMul (a, v) y = Add (h, a)", ["a", "y"]),
    "scaled branch": ("f0 = MatMul (x, w) f = Mul (f0, s) y = Add (f, x)", ["y"]),
    "an einsum with weights, as XLNet has it": ('f = Einsum <equation = "bsi,ij->bsj"> (x, w) y = Add (f, x)', ["y"]),
    "two branches beside each other": (
        f"{BESIDE} p = Add (f, h) y = Add (p, x)",
        ["y"],
    ),
    "two branches one after the other": (
        f"{BESIDE} p = Add (x, f) y = Add (p, h)",
        ["p", "y"],
    ),
    "from another value too, as cross-attention does": (
        """
        q = MatMul (x, w) t = Transpose <perm = [0, 2, 1]> (z) c = MatMul (q, t) p = Softmax (c) f = MatMul (p, z)
        y = Add (x, f)
        """,
        ["y"],
    ),
}
OTHERS = {
    "a bias": "f = MatMul (x, w) y = Add (f, b)",
    "two inputs": "y = Add (x, z)",
    "two projections": "f = MatMul (x, w) h = MatMul (x, v) y = Add (f, h)",
    "no weights between": "f = Relu (x) y = Add (f, x)",
    "no weights but those before both": "p = MatMul (x, w) f = Relu (p) y = Add (f, p)",
    "weights that another input passes through": "c = MatMul (z, w) m = Mul (x, c) y = Add (x, m)",
    "a position in every layer": """
        a = Add (x, z) q = MatMul (a, w) f = Add (x, q) a2 = Add (f, z) y = Relu (a2)
    """,
    "a mask in every layer": """
        k = MatMul (x, w) t = Transpose <perm = [0, 2, 1]> (x) c = MatMul (k, t) m = Add (c, mask) p = Softmax (m)
        a = MatMul (p, x) k2 = MatMul (a, v) t2 = Transpose <perm = [0, 2, 1]> (a) c2 = MatMul (k2, t2)
        m2 = Add (c2, mask) p2 = Softmax (m2) y = MatMul (p2, a)
    """,
}


@pytest.mark.parametrize("form", FORMS)
def test_finds_each_sum(form: str) -> None:
    text, sums = FORMS[form]
    assert names(found("residual", drawn(f"{HEAD} {{ {text} }}"))) == sums


@pytest.mark.parametrize("form", OTHERS)
def test_finds_no_other_sum(form: str) -> None:
    expected = ["f"] if form == "a position in every layer" else []
    assert names(found("residual", drawn(f"{HEAD} {{ {OTHERS[form]} }}"))) == expected


RESNET = """
g (float[1, 4, 8, 8] x) => (float[1, 8, 4, 4] y)
<float[8, 4, 3, 3] k, float[8, 8, 3, 3] l, float[8, 4, 1, 1] p, float[8] a, float[8] b, float[8] m, float[8] v> {
    c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, k)
    r = Relu (c)
    f = Conv <pads = [1, 1, 1, 1]> (r, l)
    s0 = Conv <strides = [2, 2]> (x, p)
    s = BatchNormalization (s0, a, b, m, v)
    y = Add (f, s)
}"""


def test_the_short_branch_may_be_projected() -> None:
    assert names(found("residual", drawn(RESNET))) == ["y"]
    assert found("residual", drawn(RESNET.replace("r = Relu (c)", "r = Identity (c)"))) == ()
    frozen = RESNET.replace("s = BatchNormalization (s0, a, b, m, v)", "s1 = Mul (s0, e) s = Add (s1, d)")
    frozen = frozen.replace("float[8] v>", "float[8] v, float[8, 1, 1] e, float[8, 1, 1] d>")
    assert names(found("residual", drawn(frozen))) == ["y"]


def test_a_gemm_that_takes_the_sum_in_is_a_loss() -> None:
    text = "g (float[4, 8] x) => (float[4, 8] y) <float[8, 8] w> { BODY }"
    instances = found("residual", drawn(text.replace("BODY", "f = MatMul (x, w) y = Add (f, x)")))
    assert list(lost("residual", instances, drawn(text.replace("BODY", "y = Gemm (x, w, x)")))) == ["residual"]


# Embedding: rows of a table, chosen at run time.

LOOKUPS = {
    "by the input": "y = Gather (table, ids)",
    "rows by GatherND": "end = Constant <value_ints = [-1]> () i = Unsqueeze (ids, end) y = GatherND (table, i)",
    "by what is computed": "one = Constant <value_ints = [1]> () i = Add (ids, one) y = Gather <axis = 0> (table, i)",
    "a table after Identity": "t = Identity (table) y = Gather (t, ids)",
}
OTHER_GATHERS = {
    "by a constant": "two = Constant <value_ints = [2, 0]> () r = Gather (table, two) y = Cast <to = 1> (r)",
    "of columns": "r = Gather <axis = 1> (table, ids) y = Relu (r)",
    "of a size": "s = Shape (ids) zero = Constant <value_int = 0> () n = Gather (s, zero) y = Cast <to = 1> (n)",
    "of what is computed": "c = Cast <to = 1> (ids) r = Gather (c, ids) y = Relu (r)",
    "in a table of numbers": "r = Gather (numbers, ids) y = Cast <to = 1> (r)",
}


def model(body: str):
    return drawn(f"g (int64[2, 3] ids) => (float[] y) <float[7, 4] table, int64[7, 4] numbers> {{ {body} }}")


@pytest.mark.parametrize("form", LOOKUPS)
def test_finds_lookups(form: str) -> None:
    instances = found("embedding", model(LOOKUPS[form]))
    assert names(instances) == ["y"]
    assert [weight.name for weight in instances[0].weights] == ["table"]


@pytest.mark.parametrize("form", OTHER_GATHERS)
def test_finds_no_other_gather(form: str) -> None:
    assert found("embedding", model(OTHER_GATHERS[form])) == ()


def test_a_table_in_another_type_is_a_loss() -> None:
    instances = found("embedding", model(LOOKUPS["by the input"]))
    half = model("t = Cast <to = 10> (table) h = Gather (t, ids) y = Cast <to = 1> (h)")
    assert list(lost("embedding", instances, half)) == ["embedding"]
