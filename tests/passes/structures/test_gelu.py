"""GELU in all its spellings, and what only looks like it."""

from __future__ import annotations

import pytest

from tests.support.structure_models import drawn, found, lost, names

HEAD = "g (float[2, 8] x, float[2, 8] z) => (float[2, 8] y)"

FORMS = {
    "op": "y = Gelu (x)",
    "erf of x / √2": """
        root = Constant <value_float = 1.4142135> ()
        one = Constant <value_float = 1.0> ()
        half = Constant <value_float = 0.5> ()
        d = Div (x, root) e = Erf (d) p = Add (e, one) h = Mul (half, p) y = Mul (x, h)
    """,
    "erf of x · √½, x halved": """
        root = Constant <value_float = 0.70710677> ()
        one = Constant <value = float[1] {1.0}> ()
        half = Constant <value_float = 0.5> ()
        d = Mul (root, x) e = Erf (d) p = Add (one, e) h = Mul (x, half) y = Mul (h, p)
    """,
    "erf, halved last, x after Identity": """
        root = Constant <value_float = 1.4142135> ()
        one = Constant <value_float = 1.0> ()
        half = Constant <value_float = 0.5> ()
        x2 = Identity (x)
        d = Div (x2, root) e = Erf (d) p = Add (e, one) h = Mul (p, x) y = Mul (h, half)
    """,
    "tanh, as GPT-2 has it": """
        half = Constant <value_float = 0.5> ()
        three = Constant <value_float = 3.0> ()
        cubic = Constant <value_float = 0.044715> ()
        slope = Constant <value_float = 0.7978846> ()
        one = Constant <value_float = 1.0> ()
        h = Mul (half, x) c0 = Pow (x, three) c = Mul (cubic, c0) s = Add (x, c) u = Mul (slope, s)
        t = Tanh (u) p = Add (t, one) y = Mul (h, p)
    """,
    "tanh, factored": """
        half = Constant <value_float = 0.5> ()
        cubic = Constant <value_float = 0.0356774> ()
        slope = Constant <value_float = 0.7978846> ()
        one = Constant <value_float = 1.0> ()
        xx = Mul (x, x) c = Mul (xx, cubic) s = Add (c, slope) u = Mul (s, x)
        t = Tanh (u) p = Add (one, t) h = Mul (x, p) y = Mul (h, half)
    """,
    "erf halved, with a half added": """
        root = Constant <value_float = 1.4142135> ()
        two = Constant <value_float = 2.0> ()
        half = Constant <value_float = 0.5> ()
        d = Div (x, root) e = Erf (d) e2 = Div (e, two) p = Add (e2, half) y = Mul (x, p)
    """,
    "a sum of two halves": """
        root = Constant <value_float = 0.70710677> ()
        half = Constant <value_float = 0.5> ()
        d = Mul (x, root) e = Erf (d) h = Mul (x, half) h2 = Mul (half, x) he = Mul (h2, e) y = Add (h, he)
    """,
    "tanh as a sigmoid of twice the slope": """
        three = Constant <value_float = 3.0> ()
        cubic = Constant <value_float = 0.044715> ()
        slope = Constant <value_float = 1.5957691> ()
        c0 = Pow (x, three) c = Mul (cubic, c0) s = Add (x, c) u = Mul (slope, s) g = Sigmoid (u) y = Mul (x, g)
    """,
    "quick": "k = Constant <value_float = 1.702> () s0 = Mul (k, x) s = Sigmoid (s0) y = Mul (x, s)",
}

OTHERS = {
    "silu": "s = Sigmoid (x) y = Mul (x, s)",
    "of a value that is quantized alone": """
        scale = Constant <value_float = 0.1> () root = Constant <value_float = 1.4142135> ()
        q = QuantizeLinear (x, scale) c = Cast <to = 1> (q) d = Div (c, root) e = Erf (d) y = Mul (e, x)
    """,
    "a sharper sigmoid": "k = Constant <value_float = 3.0> () s0 = Mul (k, x) s = Sigmoid (s0) y = Mul (x, s)",
    "gated by another value": """
        root = Constant <value_float = 1.4142135> ()
        one = Constant <value_float = 1.0> ()
        half = Constant <value_float = 0.5> ()
        d = Div (z, root) e = Erf (d) p = Add (e, one) h = Mul (half, p) y = Mul (x, h)
    """,
    "erf of something else": "e = Erf (x) one = Constant <value_float = 1.0> () p = Add (e, one) y = Mul (x, p)",
    "tanh without the cube": """
        half = Constant <value_float = 0.5> ()
        one = Constant <value_float = 1.0> ()
        t = Tanh (x) p = Add (t, one) h = Mul (x, p) y = Mul (h, half)
    """,
}


@pytest.mark.parametrize("form", FORMS)
def test_finds_each_form_once(form: str) -> None:
    instances = found("gelu", drawn(f"{HEAD} {{ {FORMS[form]} }}"))
    assert names(instances) == ["y"]
    assert "y" in [site.tight.name for site in instances[0].pins]


@pytest.mark.parametrize("form", OTHERS)
def test_finds_nothing_else(form: str) -> None:
    assert found("gelu", drawn(f"{HEAD} {{ {OTHERS[form]} }}")) == ()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "op"])
def test_one_op_in_its_place_is_a_loss(form: str) -> None:
    instances = found("gelu", drawn(f"{HEAD} {{ {FORMS[form]} }}"))
    (why,) = lost("gelu", instances, drawn(f"{HEAD} {{ y = Gelu (x) }}")).values()
    assert "'y' is made by Gelu, and no more by" in why


def test_the_other_approximation_is_a_loss() -> None:
    exact = drawn(f"{HEAD} {{ y = Gelu (x) }}")
    said = drawn(f'{HEAD} {{ y = Gelu <approximate = "none"> (x) }}')
    tanh = drawn(f'{HEAD} {{ y = Gelu <approximate = "tanh"> (x) }}')
    instances = found("gelu", exact)
    assert lost("gelu", instances, said) == {}
    assert list(lost("gelu", instances, tanh)) == ["gelu"]
    assert list(lost("gelu", found("gelu", tanh), exact)) == ["gelu"]
