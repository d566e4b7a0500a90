"""Attention in the forms that exporters write it in, each with one triple of projections, wq, wk and wv; and what looks
like attention with three projections and is not, each with why."""

from __future__ import annotations

import numpy as np
import onnx

from tests.support.onnx_models import attention, matrix, merged_attention, model_of, square

QKV = square("wq", "wk", "wv")
PROJECTED = "q = MatMul (x, wq) k = MatMul (x, wk) v = MatMul (x, wv)"
TURNED = "kt = Transpose <perm = [0, 2, 1]> (k)"
SOFTMAX = "p = Softmax <axis = -1> (s)"
MIXED = f"{SOFTMAX} y = MatMul (p, v)"
CORE = f"{TURNED} s = MatMul (q, kt) {MIXED}"

X = "float[2, 8, 32] x"


def form(nodes: str, inputs: str = X, output: str = "float[2, 8, 32]", /, **weights: np.ndarray) -> onnx.ModelProto:
    return model_of(f"g ({inputs}) => ({output} y) {{ {nodes} }}", **(weights or QKV))


def bias(*names: str) -> dict[str, np.ndarray]:
    return {name: matrix(1, 32, 50 + seed).ravel() for seed, name in enumerate(names)}


STORED_IN_HALF = f"""g ({X}) => (float[2, 8, 32] y) {{
    wq32 = Cast <to = 1> (wq) wk32 = Cast <to = 1> (wk) wv32 = Cast <to = 1> (wv)
    q = MatMul (x, wq32) k = MatMul (x, wk32) v = MatMul (x, wv32)
    {CORE}
}}"""

