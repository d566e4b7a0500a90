"""Q, K and V merged, and the three old products left alive without any effect: that keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest

from passes.context import PassContext
from passes.optimize import draw_feeds
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.run.result import Status
from passes.run.runner import run_passes
from passes.step import PassResult, Step
from passes.structures import STRUCTURES
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from passes.weights.sharing import detached_copy
from tests.support.onnx_models import ATTENTION, attention, detached, matrix, model_of

QKV = STRUCTURES["qkv"]

QKV_NAMES = ("wq", "wk", "wv")
SIZES = {"width": 32, "heads": 2, "head": 16}
WEIGHTS = {name: matrix(32, 32, seed) for seed, name in enumerate(("wq", "wk", "wv", "wo"))}
SPLIT = "qm, km, vm = Split <axis = -1, num_outputs = 3> (qkv)"
MERGED = f"qkv = MatMul (h, wqkv) {SPLIT}"
OLD = "qd = MatMul (h, wq) kd = MatMul (h, wk) vd = MatMul (h, wv)"
NOTHING = """zero = Constant <value_float = 0.0> () one = Constant <value_float = 1.0> ()
    first = Constant <value_ints = [0]> () last = Constant <value_ints = [-1]> () wide = Constant <value_ints = [32]> ()
    two = Constant <value_ints = [2]> ()"""

LOST = ["attention 0"]


def block(projections: str, end: str = "", **weights: np.ndarray) -> onnx.ModelProto:
    """The attention block with Q, K and V made by `projections`, and `end` in the place of its last product."""
    text = ATTENTION.format(projections=f"{NOTHING} {projections}", **SIZES)
    text = text.replace("y = MatMul (flat, wo)", end or "y = MatMul (flat, wo)")
    more = {name: array for name, array in MORE.items() if name in text}
    return model_of(text, **WEIGHTS, **weights, **more)


def joined() -> np.ndarray:
    return np.concatenate([WEIGHTS[name] for name in QKV_NAMES], axis=1)


MORE = {
    "scale": np.array(16**-0.5, np.float32),
    "still": np.zeros((2, 2, 8, 1), np.float32),
    "in_a_row": joined().ravel(),
    "with_ones": joined()[:, :, None],
    "in_a_stack": joined()[None],
    "vector": matrix(32, 1, 7).ravel(),
    "gains": matrix(1, 32, 9),
    "filters": matrix(32, 3, 8).reshape(32, 1, 3),
}
"""Stored tensors of some cases; `still` are the offsets of a DeformConv that moves nothing."""


def each(template: str) -> str:
    """`template` for each of the three: `O` is what attention reads, `M` what is merged, `D` the old product."""
    written = []
    for role in "qkv":
        words = template.replace("OUT", role).replace("M!", f"{role}m").replace("D!", f"{role}d")
        written.append(words.replace("T!", f"{role}_"))
    return " ".join(written)


BESIDE = {
    "for its Shape": "T!s = Shape (D!) OUT = Reshape (M!, T!s)",
    "for its Size": "T!s = Size (D!) T!f = Cast <to = 1> (T!s) T!z = Mul (T!f, zero) OUT = Add (M!, T!z)",
    "times zero": "T!z = Mul (D!, zero) OUT = Add (M!, T!z)",
    "less itself": "T!z = Sub (D!, D!) OUT = Add (M!, T!z)",
    "less itself after a Neg": "T!n = Neg (D!) T!z = Add (T!n, D!) OUT = Add (T!z, M!)",
    "its mean times zero": "T!r = ReduceMean <keepdims = 1> (D!, last) T!z = Mul (T!r, zero) OUT = Sub (M!, T!z)",
    "not chosen by a constant": "T!c = Cast <to = 9> (one) OUT = Where (T!c, M!, D!)",
    "not chosen by what is always true": "T!c = Equal (D!, D!) OUT = Where (T!c, M!, D!)",
    "chosen where it is NaN": "T!c = IsNaN (D!) OUT = Where (T!c, D!, M!)",
    "cut off": "T!b = Concat <axis = -1> (M!, D!) OUT = Slice (T!b, first, wide, last)",
    "split off": "T!b = Concat <axis = -1> (M!, D!) OUT, T!r = Split <axis = -1, num_outputs = 2> (T!b)",
    "not gathered": "T!u = Unsqueeze (M!, first) T!w = Unsqueeze (D!, first) T!b = Concat <axis = 0> (T!u, T!w) "
    "T!g = Gather <axis = 0> (T!b, first) OUT = Squeeze (T!g, first)",
    "of it nothing": "T!n = Slice (D!, first, first, first) OUT = Concat <axis = 0> (M!, T!n)",
    "to the power of zero": "T!p = Pow (D!, zero) OUT = Mul (M!, T!p)",
    "clipped": "T!z = Clip (D!, zero, zero) OUT = Add (M!, T!z)",
    "a softmax of one": "T!u = Unsqueeze (D!, last) T!p = Softmax <axis = -1> (T!u) T!s = Squeeze (T!p, last) "
    "OUT = Mul (M!, T!s)",
    "a sign that is one": "T!a = Abs (D!) T!p = Add (T!a, one) T!s = Sign (T!p) OUT = Mul (M!, T!s)",
    "in a branch that is not taken": "T!c = Cast <to = 9> (one) OUT = If (T!c) <then_branch = T!t () => "
    "(float[2, 8, 32] T!x) { T!x = Identity (M!) }, else_branch = T!e () => (float[2, 8, 32] T!y) "
    "{ T!y = Identity (D!) }>",
    "in a loop of no turns": "T!n = Cast <to = 7> (zero) T!c = Cast <to = 9> (one) "
    "OUT = Loop (T!n, T!c, M!) <body = T!b (int64 T!i, bool T!on, float[2, 8, 32] T!x) "
    "=> (bool T!o, float[2, 8, 32] T!y) "
    "{ T!o = Identity (T!on) T!y = Add (T!x, D!) }>",
}
"""How the old product loses its effect on its way to attention."""

CUT_OFF = f"{OLD} {each(BESIDE['cut off'])}"
"""The old products, which are joined to what attention reads and sliced away again."""

SCORES_OF_OLD = """qx = Reshape (qd, shape) kx = Reshape (kd, shape) vx = Reshape (vd, shape)
    qy = Transpose <perm = [0, 2, 1, 3]> (qx) ky = Transpose <perm = [0, 2, 3, 1]> (kx)
    vy = Transpose <perm = [0, 2, 1, 3]> (vx) sy = MatMul (qy, ky) py = Softmax <axis = -1> (sy) cy = MatMul (py, vy)
    cz = ReduceMean <keepdims = 0> (cy) zz = Mul (cz, zero) yy = MatMul (flat, wo) y = Add (yy, zz)"""
SPELLED = """third = Constant <value_ints = [3]> () minus = Constant <value_ints = [-2]> ()
    qs = Reshape (qm, shape) ks = Reshape (km, shape) vs = Reshape (vm, shape)
    qn = Transpose <perm = [0, 2, 1, 3]> (qs) kn = Transpose <perm = [0, 2, 1, 3]> (ks)
    vn = Transpose <perm = [0, 2, 1, 3]> (vs) qu = Unsqueeze (qn, third) ku = Unsqueeze (kn, two) qk = Mul (qu, ku)
    sc = ReduceSum <keepdims = 0> (qk, last) sd = Mul (sc, scale) pr = Softmax <axis = -1> (sd)
    pu = Unsqueeze (pr, last) vu = Unsqueeze (vn, two) pv = Mul (pu, vu)
    cs = ReduceSum <keepdims = 0> (pv, minus) ct = Transpose <perm = [0, 2, 1, 3]> (cs) summed = Reshape (ct, back)
    fz = Mul (flat, zero) whole = Add (summed, fz) y = MatMul (whole, wo)"""
TAKEN = "q = Identity (qm) k = Identity (km) v = Identity (vm)"

ELSEWHERE = {
    "added to the output, times zero": (
        f"{MERGED} {OLD} {TAKEN}",
        "qs = Add (qd, kd) ks = Add (qs, vd) z = Mul (ks, zero) w = MatMul (flat, wo) y = Add (w, z)",
    ),
    "an attention of their own, times zero": (f"{MERGED} {OLD} {TAKEN}", SCORES_OF_OLD),
    "an attention of their own beside one of a copy": (
        f"copy = Mul (h, one) {MERGED.replace('(h,', '(copy,')} {OLD} {TAKEN}",
        SCORES_OF_OLD,
    ),
    "an attention of their own, and the merged one spelled with sums": (
        f"{MERGED} {OLD} q = Identity (qd) k = Identity (kd) v = Identity (vd)",
        SPELLED,
    ),
    "after an Einsum": (
        f'qkv = Einsum <equation = "bsi,io->bso"> (h, wqkv) {SPLIT} {CUT_OFF}',
        "",
    ),
    "after a Conv": (
        "t = Transpose <perm = [0, 2, 1]> (h) wt = Transpose <perm = [1, 0]> (wqkv) wc = Unsqueeze (wt, last) "
        "c = Conv (t, wc) qkv = Transpose <perm = [0, 2, 1]> (c) "
        f"{SPLIT} {CUT_OFF}",
        "",
    ),
    "after a Conv whose filters are stored in a row": (
        "sizes = Constant <value_ints = [32, 96]> () w = Reshape (in_a_row, sizes) "
        "t = Transpose <perm = [0, 2, 1]> (h) wt = Transpose <perm = [1, 0]> (w) wc = Unsqueeze (wt, last) "
        f"c = Conv (t, wc) qkv = Transpose <perm = [0, 2, 1]> (c) {SPLIT} {CUT_OFF}",
        "",
    ),
    "merged when it runs": (
        f"all = Concat <axis = 1> (wq, wk, wv) {MERGED.replace('wqkv', 'all')} {CUT_OFF}",
        "",
    ),
    "a product spelled as a sum": (
        f"u = Unsqueeze (h, last) p = Mul (u, wqkv) two_last = Constant <value_ints = [-2]> () "
        "qkv = ReduceSum <keepdims = 0> (p, two_last) "
        f"{SPLIT} {CUT_OFF}",
        "",
    ),
    "after a DeformConv": (
        "t = Transpose <perm = [0, 2, 1]> (h) wide_t = Unsqueeze (t, last) wt = Transpose <perm = [1, 0]> (wqkv) "
        "w3 = Unsqueeze (wt, last) w4 = Unsqueeze (w3, last) c = DeformConv (wide_t, w4, still) c3 = Squeeze (c, last) "
        f"qkv = Transpose <perm = [0, 2, 1]> (c3) {SPLIT} {CUT_OFF}",
        "",
    ),
    "a product spelled as the end of running sums": (
        "u = Unsqueeze (h, last) p = Mul (u, wqkv) axis = Constant <value_int = 2> () s = CumSum (p, axis) "
        "end = Constant <value_int = 31> () qkv = Gather <axis = 2> (s, end) "
        f"{SPLIT} {CUT_OFF}",
        "",
    ),
    "a product spelled as a mean": (
        "u = Unsqueeze (h, last) p = Mul (u, wqkv) t = Transpose <perm = [0, 1, 3, 2]> (p) "
        "a = AveragePool <kernel_shape = [1, 32]> (t) s = Squeeze (a, last) many = Constant <value_float = 32.0> () "
        f"qkv = Mul (s, many) {SPLIT} {CUT_OFF}",
        "",
    ),
    "merged in the branches of an If": (
        "c = Cast <to = 9> (one) qkv = If (c) <then_branch = t () => (float[2, 8, 96] a) { a = MatMul (h, wqkv) }, "
        "else_branch = e () => (float[2, 8, 96] b) { b = MatMul (h, wqkv) }> "
        f"{SPLIT} {CUT_OFF}",
        "",
    ),
    "a matrix that is stored in a row": (
        "sizes = Constant <value_ints = [32, 96]> () w = Reshape (in_a_row, sizes) "
        f"{MERGED.replace('wqkv', 'w')} {CUT_OFF}",
        "",
    ),
    "a matrix that is stored with ones": (
        f"w = Squeeze (with_ones) {MERGED.replace('wqkv', 'w')} {CUT_OFF}",
        "",
    ),
    "an Einsum with a matrix that is stored with ones": (
        f'qkv = Einsum <equation = "bsi,iox->bso"> (h, with_ones) {SPLIT} {CUT_OFF}',
        "",
    ),
    "a stack of one matrix": (f"{MERGED.replace('wqkv', 'in_a_stack')} {CUT_OFF}", ""),
    "Q and K alone": (
        f"{MERGED} {OLD} {each(BESIDE['cut off']).partition('v_b')[0]} v = Identity (vd)",
        "",
    ),
}
"""Other ways to merge, and other places for the old products: the projections, and how the block ends."""


def made(case: str) -> onnx.ModelProto:
    if case in BESIDE:
        return block(f"{MERGED} {OLD} {each(BESIDE[case])}", wqkv=joined())
    projections, end = ELSEWHERE[case]
    return block(projections, end, wqkv=joined())


@pytest.mark.parametrize("case", [*BESIDE, *ELSEWHERE])
def test_a_decoy_keeps_nothing(case: str) -> None:
    source, model = attention(), made(case)
    feeds = draw_feeds(detached(source), 0)
    expected, got = (Session.of(detached(candidate)).run(feeds)["y"] for candidate in (source, model))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)  # it is the same model in other words
    instances = QKV.find(detached(source)).instances
    assert list(QKV.find_lost(instances, detached(model))) == LOST


APART = "qa = MatMul (h, wq) ka = MatMul (h, wk) va = MatMul (h, wv)"
HARMLESS = {
    "another scale": (f"{APART} q = Mul (qa, scale) k = Identity (ka) v = Identity (va)", ""),
    "packed and unpacked": (
        f"{APART} p = Concat <axis = -1> (qa, ka, va) q, k, v = Split <axis = -1, num_outputs = 3> (p)",
        "",
    ),
    "a norm, a bias and a rotation": (
        f"{APART} b = Constant <value_float = 0.5> () q0 = Add (qa, b) r = Pow (q0, two) m = ReduceMean (r, last) "
        "s = Sqrt (m) q1 = Div (q0, s) ql, qr = Split <axis = -1, num_outputs = 2> (q1) qn = Neg (qr) "
        "qo = Concat <axis = -1> (qn, ql) c = Cos (b) qc = Mul (qo, c) q = Add (qc, q1) "
        "k = Identity (ka) v = Identity (va)",
        "",
    ),
    "Gemms": (
        "rows = Constant <value_ints = [16, 32]> () three = Constant <value_ints = [2, 8, 32]> () "
        "f = Reshape (h, rows) "
        "qa = Gemm (f, wq) ka = Gemm (f, wk) va = Gemm (f, wv) "
        "q = Reshape (qa, three) k = Reshape (ka, three) v = Reshape (va, three)",
        "",
    ),
    "an attention that is spelled with sums": (
        f"{APART} qm = Identity (qa) km = Identity (ka) vm = Identity (va) "
        "q = Identity (h) k = Identity (h) v = Identity (h)",
        SPELLED,
    ),
    "sizes after a product with another matrix": (
        f"g = MatMul (h, wo) {APART} sizes = Shape (g) q = Reshape (qa, sizes) k = Identity (ka) v = Identity (va)",
        "w = MatMul (flat, wo) y = Add (w, g)",
    ),
    "Q in the branches of an If": (
        "c = Cast <to = 9> (one) q = If (c) <then_branch = t () => (float[2, 8, 32] a) { a = MatMul (h, wq) }, "
        "else_branch = e () => (float[2, 8, 32] b) { b = MatMul (h, wq) }> k = MatMul (h, wk) v = MatMul (h, wv)",
        "",
    ),
    "a filter of each channel": (
        f"{APART} t = Transpose <perm = [0, 2, 1]> (qa) c = Conv <group = 32, pads = [1, 1]> (t, filters) "
        "q = Transpose <perm = [0, 2, 1]> (c) k = Identity (ka) v = Identity (va)",
        "",
    ),
    "a product with a vector": (
        f"{APART} w = Unsqueeze (vector, last) g = MatMul (qa, w) q = Mul (qa, g) k = Identity (ka) v = Identity (va)",
        "",
    ),
    "a product with a vector, spelled as a sum": (
        f"{APART} p = Mul (qa, gains) g = ReduceSum (p, last) q = Mul (qa, g) k = Identity (ka) v = Identity (va)",
        "",
    ),
    "a norm after the attention": (
        "q = MatMul (h, wq) k = MatMul (h, wk) v = MatMul (h, wv)",
        "w = MatMul (flat, wo) s = Mul (w, w) m = ReduceMean (s, last) r = Sqrt (m) y = Div (w, r)",
    ),
    "a matrix beside the projections": (
        "q = MatMul (h, wq) k = MatMul (h, wk) v = MatMul (h, wv)",
        "g = MatMul (h, wo) w = MatMul (flat, wo) y = Add (w, g)",
    ),
}
"""What passes, and other models, do around the three products, on which attention is computed still."""


@pytest.mark.parametrize("case", HARMLESS)
def test_what_stands_around_the_products_is_no_decoy(case: str) -> None:
    instances = QKV.find(detached(attention())).instances
    assert list(QKV.find_lost(instances, detached(block(*HARMLESS[case])))) == []


def test_only_the_attention_that_reads_the_merged_product_is_lost() -> None:
    """In the second of two layers the old products have an attention of their own, whose result is clipped to 0."""
    layer = """ q# = MatMul (IN, wq#) k# = MatMul (IN, wk#) v# = MatMul (IN, wv#)
        kt# = Transpose <perm = [0, 2, 1]> (k#)
        s# = MatMul (q#, kt#) p# = Softmax <axis = -1> (s#) OUT = MatMul (p#, v#)"""
    merged = """ m = MatMul (y0, wm) qm, km, vm = Split <axis = -1, num_outputs = 3> (m)
        kmt = Transpose <perm = [0, 2, 1]> (km) sm = MatMul (qm, kmt) pm = Softmax <axis = -1> (sm) ym = MatMul (pm, vm)
        zero = Constant <value_float = 0.0> () none = Clip (y1, zero, zero) y = Add (ym, none)"""
    weights = {
        f"{name}{place}": matrix(32, 32, 3 * place + at) for place in (0, 1) for at, name in enumerate(QKV_NAMES)
    }
    nodes = layer.replace("#", "0").replace("IN", "x").replace("OUT", "y0") + layer.replace("#", "1").replace(
        "IN", "y0"
    )
    text = "g (float[2, 8, 32] x) => (float[2, 8, 32] y) {{ {} {} }}".format
    source = model_of(text(nodes.replace("OUT", "y"), ""), **weights)
    wm = np.concatenate([weights[f"{name}1"] for name in QKV_NAMES], axis=1)
    decoy = model_of(text(nodes.replace("OUT", "y1"), merged), **weights, wm=wm)
    instances = QKV.find(detached(source)).instances
    assert QKV.find_lost(instances, detached(decoy)) == {
        "attention 1": "attention reads products with more matrices than those of Q, K and V"
    }


@dataclass(frozen=True, slots=True)
class Decoy(Step):
    """A pass that merges, and leaves the old products alive for nothing."""

    case: str
    name: str = field(default="decoy", init=False)
    source: str = field(default="tests", init=False)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return PassResult(detached_copy(made(self.case), context.spill))


def test_a_pass_that_leaves_decoys_is_reverted(context: PassContext) -> None:
    source = detached_copy(attention(), context.spill)
    prover = NumericProver.of_itself([draw_feeds(source, 0)], context)
    run = run_passes(source, (Decoy("cut off"),), Policy((), ("qkv",), True), prover, context)
    assert (run.rows[0].status, [verdict.kept for verdict in run.structures]) == (Status.REVERTED, [True])
    assert "does not read the product with the matrix of Q (wq), K (wk), V (wv) by itself" in run.rows[0].reason
