"""Batch norm, layer norm and RMS norm, as one op and spelled out."""

from __future__ import annotations

import pytest

from tests.support.structure_models import BATCH_NORM, drawn, found, lost, names

HEAD = "g (float[2, 4, 8] x) => (float[2, 4, 8] y) <float[8] w, float[8] b, int64[1] last = {-1}>"
NUMBERS = """
    two = Constant <value_float = 2.0> ()
    one = Constant <value_float = 1.0> ()
    eps = Constant <value_float = 1e-6> ()
"""

LAYER_NORMS = {
    "op": "y = LayerNormalization <axis = -1> (x, w, b)",
    "op without bias": "y = LayerNormalization <axis = -1> (x, w)",
    "textbook": NUMBERS
    + """
        m = ReduceMean (x, last) d = Sub (x, m) q = Pow (d, two) v = ReduceMean (q, last) e = Add (v, eps)
        s = Sqrt (e) n = Div (d, s) nw = Mul (n, w) y = Add (nw, b)
    """,
    "the difference twice, no bias, as Cohere has it": NUMBERS
    + """
        m = ReduceMean (x, last) d = Sub (x, m) q = Mul (d, d) v = ReduceMean (q, last) e = Add (eps, v)
        s = Sqrt (e) r = Reciprocal (s) d2 = Sub (x, m) n = Mul (d2, r) y = Mul (w, n)
    """,
    "by var, as torch writes it": NUMBERS
    + """
        kept = Constant <value_ints = [2, 4, 1]> ()
        m = ReduceMean (x, last) m2 = ReduceMean (x, last) d2 = Sub (x, m2) q = Mul (d2, d2)
        v0 = ReduceMean <keepdims = 0> (q, last) v1 = Reshape (v0, kept) v = Expand (v1, kept) d = Sub (x, m)
        e = Add (v, eps) s = Sqrt (e) n = Div (d, s) nw = Mul (n, w) y = Add (nw, b)
    """,
    "by var_mean: the mean is a sum over 8": NUMBERS
    + """
        eight = Constant <value_float = 8.0> ()
        m2 = ReduceMean (x, last) d2 = Sub (x, m2) q = Mul (d2, d2) v = ReduceMean (q, last)
        m0 = ReduceSum (x, last) m = Div (m0, eight) d = Sub (x, m)
        e = Add (v, eps) s = Sqrt (e) r = Reciprocal (s) n = Mul (d, r) nw = Mul (n, w) y = Add (nw, b)
    """,
    "std + ε, unbiased, the scale first": NUMBERS
    + """
        eight = Constant <value_float = 8.0> () seven = Constant <value_float = 7.0> ()
        m = ReduceMean (x, last) d = Sub (x, m) q = Pow (d, two) v0 = ReduceMean (q, last) v1 = Mul (v0, eight)
        v = Div (v1, seven) s = Sqrt (v) e = Add (s, eps) dw = Mul (d, w) n = Div (dw, e) y = Add (n, b)
    """,
    "E[x²] - E[x]², not below 0": NUMBERS
    + """
        zero = Constant <value_float = 0.0> ()
        m = ReduceMean (x, last) xx = Mul (x, x) q = ReduceMean (xx, last) mm = Pow (m, two) v0 = Sub (q, mm)
        v = Max (v0, zero) e = Add (v, eps) s = Sqrt (e) d = Sub (x, m) n = Div (d, s) nw = Mul (n, w) y = Add (nw, b)
    """,
    "in another type inside": NUMBERS
    + """
        x2 = Cast <to = 11> (x) x3 = Cast <to = 1> (x2)
        m = ReduceMean (x3, last) d = Sub (x3, m) q = Pow (d, two) v = ReduceMean (q, last) e = Add (v, eps)
        s = Sqrt (e) r = Div (one, s) n = Mul (d, r) nw = Mul (n, w) y = Add (b, nw)
    """,
    "scale and bias folded into the data, as TensorFlow writes it": NUMBERS
    + """
        m = ReduceMean (x, last) d = Sub (x, m) q = Mul (d, d) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e)
        r = Reciprocal (s) a = Mul (r, w) xa = Mul (x, a) ma = Mul (m, a) c = Sub (b, ma) y = Add (xa, c)
    """,
    "divided by the length of the distance from the mean": NUMBERS
    + """
        root = Constant <value_float = 2.828427> ()
        m = ReduceMean (x, last) d = Sub (x, m) l = ReduceL2 (d, last) s0 = Div (l, root) s = Add (s0, eps)
        n = Div (d, s) nw = Mul (n, w) y = Add (nw, b)
    """,
    "a unit vector times √8, of a mean that is added": NUMBERS
    + """
        root = Constant <value_float = 2.828427> ()
        m0 = ReduceMean (x, last) m = Neg (m0) d = Add (x, m) l = ReduceL2 (d, last) s = Clip (l, eps) u = Div (d, s)
        n = Mul (u, root) nw = Mul (n, w) y = Add (nw, b)
    """,
    "sums over the size that the graph computes": NUMBERS
    + """
        at = Constant <value_int = 2> () sizes = Shape (x) size = Gather (sizes, at) f = Cast <to = 1> (size)
        t = ReduceSum (x, last) m = Div (t, f) d = Sub (x, m) q = Pow (d, two) v0 = ReduceSum (q, last) v = Div (v0, f)
        half = Constant <value_float = 0.5> () e = Add (v, eps) s = Pow (e, half) n = Div (d, s) nw = Mul (n, w)
        y = Add (nw, b)
    """,
    "over an axis in the middle": NUMBERS
    + """
        middle = Constant <value_ints = [-2]> ()
        m = ReduceMean (x, middle) d = Sub (x, m) q = Pow (d, two) v = ReduceMean (q, middle) e = Add (v, eps)
        s = Sqrt (e) n = Div (d, s) nw = Mul (n, w) y = Add (nw, b)
    """,
}

