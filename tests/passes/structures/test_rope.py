"""Rotary embedding: halves or pairs of x, rotated by angles that come in as cos and sin."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

from tests.support.structure_models import drawn, found, lost, names

HEAD = """
g (float[1, 2, 4, 8] x, float[1, 1, 4, 8] cos, float[1, 1, 4, 8] sin, float[1, 1, 4, 4] c, float[1, 1, 4, 4] s)
    => (float[1, 2, 4, 8] y)
<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] half = {4}, int64[1] all = {8},
 int64[1] last = {-1}, float[8, 8] wide>
"""
HALVES = "left = Slice (x, zero, half, last) right = Slice (x, half, all, last)"
TURNED = "minus = Neg (right) turned = Concat <axis = -1> (minus, left)"

TURN = ", ".join(str((row - column == 4) - (column - row == 4)) for row in range(8) for column in range(8))
FORMS = {
    "halves, as Llama has it": f"""
        {HALVES} {TURNED}
        straight = Mul (x, cos) across = Mul (turned, sin) y = Add (straight, across)
    """,
    "halves by Split, the terms in another order": """
        left, right = Split <axis = -1, num_outputs = 2> (x) minus = Neg (right)
        turned = Concat <axis = -1> (minus, left)
        across = Mul (sin, turned) straight = Mul (cos, x) y = Add (across, straight)
    """,
    "pairs, as GPT-J and Cohere have it": """
        shape = Constant <value_ints = [1, 2, 4, 8]> ()
        even = Slice (x, zero, all, last, two) odd = Slice (x, one, all, last, two) minus = Neg (odd)
        a = Unsqueeze (minus, last) b = Unsqueeze (even, last) pairs = Concat <axis = -1> (a, b)
        turned = Reshape (pairs, shape)
        straight = Mul (x, cos) across = Mul (turned, sin) y = Add (straight, across)
    """,
    "a part of each head, as GPT-NeoX has it": """
        few = Slice (x, zero, half, last) rest = Slice (x, half, all, last)
        left = Slice (few, zero, two, last) right = Slice (few, two, half, last)
        minus = Neg (right) turned = Concat <axis = -1> (minus, left)
        straight = Mul (few, c) across = Mul (turned, s) sum = Add (straight, across)
        y = Concat <axis = -1> (sum, rest)
    """,
    "the signs in the table": f"""
        {HALVES} swapped = Concat <axis = -1> (right, left) c0 = Cos (cos) s0 = Sin (c) less = Neg (s0)
        s1 = Concat <axis = -1> (less, s0) straight = Mul (x, c0) across = Mul (swapped, s1) y = Add (straight, across)
    """,
    "turned by a matrix": f"""
        turn = Constant <value = float[8, 8] {{{TURN}}}> ()
        c0 = Cos (cos) s0 = Sin (cos) turned = MatMul (x, turn) straight = Mul (c0, x) across = Mul (turned, s0)
        y = Add (straight, across)
    """,
    "turned as pairs, and scaled as heads": """
        shape = Constant <value_ints = [1, 2, 4, 8]> () split = Constant <value_ints = [1, 2, 4, 4, 2]> ()
        pairs = Reshape (x, split) even, odd = Split <axis = -1, num_outputs = 2> (pairs) minus = Neg (odd)
        swapped = Concat <axis = -1> (minus, even) turned = Reshape (swapped, shape)
        straight = Mul (x, cos) across = Mul (turned, sin) y = Add (straight, across)
    """,
    "two halves apart": f"""
        {HALVES}
        lc = Mul (left, c) rs = Mul (right, s) first = Sub (lc, rs)
        rc = Mul (right, c) ls = Mul (left, s) second = Add (rc, ls)
        y = Concat <axis = -1> (first, second)
    """,
}
MATRICES = """
    split = Constant <value_ints = [1, 2, 4, 4, 1, 2]> () square = Constant <value_ints = [1, 1, 4, 4, 2, 2]> ()
    shape = Constant <value_ints = [1, 2, 4, 8]> ()
    first = Constant <value_int = 0> () second = Constant <value_int = 1> ()
    c0 = Cos (c) s0 = Sin (c) less = Neg (s0) four = Concat <axis = -1> (c0, less, s0, c0) m = Reshape (four, square)
    pairs = Reshape (x, split) a = Gather <axis = -1> (pairs, first) b = Gather <axis = -1> (pairs, second)
    ma = Gather <axis = -1> (m, first) mb = Gather <axis = -1> (m, second)