WITH_TRIPLE = {
    "multi-head": attention(),
    "mask and bias": form(
        f"""
        q0 = MatMul (x, wq) q = Add (q0, bq) k = MatMul (x, wk) v0 = MatMul (x, wv) v = Add (bv, v0)
        heads = Constant <value_ints = [2, 8, 2, 16]> ()
        back = Constant <value_ints = [2, 8, 32]> ()
        root = Constant <value_float = 4.0> ()
        qh = Reshape (q, heads) kh = Reshape (k, heads) vh = Reshape (v, heads)
        qt = Transpose <perm = [0, 2, 1, 3]> (qh)
        kt = Transpose <perm = [0, 2, 3, 1]> (kh)
        vt = Transpose <perm = [0, 2, 1, 3]> (vh)
        s0 = MatMul (qt, kt) s1 = Div (s0, root) s = Add (s1, mask)
        {SOFTMAX} c = MatMul (p, vt) ct = Transpose <perm = [0, 2, 1, 3]> (c) y = Reshape (ct, back)""",
        f"{X}, float[1, 1, 8, 8] mask",
        **QKV,
        **bias("bq", "bv"),
    ),
    "cross": form(
        f"q = MatMul (x, wq) k = MatMul (memory, wk) v = MatMul (memory, wv) {CORE}",
        f"{X}, float[2, 5, 24] memory",
        **{"wq": matrix(32, 32, 0), "wk": matrix(24, 32, 1), "wv": matrix(24, 32, 2)},
    ),
    "gemm": form(
        f"""
        q = Gemm <transB = 1> (x, wq, bq) k = Gemm <transB = 1> (x, wk, bk) v = Gemm <transB = 1> (x, wv, bv)
        kt = Transpose <perm = [1, 0]> (k) s = MatMul (q, kt) {MIXED}""",
        "float[8, 32] x",
        "float[8, 32]",
        **QKV,
        **bias("bq", "bk", "bv"),
    ),
    "1x1 conv": form(
        f"""
        flat = Constant <value_ints = [1, 32, 16]> ()
        q = Conv (x, wq) k = Conv (x, wk) v = Conv (x, wv)
        qf = Reshape (q, flat) kf = Reshape (k, flat) vf = Reshape (v, flat)
        qt = Transpose <perm = [0, 2, 1]> (qf) s = MatMul (qt, kf)
        {SOFTMAX} pt = Transpose <perm = [0, 2, 1]> (p) y = MatMul (vf, pt)""",
        "float[1, 32, 4, 4] x",
        "float[1, 32, 16]",
        **{name: array.reshape(32, 32, 1, 1) for name, array in QKV.items()},
    ),
    "talking heads": form(
        f"{PROJECTED} {TURNED} s0 = MatMul (q, kt) s = MatMul (s0, mix) {MIXED}", **QKV, mix=matrix(8, 8, 9)
    ),
    "K's scale is cast like Q": form(f"""
        {PROJECTED} scale = Constant <value_float = 0.5> () like = CastLike (scale, q) qs = Mul (q, like)
        k2 = Identity (k) kt = Transpose <perm = [0, 2, 1]> (k2) k3 = Identity (kt) ks = Mul (k3, like)
        s = MatMul (qs, ks) {MIXED}"""),
    "einsum": form(f"""
        {PROJECTED} qc = CastLike (q, x) s = Einsum <equation = "bqd,bkd->bqk"> (qc, k)
        {SOFTMAX} y = Einsum <equation = "bqk,bkd->bqd"> (p, v)"""),
    # The scores are content with content, content with positions, and positions with content, as in DeBERTa.
    "disentangled": form(
        f"""
        {PROJECTED} pk = MatMul (positions, wpk) pq = MatMul (positions, wpq)
        pkt = Transpose <perm = [0, 2, 1]> (pk) pqt = Transpose <perm = [0, 2, 1]> (pq) {TURNED}
        to_positions = MatMul (q, pkt) from_positions = MatMul (k, pqt) content = MatMul (q, kt)
        s0 = Add (to_positions, from_positions) s = Add (s0, content) {MIXED}""",
        f"{X}, float[1, 8, 32] positions",
        **square("wq", "wk", "wv", "wpk", "wpq"),
    ),
    "einsum with heads": form(
        f"""
        q = Einsum <equation = "btd,dnh->btnh"> (x, wq)
        k = Einsum <equation = "btd,dnh->btnh"> (x, wk)
        v = Einsum <equation = "btd,dnh->btnh"> (x, wv)
        s = Einsum <equation = "bqnh,bknh->bnqk"> (q, k)
        {SOFTMAX} y = Einsum <equation = "bnqk,bknh->bqnh"> (p, v)""",
        X,
        "float[2, 8, 4, 8]",
        **{name: array.reshape(32, 4, 8) for name, array in QKV.items()},
    ),
    "weight first": form(
        f"""
        q = MatMul (wq, x) k = MatMul (wk, x) v = MatMul (wv, x)
        qt = Transpose <perm = [0, 2, 1]> (q) s = MatMul (qt, k)
        {SOFTMAX} pt = Transpose <perm = [0, 2, 1]> (p) y = MatMul (v, pt)""",
        "float[2, 32, 8] x",
        "float[2, 32, 8]",
    ),
    # The second attention has a Q of its own, and the first one's K and V.
    "K and V shared": form(
        f"""
        {PROJECTED} {TURNED} s = MatMul (q, kt) {SOFTMAX} y0 = MatMul (p, v) q1 = MatMul (y0, wq1)
        s1 = MatMul (q1, kt) p1 = Softmax <axis = -1> (s1) y = MatMul (p1, v)""",
        **square("wq", "wk", "wv", "wq1"),
    ),
    # Twice the same Q and K in halves, and one V, as in DiffLlama.
    "difference of two": form(f"""
        {PROJECTED} q0, q1 = Split <axis = -1, num_outputs = 2> (q)
        {TURNED} k0, k1 = Split <axis = 1, num_outputs = 2> (kt)
        s0 = MatMul (q0, k0) s1 = MatMul (q1, k1)
        p0 = Softmax <axis = -1> (s0) p1 = Softmax <axis = -1> (s1)
        y0 = MatMul (p0, v) y1 = MatMul (p1, v) y = Sub (y0, y1)"""),
    "softmax spelled out": form(f"""
        {PROJECTED} {TURNED} s = MatMul (q, kt)
        axis = Constant <value_ints = [-1]> () all = ReduceLogSumExp (s, axis) d = Sub (s, all) p = Exp (d)
        y = MatMul (p, v)"""),
    "low-rank adapter": form(
        f"""
        q0 = MatMul (x, wq) qa = MatMul (x, a) qb = MatMul (qa, b) q = Add (q0, qb)
        k = MatMul (x, wk) v = MatMul (x, wv) {CORE}""",
        **QKV,
        **{"a": matrix(32, 4, 8), "b": matrix(4, 32, 9)},
    ),
    # Content and position are projected each, as in Conditional DETR.
    "content and position": form(
        f"""
        q = MatMul (x, wq) qp = MatMul (at, wqp) qq = Concat <axis = -1> (q, qp)
        k = MatMul (memory, wk) kp = MatMul (places, wkp) kk = Concat <axis = -1> (kp, k) v = MatMul (memory, wv)
        kt = Transpose <perm = [0, 2, 1]> (kk) s = MatMul (qq, kt) {MIXED}""",
        f"{X}, float[2, 5, 32] memory, float[2, 8, 32] at, float[2, 5, 32] places",
        **square("wq", "wk", "wv", "wqp", "wkp"),
    ),
    "stored in half precision": model_of(STORED_IN_HALF, **{name: w.astype(np.float16) for name, w in QKV.items()}),
}