RMS_NORMS = {
    "as Llama has it": NUMBERS
    + """
        q = Pow (x, two) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e) r = Reciprocal (s)
        n = Mul (x, r) y = Mul (w, n)
    """,
    "divided": NUMBERS
    + "q = Mul (x, x) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e) n = Div (x, s) y = Mul (n, w)",
    "1 + w, as Gemma has it": NUMBERS
    + """
        q = Pow (x, two) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e) r = Reciprocal (s)
        n = Mul (x, r) w1 = Add (one, w) y = Mul (n, w1)
    """,
    "by a power, as Gemma 3n has it": NUMBERS
    + """
        less = Constant <value_float = -0.5> ()
        q = Pow (x, two) v = ReduceMean (q, last) e = Add (v, eps) r = Pow (e, less) n = Mul (x, r) y = Mul (n, w)
    """,
    "a sum over 8": NUMBERS
    + """
        eight = Constant <value_float = 8.0> ()
        q = Pow (x, two) v0 = ReduceSum (q, last) v = Div (v0, eight) e = Add (v, eps) s = Sqrt (e) n = Div (x, s)
        y = Mul (n, w)
    """,
    "a length over √8": NUMBERS
    + """
        root = Constant <value_float = 0.35355338> ()
        l = ReduceL2 (x, last) s0 = Mul (root, l) s = Add (s0, eps) n = Div (x, s) y = Mul (n, w)
    """,
    "a unit vector, the scale times √8": NUMBERS
    + """
        root = Constant <value_float = 2.828427> ()
        l = ReduceL2 (x, last) s = Clip (l, eps) u = Div (x, s) w8 = Mul (w, root) y = Mul (u, w8)
    """,
    "the scale within the root": NUMBERS
    + """
        q = Mul (x, x) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e) r = Reciprocal (s) rw = Mul (r, w)
        y = Mul (x, rw)
    """,
    "a mean square within the range of float16": NUMBERS
    + """
        most = Constant <value_float = 65504.0> () q = Pow (x, two) v = ReduceMean (q, last) e = Clip (v, eps, most)
        s = Sqrt (e) n = Div (x, s) y = Mul (n, w)
    """,
    "without a scale": NUMBERS
    + "q = Pow (x, two) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e) y = Div (x, s)",
    "onnxruntime's op": "y = SimplifiedLayerNormalization <axis = -1, epsilon = 1e-6> (x, w)",
}

