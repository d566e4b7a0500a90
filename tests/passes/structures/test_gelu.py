"""GELU in all its spellings, and what only looks like it."""

from __future__ import annotations

import re

import onnx
import pytest

from tests.support.structure_models import drawn, found, lost, names

HEAD = "g (float[2, 8] x, float[2, 8] z) => (float[2, 8] y)"
NUMBERS = {
    **{"one": 1.0, "two": 2.0, "three": 3.0, "half": 0.5, "root": 1.4142135, "root_half": 0.70710677},
    **{"cubic": 0.044715, "cubic_slope": 0.0356774, "slope": 0.7978846, "slope_twice": 1.5957691},
}


def model(body: str) -> onnx.ModelProto:
    """A model of `body`, with a Constant for each of the NUMBERS that it reads."""
    read = [name for name in NUMBERS if re.search(rf"\b{name}\b", body) and f"{name} = " not in body]
    constants = " ".join(f"{name} = Constant <value_float = {NUMBERS[name]}> ()" for name in read)
    return drawn(f"{HEAD} {{ {constants} {body} }}")


FORMS = {
    "op": "y = Gelu (x)",
    "erf of x / √2": "d = Div (x, root) e = Erf (d) p = Add (e, one) h = Mul (half, p) y = Mul (x, h)",
    "erf of x · √½, x halved": """
        one = Constant <value = float[1] {1.0}> ()
        d = Mul (root_half, x) e = Erf (d) p = Add (one, e) h = Mul (x, half) y = Mul (h, p)
    """,
    "erf, halved last, x after Identity": """
        x2 = Identity (x)
        d = Div (x2, root) e = Erf (d) p = Add (e, one) h = Mul (p, x) y = Mul (h, half)
    """,
    "tanh, as GPT-2 has it": """
        h = Mul (half, x) c0 = Pow (x, three) c = Mul (cubic, c0) s = Add (x, c) u = Mul (slope, s)
        t = Tanh (u) p = Add (t, one) y = Mul (h, p)
    """,
    "tanh, factored": """
        xx = Mul (x, x) c = Mul (xx, cubic_slope) s = Add (c, slope) u = Mul (s, x)
        t = Tanh (u) p = Add (one, t) h = Mul (x, p) y = Mul (h, half)
    """,
    "erf halved, with a half added": """
        d = Div (x, root) e = Erf (d) e2 = Div (e, two) p = Add (e2, half) y = Mul (x, p)
    """,
    "a sum of two halves": """
        d = Mul (x, root_half) e = Erf (d) h = Mul (x, half) h2 = Mul (half, x) he = Mul (h2, e) y = Add (h, he)
    """,
    "tanh as a sigmoid of twice the slope": """
        c0 = Pow (x, three) c = Mul (cubic, c0) s = Add (x, c) u = Mul (slope_twice, s) g = Sigmoid (u) y = Mul (x, g)
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
    "gated by another value": "d = Div (z, root) e = Erf (d) p = Add (e, one) h = Mul (half, p) y = Mul (x, h)",
    "erf of something else": "e = Erf (x) p = Add (e, one) y = Mul (x, p)",
    "tanh without the cube": "t = Tanh (x) p = Add (t, one) h = Mul (x, p) y = Mul (h, half)",
}


@pytest.mark.parametrize("form", FORMS)
def test_finds_each_form_once(form: str) -> None:
    instances = found("gelu", model(FORMS[form]))
    assert names(instances) == ["y"]
    assert "y" in [site.tight.name for site in instances[0].pins]


@pytest.mark.parametrize("form", OTHERS)
def test_finds_nothing_else(form: str) -> None:
    assert found("gelu", model(OTHERS[form])) == ()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "op"])
def test_one_op_in_its_place_is_a_loss(form: str) -> None:
    instances = found("gelu", model(FORMS[form]))
    (why,) = lost("gelu", instances, model("y = Gelu (x)")).values()
    assert "'y' is made by Gelu, and no more by" in why


def test_the_other_approximation_is_a_loss() -> None:
    exact = model("y = Gelu (x)")
    said = model('y = Gelu <approximate = "none"> (x)')
    tanh = model('y = Gelu <approximate = "tanh"> (x)')
    instances = found("gelu", exact)
    assert lost("gelu", instances, said) == {}
    assert list(lost("gelu", instances, tanh)) == ["gelu"]
    assert list(lost("gelu", found("gelu", tanh), exact)) == ["gelu"]
