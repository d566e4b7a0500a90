"""GELU in all its spellings, and what only looks like it."""

from __future__ import annotations

import re

import onnx
import pytest

from passes.structures import STRUCTURES
from tests.support.onnx_models import detached
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
    "quick, by an exponential": """
        k = Constant <value_float = -1.702> () s0 = Mul (k, x) s1 = Exp (s0) s = Add (one, s1) y = Div (x, s)
    """,
    "quick": "k = Constant <value_float = 1.702> () s0 = Mul (k, x) s = Sigmoid (s0) y = Mul (x, s)",
}

OTHERS = {
    "silu": "s = Sigmoid (x) y = Mul (x, s)",
    "of a value that is quantized alone": """
        scale = Constant <value_float = 0.1> () root = Constant <value_float = 1.4142135> ()
        q = QuantizeLinear (x, scale) c = Cast <to = 1> (q) d = Div (c, root) e = Erf (d) y = Mul (e, x)
    """,
    "silu by an exponential": "m = Neg (x) e = Exp (m) s = Add (e, one) y = Div (x, s)",
    "a sharper sigmoid": "k = Constant <value_float = 3.0> () s0 = Mul (k, x) s = Sigmoid (s0) y = Mul (x, s)",
    "bounds of one operand and of three": "s = Sigmoid (x) m = Max (s) t = Max (m, x, half) y = Mul (t, x)",
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


# SwiGLU: a projection gated by the SiLU of another.

GATED = """
g (float[2, 4, 8] x) => (float[2, 4, 6] y)
<float[8, 6] w, float[8, 6] v, float[6] b, float[8, 12] both, float[8, 2] fall, float[2, 6] rise>
"""

SWIGLUS = {
    "as Llama has it": "g0 = MatMul (x, w) s = Sigmoid (g0) a = Mul (g0, s) u = MatMul (x, v) y = Mul (a, u)",
    "with biases, the gate last": """
        g1 = MatMul (x, w) g0 = Add (g1, b) s = Sigmoid (g0) a = Mul (s, g0)
        u0 = MatMul (x, v) u = Add (b, u0) y = Mul (u, a)
    """,
    "clamped, as gpt-oss has it": """
        top = Constant <value_float = 7.0> () low = Constant <value_float = -7.0> ()
        sharp = Constant <value_float = 1.702> () one = Constant <value_float = 1.0> ()
        g1 = MatMul (x, w) g0 = Min (g1, top) k = Mul (g0, sharp) s = Sigmoid (k) a = Mul (g0, s)
        u1 = MatMul (x, v) u0 = Clip (u1, low, top) u = Add (u0, one) y = Mul (u, a)
    """,
    "one matrix that is split": """
        m = MatMul (x, both) g0, u = Split <axis = -1, num_outputs = 2> (m)
        s = Sigmoid (g0) a = Mul (g0, s) y = Mul (a, u)
    """,
    "by an exponential": """
        one = Constant <value_float = 1.0> ()
        g0 = MatMul (x, w) n = Neg (g0) e = Exp (n) s = Add (e, one) a = Div (g0, s) u = MatMul (x, v) y = Mul (a, u)
    """,
    "the value first": "g0 = MatMul (x, w) s = Sigmoid (g0) u = MatMul (x, v) a = Mul (u, g0) y = Mul (a, s)",
    "with a factor, as Falcon-H1 has it": """
        k = Constant <value_float = 0.3> ()
        g1 = MatMul (x, w) g0 = Mul (g1, k) s = Sigmoid (g0) a = Mul (g0, s) u = MatMul (x, v) y = Mul (a, u)
    """,
    "by Einsum, as experts have it": """
        g0 = Einsum <equation = "btd,df->btf"> (x, w) s = Sigmoid (g0) a = Mul (g0, s)
        u = Einsum <equation = "btd,df->btf"> (x, v) y = Mul (a, u)
    """,
    "with an adapter": """
        g0 = MatMul (x, w) s = Sigmoid (g0) a = Mul (g0, s) u0 = MatMul (x, v) down = MatMul (x, fall)
        up = MatMul (down, rise) u = Add (u0, up) y = Mul (a, u)
    """,
}
NO_SWIGLUS = {
    "a gated linear unit": "g0 = MatMul (x, w) s = Sigmoid (g0) u = MatMul (x, v) y = Mul (s, u)",
    "the squared value": """
        g0 = MatMul (x, w) s = Sigmoid (g0) a = Mul (g0, s) u = MatMul (x, v) uu = Mul (u, u) y = Mul (a, uu)
    """,
    "the gate squared": """
        g0 = MatMul (x, w) s = Sigmoid (g0) a = Mul (g0, s) ga = Mul (g0, a) u = MatMul (x, v) y = Mul (ga, u)
    """,
    "silu alone": "g0 = MatMul (x, w) s = Sigmoid (g0) a = Mul (g0, s) y = Mul (a, b)",
    "squeezed and excited": """
        m = MatMul (x, w) s = Sigmoid (m) a = Mul (m, s) p = ReduceMean (a) e = Sigmoid (p) y = Mul (a, e)
    """,
    "gate and value of different inputs": """
        r = Relu (x) g0 = MatMul (r, w) s = Sigmoid (g0) a = Mul (g0, s) u = MatMul (x, v) y = Mul (a, u)
    """,
}


@pytest.mark.parametrize("form", SWIGLUS)
def test_finds_each_swiglu_once(form: str) -> None:
    instances = found("swiglu", drawn(f"{GATED} {{ {SWIGLUS[form]} }}"))
    assert names(instances) == ["y"]
    assert {weight.name for weight in instances[0].weights} == ({"both"} if "split" in form else {"w", "v"})


@pytest.mark.parametrize("form", NO_SWIGLUS)
def test_finds_no_other_gate(form: str) -> None:
    assert found("swiglu", drawn(f"{GATED} {{ {NO_SWIGLUS[form]} }}")) == ()


def test_two_matrices_that_become_one_are_a_loss() -> None:
    instances = found("swiglu", drawn(f"{GATED} {{ {SWIGLUS['as Llama has it']} }}"))
    assert list(lost("swiglu", instances, drawn(f"{GATED} {{ {SWIGLUS['one matrix that is split']} }}"))) == ["swiglu"]


def test_gemm_instead_of_matmul_and_sum_is_no_loss() -> None:
    text = """
    g (float[4, 8] x) => (float[4, 6] y) <float[8, 6] w, float[8, 6] v, float[6] b> {
        g1 = MatMul (x, w) g0 = Add (g1, b) s = Sigmoid (g0) a = Mul (s, g0) u = MatMul (x, v) y = Mul (u, a)
    }"""
    instances = found("swiglu", drawn(text))
    gemm = text.replace("g1 = MatMul (x, w) g0 = Add (g1, b)", "g0 = Gemm (x, w, b)")
    assert len(instances) == 1
    assert lost("swiglu", instances, drawn(gemm)) == {}
    assert lost("swiglu", instances, drawn(gemm.replace("Gemm (", "Gemm <alpha = 2.0> ("))) != {}


GEGLUS = {
    "op that adds the bias": "g = MatMul (x, w) a = com.microsoft.BiasGelu (g, b) u = MatMul (x, v) y = Mul (u, a)",
    "faster op that adds a bias": """
        g = MatMul (x, w) a = com.microsoft.FastGelu (g, b) u = MatMul (x, v) y = Mul (u, a)
    """,
    "faster op that adds what is computed": """
        g = MatMul (x, w) a = com.microsoft.FastGelu (g, g) u = MatMul (x, v) y = Mul (u, a)
    """,
    "op": "g = MatMul (x, w) a = Gelu (g) u = MatMul (x, v) y = Mul (u, a)",
    "spelled out": """
        root = Constant <value_float = 1.4142135> () two = Constant <value_float = 2.0> ()
        half = Constant <value_float = 0.5> ()
        g0 = MatMul (x, w) g = Add (g0, b) d = Div (g, root) e = Erf (d) e2 = Div (e, two) p = Add (e2, half)
        a = Mul (g, p) u = MatMul (x, v) y = Mul (a, u)
    """,
    "one matrix that is split": """
        m = MatMul (x, both) u, g = Split <axis = -1, num_outputs = 2> (m) a = Gelu (g) y = Mul (u, a)
    """,
}


@pytest.mark.parametrize("form", GEGLUS)
def test_geglu(form: str) -> None:
    model = drawn(f"{GATED} {{ {GEGLUS[form]} }}")
    (instance,) = found("geglu", model)
    assert {weight.name for weight in instance.weights} >= ({"both"} if "split" in form else {"w", "v"})
    assert found("swiglu", model) == ()
    assert list(lost("geglu", (instance,), drawn(f"{GATED} {{ {SWIGLUS['as Llama has it']} }}"))) == ["geglu"]


@pytest.mark.parametrize("kind", ["geglu", "swiglu"])
def test_gelu_and_silu_alone_are_no_gates(kind: str) -> None:
    assert found(kind, drawn(f"{GATED} {{ g = MatMul (x, w) a = Gelu (g) y = Mul (a, b) }}")) == ()


@pytest.mark.parametrize(("kind", "forms"), [("swiglu", SWIGLUS), ("geglu", GEGLUS)])
def test_one_matrix_names_the_step_that_takes_it_apart(kind: str, forms: dict[str, str]) -> None:
    said = STRUCTURES[kind].find(detached(drawn(f"{GATED} {{ {forms['one matrix that is split']} }}")))
    assert said.instead == f"1 {kind} block whose gate and value are one matrix in the source already: both"
    assert "split-gate-up" in said.remedy