NEITHER = {
    "the length of a row": NUMBERS
    + "q = Pow (x, two) v = ReduceSum (q, last) e = Add (v, eps) s = Sqrt (e) y = Div (x, s)",
    "a sum over another number": NUMBERS
    + """
        five = Constant <value_float = 5.0> ()
        q = Pow (x, two) v0 = ReduceSum (q, last) v = Div (v0, five) e = Add (v, eps) s = Sqrt (e) y = Div (x, s)
    """,
    "a length": NUMBERS + "l = ReduceL2 (x, last) s = Add (l, eps) n = Div (x, s) y = Mul (n, w)",
    "a difference of moments of two values": NUMBERS
    + """
        z = Relu (x) m = ReduceMean (z, last) xx = Mul (x, x) q = ReduceMean (xx, last) mm = Mul (m, m)
        v = Sub (q, mm) e = Add (v, eps) s = Sqrt (e) d = Sub (x, m) y = Div (d, s)
    """,
    "a division by the variance": NUMBERS
    + """
        m = ReduceMean (x, last) d = Sub (x, m) q = Pow (d, two) v = ReduceMean (q, last) e = Add (v, eps)
        s = Sqrt (e) ss = Mul (s, s) y = Div (d, ss)
    """,
    "the root of a mean of lengths of another axis": NUMBERS
    + """
        middle = Constant <value_ints = [1]> ()
        m = ReduceMean (x, middle) d = Sub (x, m) q = Pow (d, two) v = ReduceMean (q, last) e = Add (v, eps)
        s = Sqrt (e) y = Div (x, s)
    """,
    "a mean of weighted squares": NUMBERS
    + "q = Mul (x, x) qw = Mul (q, w) v = ReduceMean (qw, last) e = Add (v, eps) s = Sqrt (e) y = Div (x, s)",
    "a length with other weights": NUMBERS
    + """
        xw = Mul (x, w) xb = Mul (x, b) q = Mul (xb, xb) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e)
        y = Div (xw, s)
    """,
    "a vector added within the mean": NUMBERS
    + "z = Add (x, b) q = Mul (z, z) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e) y = Div (x, s)",
    "a number added within the mean": NUMBERS
    + "z = Add (x, two) q = Mul (z, z) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e) y = Div (x, s)",
    "a running mean": NUMBERS
    + "d = Sub (x, b) q = Mul (x, x) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e) y = Div (d, s)",
    "a learned divisor": NUMBERS
    + """
        m = ReduceMean (x, last) d = Sub (x, m) q = Pow (d, two) v = ReduceMean (q, last) sum = Add (v, w)
        s = Sqrt (sum) y = Div (d, s)
    """,
    "an exponential of the variance": NUMBERS
    + """
        m = ReduceMean (x, last) d = Sub (x, m) q = Pow (d, two) v0 = ReduceMean (q, last) v = Exp (v0)
        e = Add (v, eps) s = Sqrt (e) y = Div (d, s)
    """,
    "a mean of squares less a square of no mean": NUMBERS
    + """
        xx = Mul (x, x) q = ReduceMean (xx, last) m = Sqrt (q) z = Relu (m) zz = Mul (z, z)
        v = Sub (q, zz) e = Add (v, eps) s = Sqrt (e) d = Sub (x, m) y = Div (d, s)
    """,
    "of another value": NUMBERS
    + """
        z = Relu (x) q = Pow (z, two) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e) y = Div (x, s)
    """,
    "a standard deviation alone": NUMBERS
    + """
        m = ReduceMean (x, last) d = Sub (x, m) q = Pow (d, two) v = ReduceMean (q, last) e = Add (v, eps)
        s = Sqrt (e) y = Mul (s, x)
    """,
    "each channel of an image by itself": NUMBERS
    + """
        shape = Constant <value_ints = [1, 2, 4, 8]> ()
        back = Constant <value_ints = [2, 4, 8]> ()
        axes = Constant <value_ints = [2, 3]> ()
        i = Reshape (x, shape)
        m = ReduceMean (i, axes) d = Sub (i, m) q = Pow (d, two) v = ReduceMean (q, axes) e = Add (v, eps)
        s = Sqrt (e) n = Div (d, s) y = Reshape (n, back)
    """,
}


def model(body: str):
    return drawn(f"{HEAD} {{ {body} }}")


@pytest.mark.parametrize("form", LAYER_NORMS)
def test_layer_norm(form: str) -> None:
    assert names(found("layernorm", model(LAYER_NORMS[form]))) == ["y"]
    assert found("rmsnorm", model(LAYER_NORMS[form])) == ()