SUM_OF_LAYERS = "a0 = MatMul (x, w0) r0 = Add (x, a0) a1 = MatMul (r0, w1) r1 = Add (r0, a1)"
NORMED = f"{SUM_OF_LAYERS} h = LayerNormalization <axis = -1> (r1, gamma)"
RESIDUAL = square("wq", "wk", "wv", "w0", "w1") | {"gamma": np.ones(32, np.float32)}
HIDDEN_VALUES = f"q = MatMul (h, wq) k = MatMul (h, wk) {TURNED} s = MatMul (q, kt) {SOFTMAX} y = MatMul (p, h)"

WITHOUT_TRIPLE = {
    # Of all tokens each has a say in every other, but nothing is projected.
    "nothing projected": model_of(f"""g ({X}) => (float[2, 8, 32] y) {{
        xt = Transpose <perm = [0, 2, 1]> (x) s = MatMul (x, xt) {SOFTMAX} y = MatMul (p, x)
    }}"""),
    # V is the hidden state, and what follows its norm is the layer before.
    "V not projected": form(f"{NORMED} {HIDDEN_VALUES}", **RESIDUAL),
    "V not projected, no norm": form(
        f"a0 = MatMul (x, w0) h = Add (x, a0) {HIDDEN_VALUES}", **square("wq", "wk", "w0")
    ),
    # What is learned asks the input: after constant folding there is no product with wq.
    "Q learned": form(
        f"q = MatMul (latents, wq) k = MatMul (memory, wk) v = MatMul (memory, wv) {CORE}",
        "float[2, 5, 32] memory",
        **QKV,
        latents=matrix(8, 32, 9)[None],
    ),
    # The decoder's state itself asks the encoder.
    "Q not projected": form(
        f"{NORMED} k = MatMul (memory, wk) v = MatMul (memory, wv) {TURNED} s = MatMul (h, kt) {MIXED}",
        f"{X}, float[2, 5, 32] memory",
        **RESIDUAL,
    ),
    # K and V come from one latent matrix, and a part of K from another, as in DeepSeek's MLA.
    "latent": form(
        f"""
        two = Constant <value_ints = [16, 8]> () three = Constant <value_ints = [8, 16]> ()
        q = MatMul (x, wq) down = MatMul (x, wdown) latent, rotary = Split <axis = -1> (down, two)
        normed = LayerNormalization <axis = -1> (latent, gamma) up = MatMul (normed, wup)
        k0, v = Split <axis = -1> (up, three) k = Concat <axis = -1> (k0, rotary) {CORE}""",
        X,
        "float[2, 8, 16]",
        **{"wq": matrix(32, 16, 0), "wdown": matrix(32, 24, 1), "wup": matrix(16, 24, 2)},
        gamma=np.ones(16, np.float32),
    ),
    # A router weighs what four experts make of each token.
    "experts": form(
        """
        logits = MatMul (x, router) weights = Softmax <axis = -1> (logits) e = MatMul (x, experts)
        four = Constant <value_ints = [16, 4, 32]> () each = Reshape (e, four)
        axis = Constant <value_ints = [1]> () row = Unsqueeze (weights, axis)
        mixed = MatMul (row, each) y = Squeeze (mixed, axis)""",
        "float[16, 32] x",
        "float[16, 32]",
        **{"router": matrix(32, 4, 0), "experts": matrix(32, 128, 1)},
    ),
    # Channels are weighed by what two products make of their means.
    "squeeze and excite": form(
        """
        mean = GlobalAveragePool (x) narrow = Conv (mean, w1) active = Relu (narrow) wide = Conv (active, w2)
        gate = Softmax <axis = 1> (wide) y = Mul (x, gate)""",
        "float[1, 32, 4, 4] x",
        "float[1, 32, 4, 4]",
        **{"w1": matrix(8, 32, 0)[:, :, None, None], "w2": matrix(32, 8, 1)[:, :, None, None]},
    ),
    "merged in the source": merged_attention(),
    "no attention": form(
        "h = MatMul (x, w1) a = Relu (h) l = MatMul (a, w2) y = Softmax <axis = -1> (l)",
        "float[2, 32] x",
        "float[2, 10]",
        **{"w1": matrix(32, 32, 0), "w2": matrix(32, 10, 1)},
    ),
}
