"""Group norm: as one op, by InstanceNormalization, and spelled out; and what is a layer norm beside it."""

from __future__ import annotations

import pytest

from tests.support.structure_models import drawn, found, lost, names

HEAD = """g (float[2, 8, 4, 4] x) => (float[2, 8, 4, 4] y) <float[8, 1, 1] w, float[8, 1, 1] b, float[8] s, float[8] t,
    float[4] ones, float[4] zeros>"""
SHAPES = """
    into = Constant <value_ints = [0, 4, -1]> ()
    back = Constant <value_ints = [2, 8, 4, 4]> ()
    last = Constant <value_ints = [-1]> ()
    eps = Constant <value_float = 1e-5> ()
"""
ENDS = "r = Reshape (n, back) rw = Mul (r, w) y = Add (rw, b)"

FORMS = {
    "op": "y = GroupNormalization <num_groups = 4> (x, s, t)",
    "an instance norm of groups": f"{SHAPES} g = Reshape (x, into) n = InstanceNormalization (g, ones, zeros) {ENDS}",
    "spelled out": f"""{SHAPES} g = Reshape (x, into) m = ReduceMean (g, last) d = Sub (g, m) q = Mul (d, d)
        v = ReduceMean (q, last) e = Add (v, eps) root = Sqrt (e) n = Div (d, root) {ENDS}""",
    "spelled out, in five axes": f"""
        split = Constant <value_ints = [2, 4, 2, 4, 4]> () axes = Constant <value_ints = [2, 3, 4]> () {SHAPES}
        g = Reshape (x, split) m = ReduceMean (g, axes) d = Sub (g, m) q = Mul (d, d)
        v = ReduceMean (q, axes) e = Add (v, eps) root = Sqrt (e) n = Div (d, root) {ENDS}""",
}


def model(form: str):
    return drawn(f"{HEAD} {{ {form} }}", 21)


@pytest.mark.parametrize("form", FORMS)
def test_finds_each_form_once(form: str) -> None:
    instances = found("groupnorm", model(FORMS[form]))
    assert names(instances) == ["y"]
    assert found("layernorm", model(FORMS[form])) == ()
    assert lost("groupnorm", instances, model(FORMS[form])) == {}
    assert len(lost("groupnorm", instances, model("y = Relu (x)"))) == 1


def test_a_layer_norm_of_windows_is_none() -> None:
    """Positions are put together, not channels."""
    text = """g (float[2, 4, 4, 8] x) => (float[2, 4, 4, 8] y) <float[8] w, float[8] b> {
        into = Constant <value_ints = [2, 16, 8]> () back = Constant <value_ints = [2, 4, 4, 8]> ()
        last = Constant <value_ints = [-1]> () eps = Constant <value_float = 1e-5> ()
        g = Reshape (x, into) m = ReduceMean (g, last) d = Sub (g, m) q = Mul (d, d)
        v = ReduceMean (q, last) e = Add (v, eps) root = Sqrt (e) n = Div (d, root) nw = Mul (n, w) nb = Add (nw, b)
        y = Reshape (nb, back)
    }"""
    assert found("groupnorm", drawn(text)) == ()
    assert names(found("layernorm", drawn(text))) == ["nb"]