@pytest.mark.parametrize("form", RMS_NORMS)
def test_rms_norm(form: str) -> None:
    assert names(found("rmsnorm", model(RMS_NORMS[form]))) == ["y"]
    assert found("layernorm", model(RMS_NORMS[form])) == ()


@pytest.mark.parametrize("form", NEITHER)
def test_other_sums_of_squares_are_neither(form: str) -> None:
    assert found("layernorm", model(NEITHER[form])) == ()
    assert found("rmsnorm", model(NEITHER[form])) == ()


SQUARES = {
    "the mean of another axis": """
        m = ReduceMean (x, middle) z = ReduceMean (x, last) d2 = Sub (x, z) q = Mul (d2, d2) v = ReduceMean (q, last)
        e = Add (v, eps) s = Sqrt (e) d = Sub (x, m) y = Div (d, s)
    """,
    "the moments of two axes": """
        m = ReduceMean (x, middle) xx = Mul (x, x) q = ReduceMean (xx, last) mm = Mul (m, m) v = Sub (q, mm)
        e = Add (v, eps) s = Sqrt (e) d = Sub (x, m) y = Div (d, s)
    """,
    "the lengths of the columns": """
        t = Transpose <perm = [0, 2, 1]> (x) q = Mul (t, t) v = ReduceMean (q, last) e = Add (v, eps) s = Sqrt (e)
        y = Div (x, s)
    """,
}


@pytest.mark.parametrize("form", SQUARES)
def test_rows_and_columns_of_one_size_are_told_apart(form: str) -> None:
    head = "g (float[2, 8, 8] x) => (float[2, 8, 8] y) <int64[1] last = {-1}, int64[1] middle = {1}>"
    text = drawn(f"{head} {{ {NUMBERS} {SQUARES[form]} }}")
    assert found("layernorm", text) == () and found("rmsnorm", text) == ()


@pytest.mark.parametrize("bias", ["", "y = Add (nw, b)"], ids=["no bias", "bias"])
def test_the_scale_of_a_norm_over_a_computed_size_belongs_to_it(bias: str) -> None:
    """A factor that the graph computes from sizes is no scale."""
    text = f"""{NUMBERS}
        at = Constant <value_ints = [2]> () sizes = Shape (x) size = Gather (sizes, at) n0 = ReduceProd <keepdims = 0>
        (size) f = Cast <to = 1> (n0) f1 = Sub (f, one) m = ReduceMean (x, last) d = Sub (x, m) q = Mul (d, d)
        v0 = ReduceMean (q, last) v1 = Mul (v0, f) v = Div (v1, f1) s = Sqrt (v) e = Add (s, eps) n = Div (d, e)
        {"nw" if bias else "y"} = Mul (n, w) {bias}"""
    (instance,) = found("layernorm", model(text))
    assert instance.core is not None and instance.core.value == "y"


def test_a_count_that_is_stored_for_each_channel() -> None:
    """As PatchTST has it after folding."""
    text = f"""
    g (float[2, 6, 3] x) => (float[2, 6, 3] y) <float[1, 1, 3] count = {{6.0, 6.0, 6.0}}, int64[1] middle = {{1}}> {{
        {NUMBERS} t = ReduceSum (x, middle) m = Div (t, count) d = Sub (x, m) q = Pow (d, two)
        u = ReduceSum (q, middle) v = Div (u, count) e = Add (v, eps) s = Sqrt (e) y = Div (d, s)
    }}"""
    assert names(found("layernorm", drawn(text))) == ["y"]


def test_layer_norm_over_the_channels_of_an_image() -> None:
    text = f"""
    g (float[2, 3, 4, 4] x) => (float[2, 3, 4, 4] y) <float[3, 1, 1] w, int64[1] channels = {{1}}> {{ {NUMBERS}
        m = ReduceMean (x, channels) d = Sub (x, m) q = Pow (d, two) v = ReduceMean (q, channels) e = Add (v, eps)
        s = Sqrt (e) n = Div (d, s) y = Mul (n, w)
    }}"""
    assert names(found("layernorm", drawn(text))) == ["y"]


def test_batch_norm_is_held_at_both_ends() -> None:
    (instance,) = found("batchnorm", drawn(BATCH_NORM))
    assert [site.tight.name for site in instance.pins] == ["c", "y"]
    assert [weight.name for weight in instance.weights] == ["s", "b", "m", "v"]


