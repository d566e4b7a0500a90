"""Attention in the forms that exporters write it in: each has one triple of projections, with wq, wk and wv."""

from __future__ import annotations

import numpy as np

from tests.support.onnx_models import attention, matrix, model_of, square

MASKED = """
g (float[2, 8, 32] x, float[1, 1, 8, 8] mask) => (float[2, 8, 32] y) {
    q0 = MatMul (x, wq)
    q = Add (q0, bq)
    k = MatMul (x, wk)
    v0 = MatMul (x, wv)
    v = Add (bv, v0)
    heads = Constant <value_ints = [2, 8, 2, 16]> ()
    back = Constant <value_ints = [2, 8, 32]> ()
    root = Constant <value_float = 4.0> ()
    qh = Reshape (q, heads)
    kh = Reshape (k, heads)
    vh = Reshape (v, heads)
    qt = Transpose <perm = [0, 2, 1, 3]> (qh)
    kt = Transpose <perm = [0, 2, 3, 1]> (kh)
    vt = Transpose <perm = [0, 2, 1, 3]> (vh)
    s0 = MatMul (qt, kt)
    s1 = Div (s0, root)
    s = Add (s1, mask)
    p = Softmax <axis = -1> (s)
    c = MatMul (p, vt)
    ct = Transpose <perm = [0, 2, 1, 3]> (c)
    y = Reshape (ct, back)
}
"""

CROSS = """
g (float[2, 8, 32] x, float[2, 5, 24] memory) => (float[2, 8, 32] y) {
    q = MatMul (x, wq)
    k = MatMul (memory, wk)
    v = MatMul (memory, wv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""

GEMM = """
g (float[8, 32] x) => (float[8, 32] y) {
    q = Gemm <transB = 1> (x, wq, bq)
    k = Gemm <transB = 1> (x, wk, bk)
    v = Gemm <transB = 1> (x, wv, bv)
    kt = Transpose <perm = [1, 0]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""

POINTWISE = """
g (float[1, 32, 4, 4] x) => (float[1, 32, 16] y) {
    flat = Constant <value_ints = [1, 32, 16]> ()
    q = Conv (x, wq)
    k = Conv (x, wk)
    v = Conv (x, wv)
    qf = Reshape (q, flat)
    kf = Reshape (k, flat)
    vf = Reshape (v, flat)
    qt = Transpose <perm = [0, 2, 1]> (qf)
    s = MatMul (qt, kf)
    p = Softmax <axis = -1> (s)
    pt = Transpose <perm = [0, 2, 1]> (p)
    y = MatMul (vf, pt)
}
"""

TALKING_HEADS = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    q = MatMul (x, wq)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s0 = MatMul (q, kt)
    s = MatMul (s0, mix)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""

SCALED_LIKE_Q = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    q = MatMul (x, wq)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    scale = Constant <value_float = 0.5> ()
    like = CastLike (scale, q)
    qs = Mul (q, like)
    k2 = Identity (k)
    kt = Transpose <perm = [0, 2, 1]> (k2)
    k3 = Identity (kt)
    ks = Mul (k3, like)
    s = MatMul (qs, ks)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""

EINSUM = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    q = MatMul (x, wq)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    qc = CastLike (q, x)
    s = Einsum <equation = "bqd,bkd->bqk"> (qc, k)
    p = Softmax <axis = -1> (s)
    y = Einsum <equation = "bqk,bkd->bqd"> (p, v)
}
"""

# The scores are content with content, content with positions, and positions with content, as in DeBERTa.
DISENTANGLED = """
g (float[2, 8, 32] x, float[1, 8, 32] positions) => (float[2, 8, 32] y) {
    q = MatMul (x, wq)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    pk = MatMul (positions, wpk)
    pq = MatMul (positions, wpq)
    pkt = Transpose <perm = [0, 2, 1]> (pk)
    pqt = Transpose <perm = [0, 2, 1]> (pq)
    kt = Transpose <perm = [0, 2, 1]> (k)
    to_positions = MatMul (q, pkt)
    from_positions = MatMul (k, pqt)
    content = MatMul (q, kt)
    s0 = Add (to_positions, from_positions)
    s = Add (s0, content)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""

EINSUM_HEADS = """
g (float[2, 8, 32] x) => (float[2, 8, 4, 8] y) {
    q = Einsum <equation = "btd,dnh->btnh"> (x, wq)
    k = Einsum <equation = "btd,dnh->btnh"> (x, wk)
    v = Einsum <equation = "btd,dnh->btnh"> (x, wv)
    s = Einsum <equation = "bqnh,bknh->bnqk"> (q, k)
    p = Softmax <axis = -1> (s)
    y = Einsum <equation = "bnqk,bknh->bqnh"> (p, v)
}
"""

WEIGHT_FIRST = """
g (float[2, 32, 8] x) => (float[2, 32, 8] y) {
    q = MatMul (wq, x)
    k = MatMul (wk, x)
    v = MatMul (wv, x)
    qt = Transpose <perm = [0, 2, 1]> (q)
    s = MatMul (qt, k)
    p = Softmax <axis = -1> (s)
    pt = Transpose <perm = [0, 2, 1]> (p)
    y = MatMul (v, pt)
}
"""

# The second attention has a Q of its own, and the first one's K and V.
SHARED_KEYS = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    q = MatMul (x, wq)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y0 = MatMul (p, v)
    q1 = MatMul (y0, wq1)
    s1 = MatMul (q1, kt)
    p1 = Softmax <axis = -1> (s1)
    y = MatMul (p1, v)
}
"""

# Twice the same Q and K in halves, and one V, as in DiffLlama.
DIFFERENCE = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    q = MatMul (x, wq)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    q0, q1 = Split <axis = -1, num_outputs = 2> (q)
    kt = Transpose <perm = [0, 2, 1]> (k)
    k0, k1 = Split <axis = 1, num_outputs = 2> (kt)
    s0 = MatMul (q0, k0)
    s1 = MatMul (q1, k1)
    p0 = Softmax <axis = -1> (s0)
    p1 = Softmax <axis = -1> (s1)
    y0 = MatMul (p0, v)
    y1 = MatMul (p1, v)
    y = Sub (y0, y1)
}
"""

