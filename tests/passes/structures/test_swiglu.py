"""SwiGLU: a projection gated by the SiLU of another."""

from __future__ import annotations

import pytest

from passes.structures import STRUCTURES
from tests.support.onnx_models import detached
from tests.support.structure_models import drawn, found, lost, names

HEAD = "g (float[2, 4, 8] x) => (float[2, 4, 6] y) <float[8, 6] w, float[8, 6] v, float[6] b, float[8, 12] both>"

FORMS = {
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
}
OTHERS = {
    "a gated linear unit": "g0 = MatMul (x, w) s = Sigmoid (g0) u = MatMul (x, v) y = Mul (s, u)",
    "silu alone": "g0 = MatMul (x, w) s = Sigmoid (g0) a = Mul (g0, s) y = Mul (a, b)",
    "squeezed and excited": """
        m = MatMul (x, w) s = Sigmoid (m) a = Mul (m, s) p = ReduceMean (a) e = Sigmoid (p) y = Mul (a, e)
    """,
    "gate and value of different inputs": """
        r = Relu (x) g0 = MatMul (r, w) s = Sigmoid (g0) a = Mul (g0, s) u = MatMul (x, v) y = Mul (a, u)
    """,
}


@pytest.mark.parametrize("form", FORMS)
def test_finds_each_form_once(form: str) -> None:
    instances = found("swiglu", drawn(f"{HEAD} {{ {FORMS[form]} }}"))
    assert names(instances) == ["y"]
    assert {weight.name for weight in instances[0].weights} == ({"both"} if "split" in form else {"w", "v"})


@pytest.mark.parametrize("form", OTHERS)
def test_finds_nothing_else(form: str) -> None:
    assert found("swiglu", drawn(f"{HEAD} {{ {OTHERS[form]} }}")) == ()


def test_two_matrices_that_become_one_are_a_loss() -> None:
    instances = found("swiglu", drawn(f"{HEAD} {{ {FORMS['as Llama has it']} }}"))
    assert list(lost("swiglu", instances, drawn(f"{HEAD} {{ {FORMS['one matrix that is split']} }}"))) == ["swiglu"]


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
    model = drawn(f"{HEAD} {{ {GEGLUS[form]} }}")
    (instance,) = found("geglu", model)
    assert {weight.name for weight in instance.weights} >= ({"both"} if "split" in form else {"w", "v"})
    assert found("swiglu", model) == ()
    assert list(lost("geglu", (instance,), drawn(f"{HEAD} {{ {FORMS['as Llama has it']} }}"))) == ["geglu"]


@pytest.mark.parametrize("kind", ["geglu", "swiglu"])
def test_gelu_and_silu_alone_are_no_gates(kind: str) -> None:
    assert found(kind, drawn(f"{HEAD} {{ g = MatMul (x, w) a = Gelu (g) y = Mul (a, b) }}")) == ()


@pytest.mark.parametrize(("kind", "forms"), [("swiglu", FORMS), ("geglu", GEGLUS)])
def test_one_matrix_names_the_step_that_takes_it_apart(kind: str, forms: dict[str, str]) -> None:
    said = STRUCTURES[kind].find(detached(drawn(f"{HEAD} {{ {forms['one matrix that is split']} }}")))
    assert said.instead == f"1 {kind} block whose gate and value are one matrix in the source already: both"
    assert "split-gate-up" in said.remedy