@pytest.mark.parametrize(
    ("node", "gone"),
    [
        ("<epsilon = 0.001, momentum = 0.5> (c, s, b, m, v)", []),
        ("<epsilon = 0.002> (c, s, b, m, v)", ["batchnorm"]),
        ("<epsilon = 0.001> (c, s, b, m, s)", ["batchnorm"]),
    ],
    ids=["momentum", "epsilon", "weight"],
)
def test_another_epsilon_or_weight_is_another_norm(node: str, gone: list[str]) -> None:
    instances = found("batchnorm", drawn(BATCH_NORM))
    changed = drawn(BATCH_NORM.replace("<epsilon = 0.001> (c, s, b, m, v)", node))
    assert list(lost("batchnorm", instances, changed)) == gone


TABLE = """
g (float[8] x) => (float[8] y) <float[2, 8] table, float[8] w> {
    first = Constant <value_ints = [0]> ()
    n = LayerNormalization (table, w)
    r = ReduceMean <keepdims = 0> (n, first)
    y = Add (r, x)
}"""


def test_the_norm_of_a_constant_is_no_instance() -> None:
    """To fold it is no loss."""
    assert found("layernorm", drawn(TABLE)) == ()


# Group norm: as one op, by InstanceNormalization, and spelled out; and what is a layer norm beside it.

GROUPS = """g (float[2, 8, 4, 4] x) => (float[2, 8, 4, 4] y) <float[8, 1, 1] w, float[8, 1, 1] b, float[8] s,
    float[8] t, float[4] ones, float[4] zeros>"""
SHAPES = """
    into = Constant <value_ints = [0, 4, -1]> ()
    back = Constant <value_ints = [2, 8, 4, 4]> ()
    last = Constant <value_ints = [-1]> ()
    eps = Constant <value_float = 1e-5> ()
"""
ENDS = "r = Reshape (n, back) rw = Mul (r, w) y = Add (rw, b)"

GROUP_NORMS = {
    "op": "y = GroupNormalization <num_groups = 4> (x, s, t)",
    "an instance norm of groups": f"{SHAPES} g = Reshape (x, into) n = InstanceNormalization (g, ones, zeros) {ENDS}",
    "spelled out": f"""{SHAPES} g = Reshape (x, into) m = ReduceMean (g, last) d = Sub (g, m) q = Mul (d, d)
        v = ReduceMean (q, last) e = Add (v, eps) root = Sqrt (e) n = Div (d, root) {ENDS}""",
    "spelled out, in five axes": f"""
        split = Constant <value_ints = [2, 4, 2, 4, 4]> () axes = Constant <value_ints = [2, 3, 4]> () {SHAPES}
        g = Reshape (x, split) m = ReduceMean (g, axes) d = Sub (g, m) q = Mul (d, d)
        v = ReduceMean (q, axes) e = Add (v, eps) root = Sqrt (e) n = Div (d, root) {ENDS}""",
}


def grouped(form: str):
    return drawn(f"{GROUPS} {{ {form} }}", 21)


@pytest.mark.parametrize("form", GROUP_NORMS)
def test_group_norm(form: str) -> None:
    instances = found("groupnorm", grouped(GROUP_NORMS[form]))
    assert names(instances) == ["y"] and instances[0].pins[-1].tight.name == "y"
    assert found("layernorm", grouped(GROUP_NORMS[form])) == ()
    assert lost("groupnorm", instances, grouped(GROUP_NORMS[form])) == {}
    assert len(lost("groupnorm", instances, grouped("y = Relu (x)"))) == 1


def test_a_group_norm_with_its_scale_among_the_groups() -> None:
    body = f"""{SHAPES}
        split = Constant <value_ints = [2, 4, 2, 16]> () axes = Constant <value_ints = [2, 3]> ()
        by_group = Constant <value_ints = [4, 2, 1]> () w4 = Reshape (w, by_group) b4 = Reshape (b, by_group)
        g = Reshape (x, split) m = ReduceMean (g, axes) d = Sub (g, m) q = Mul (d, d)
        v = ReduceMean (q, axes) e = Add (v, eps) root = Sqrt (e) n = Div (d, root) nw = Mul (n, w4) nb = Add (nw, b4)
        y = Reshape (nb, back)"""
    assert names(found("groupnorm", grouped(body))) == ["nb"]
    assert found("layernorm", grouped(body)) == ()


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