"""
OTHERS = {
    "both halves negated": f"""
        {HALVES} a = Neg (left) b = Neg (right) turned = Concat <axis = -1> (b, a)
        straight = Mul (x, cos) across = Mul (turned, sin) y = Add (straight, across)
    """,
    "a projection": """
        c0 = Cos (cos) s0 = Sin (sin) turned = MatMul (x, wide) straight = Mul (c0, x) across = Mul (turned, s0)
        y = Add (straight, across)
    """,
    "a projection of the negative, both with gates": """
        minus = Neg (x) turned = MatMul (minus, wide) straight = Mul (x, cos) across = Mul (turned, sin)
        y = Add (straight, across)
    """,
    "the negative alone": """
        minus = Neg (x) two_ = Concat <axis = -1> (minus, x) turned = Slice (two_, zero, all, last)
        straight = Mul (x, cos) across = Mul (turned, sin) y = Add (straight, across)
    """,
    "parts of another value": f"""{MATRICES}
        z0 = Relu (x) z1 = Reshape (z0, split) z = Gather <axis = -1> (z1, second)
        left = Mul (ma, a) right = Mul (mb, z) sum = Add (left, right) y = Reshape (sum, shape)
    """,
    "the angles of sines alone": f"""
        {HALVES} swapped = Concat <axis = -1> (right, left) s0 = Sin (cos) s1 = Sin (sin)
        straight = Mul (x, s0) across = Mul (swapped, s1) y = Add (straight, across)
    """,
    "turned without a straight term": f"{HALVES} {TURNED} y = Mul (turned, sin)",
    "the straight term is another value": f"""
        {HALVES} {TURNED} z = Relu (x)
        straight = Mul (z, cos) across = Mul (turned, sin) y = Add (straight, across)
    """,
    "not turned": f"""
        {HALVES} same = Concat <axis = -1> (right, left)
        straight = Mul (x, cos) across = Mul (same, sin) y = Add (straight, across)
    """,
    "a sum instead of the difference": f"""
        {HALVES}
        lc = Mul (left, c) rs = Mul (right, s) first = Add (lc, rs)
        rc = Mul (right, c) ls = Mul (left, s) second = Add (rc, ls)
        y = Concat <axis = -1> (first, second)
    """,
}


@pytest.mark.parametrize("form", FORMS)
def test_finds_each_form_once(form: str) -> None:
    instances = found("rope", drawn(f"{HEAD} {{ {FORMS[form]} }}"))
    assert names(instances) == (["sum"] if "NeoX" in form else ["y"])


def test_a_product_with_rotations_is_found() -> None:
    text = f"{MATRICES} left = Mul (ma, a) right = Mul (mb, b) sum = Add (left, right) y = Reshape (sum, shape)"
    assert names(found("rope", drawn(f"{HEAD} {{ {text} }}"))) == ["sum"]


@pytest.mark.parametrize("form", OTHERS)
def test_finds_nothing_else(form: str) -> None:
    assert found("rope", drawn(f"{HEAD} {{ {OTHERS[form]} }}")) == ()


@pytest.mark.parametrize("form", [form for form in FORMS if "NeoX" not in form])
def test_one_op_in_its_place_is_a_loss(form: str) -> None:
    instances = found("rope", drawn(f"{HEAD} {{ {FORMS[form]} }}"))
    op = "p = Constant <value_ints = [0, 1, 2, 3]> () y = com.microsoft.RotaryEmbedding (x, p, c, s)"
    model = drawn(f"{HEAD} {{ {op} }}")
    assert list(lost("rope", instances, model)) == ["rope"]
    assert names(found("rope", model)) == ["y"]


@pytest.mark.parametrize(("table", "is_lost"), [("cos = Cos (angles)", False), ("cos = Add (angles, angles)", True)])
def test_a_folded_table_may_differ_in_the_last_bit_where_libraries_round_apart(table: str, is_lost: bool) -> None:
    """What folds Cos is another library than ours, whose bits depend on the machine; a sum has the same bits in all."""
    head = HEAD.replace(", float[1, 1, 4, 8] cos", "").replace("<int64", "<float[1, 1, 4, 8] angles, int64")
    form = FORMS["halves, as Llama has it"]
    computed = drawn(f"{head} {{ {table} {form} }}")
    folded = drawn(f"{head.replace('angles', 'cos')} {{ {form} }}")
    angles = numpy_helper.to_array(computed.graph.initializer[0])
    values = np.cos(angles) if "Cos" in table else angles + angles
    folded.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.nextafter(values, np.float32(9)), "cos"))
    assert bool(lost("rope", found("rope", computed), folded)) is is_lost