SPELLED_SOFTMAX = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    q = MatMul (x, wq)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    axis = Constant <value_ints = [-1]> ()
    all = ReduceLogSumExp (s, axis)
    d = Sub (s, all)
    p = Exp (d)
    y = MatMul (p, v)
}
"""

LOW_RANK_ADAPTERS = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    q0 = MatMul (x, wq)
    qa = MatMul (x, a)
    qb = MatMul (qa, b)
    q = Add (q0, qb)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""

STORED_IN_HALF = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    wq32 = Cast <to = 1> (wq)
    wk32 = Cast <to = 1> (wk)
    wv32 = Cast <to = 1> (wv)
    q = MatMul (x, wq32)
    k = MatMul (x, wk32)
    v = MatMul (x, wv32)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""

# Content and position are projected each, as in Conditional DETR.
CONTENT_AND_POSITION = """
g (float[2, 8, 32] x, float[2, 5, 32] memory, float[2, 8, 32] at, float[2, 5, 32] places) => (float[2, 8, 32] y) {
    q = MatMul (x, wq)
    qp = MatMul (at, wqp)
    qq = Concat <axis = -1> (q, qp)
    k = MatMul (memory, wk)
    kp = MatMul (places, wkp)
    kk = Concat <axis = -1> (kp, k)
    v = MatMul (memory, wv)
    kt = Transpose <perm = [0, 2, 1]> (kk)
    s = MatMul (qq, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""


def bias(*names: str) -> dict[str, np.ndarray]:
    return {name: matrix(1, 32, 50 + seed).ravel() for seed, name in enumerate(names)}


WITH_TRIPLE = {
    "multi-head": attention(),
    "mask and bias": model_of(MASKED, **square("wq", "wk", "wv"), **bias("bq", "bv")),
    "cross": model_of(CROSS, wq=matrix(32, 32, 0), wk=matrix(24, 32, 1), wv=matrix(24, 32, 2)),
    "gemm": model_of(GEMM, **square("wq", "wk", "wv"), **bias("bq", "bk", "bv")),
    "1x1 conv": model_of(POINTWISE, **{n: a.reshape(32, 32, 1, 1) for n, a in square("wq", "wk", "wv").items()}),
    "talking heads": model_of(TALKING_HEADS, **square("wq", "wk", "wv"), mix=matrix(8, 8, 9)),
    "K's scale is cast like Q": model_of(SCALED_LIKE_Q, **square("wq", "wk", "wv")),
    "einsum": model_of(EINSUM, **square("wq", "wk", "wv")),
    "disentangled": model_of(DISENTANGLED, **square("wq", "wk", "wv", "wpk", "wpq")),
    "einsum with heads": model_of(
        EINSUM_HEADS, **{n: a.reshape(32, 4, 8) for n, a in square("wq", "wk", "wv").items()}
    ),
    "weight first": model_of(WEIGHT_FIRST, **square("wq", "wk", "wv")),
    "K and V shared": model_of(SHARED_KEYS, **square("wq", "wk", "wv", "wq1")),
    "difference of two": model_of(DIFFERENCE, **square("wq", "wk", "wv")),
    "softmax spelled out": model_of(SPELLED_SOFTMAX, **square("wq", "wk", "wv")),
    "low-rank adapter": model_of(LOW_RANK_ADAPTERS, **square("wq", "wk", "wv"), a=matrix(32, 4, 8), b=matrix(4, 32, 9)),
    "content and position": model_of(CONTENT_AND_POSITION, **square("wq", "wk", "wv", "wqp", "wkp")),
    "stored in half precision": model_of(
        STORED_IN_HALF, **{name: array.astype(np.float16) for name, array in square("wq", "wk", "wv").items()}
    ),
}
