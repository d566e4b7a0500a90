"""Q, K and V: found by shape, and judged by a checker that knows nothing of attention."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.structures import STRUCTURES
from tests.passes.models import attention, detached, matrix, merged_attention, model_of

QKV = STRUCTURES["qkv"]

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

CLASSIFIER = """
g (float[2, 32] x) => (float[2, 10] y) {
    h = MatMul (x, w1)
    a = Relu (h)
    l = MatMul (a, w2)
    y = Softmax <axis = -1> (l)
}
"""


def square(*names: str, size: int = 32) -> dict[str, np.ndarray]:
    return {name: matrix(size, size, seed) for seed, name in enumerate(names)}


def bias(*names: str) -> dict[str, np.ndarray]:
    return {name: matrix(1, 32, 50 + seed).ravel() for seed, name in enumerate(names)}


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

# Of all tokens each has a say in every other, but nothing is projected.
POOLED = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    xt = Transpose <perm = [0, 2, 1]> (x)
    s = MatMul (x, xt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, x)
}
"""

# V is the hidden state, and what stands behind its norm is the layer before.
UNPROJECTED_VALUES = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    a0 = MatMul (x, w0)
    r0 = Add (x, a0)
    a1 = MatMul (r0, w1)
    r1 = Add (r0, a1)
    h = LayerNormalization <axis = -1> (r1, gamma)
    q = MatMul (h, wq)
    k = MatMul (h, wk)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, h)
}
"""

UNPROJECTED_VALUES_WITHOUT_NORM = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    a0 = MatMul (x, w0)
    h = Add (x, a0)
    q = MatMul (h, wq)
    k = MatMul (h, wk)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, h)
}
"""

# What is learned asks the input: after constant folding there is no product with wq.
LEARNED_QUERIES = """
g (float[2, 5, 32] memory) => (float[2, 8, 32] y) {
    q = MatMul (latents, wq)
    k = MatMul (memory, wk)
    v = MatMul (memory, wv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""

# The decoder's state itself asks the encoder.
UNPROJECTED_QUERIES = """
g (float[2, 8, 32] x, float[2, 5, 32] memory) => (float[2, 8, 32] y) {
    a0 = MatMul (x, w0)
    r0 = Add (x, a0)
    a1 = MatMul (r0, w1)
    r1 = Add (r0, a1)
    h = LayerNormalization <axis = -1> (r1, gamma)
    k = MatMul (memory, wk)
    v = MatMul (memory, wv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (h, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""

# K and V come from one latent matrix, and a part of K from another, as in DeepSeek's MLA.
LATENT = """
g (float[2, 8, 32] x) => (float[2, 8, 16] y) {
    two = Constant <value_ints = [16, 8]> ()
    three = Constant <value_ints = [8, 16]> ()
    q = MatMul (x, wq)
    down = MatMul (x, wdown)
    latent, rotary = Split <axis = -1> (down, two)
    normed = LayerNormalization <axis = -1> (latent, gamma)
    up = MatMul (normed, wup)
    k0, v = Split <axis = -1> (up, three)
    k = Concat <axis = -1> (k0, rotary)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""

# A router weighs what four experts make of each token.
EXPERTS = """
g (float[16, 32] x) => (float[16, 32] y) {
    logits = MatMul (x, router)
    weights = Softmax <axis = -1> (logits)
    e = MatMul (x, experts)
    four = Constant <value_ints = [16, 4, 32]> ()
    each = Reshape (e, four)
    axis = Constant <value_ints = [1]> ()
    row = Unsqueeze (weights, axis)
    mixed = MatMul (row, each)
    y = Squeeze (mixed, axis)
}
"""

# Channels are weighed by what two products make of their means.
SQUEEZE_AND_EXCITE = """
g (float[1, 32, 4, 4] x) => (float[1, 32, 4, 4] y) {
    mean = GlobalAveragePool (x)
    narrow = Conv (mean, w1)
    active = Relu (narrow)
    wide = Conv (active, w2)
    gate = Softmax <axis = 1> (wide)
    y = Mul (x, gate)
}
"""

# softmax(Q) · (softmax(K)ᵀ · V): no scores of one token with another.
LINEAR = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    q0 = MatMul (x, wq)
    k0 = MatMul (x, wk)
    v = MatMul (x, wv)
    q = Softmax <axis = -1> (q0)
    k = Softmax <axis = 1> (k0)
    kt = Transpose <perm = [0, 2, 1]> (k)
    context = MatMul (kt, v)
    y = MatMul (q, context)
}
"""

RESIDUAL = square("wq", "wk", "wv", "w0", "w1") | {"gamma": np.ones(32, np.float32)}
TRIPLE = [("wq", "wk", "wv")]

FOUND = {
    "multi-head": (attention(), [("wq", "wk", "wv")]),
    "mask and bias": (model_of(MASKED, **square("wq", "wk", "wv"), **bias("bq", "bv")), [("wq", "wk", "wv")]),
    "cross": (
        model_of(CROSS, wq=matrix(32, 32, 0), wk=matrix(24, 32, 1), wv=matrix(24, 32, 2)),
        [("wq", "wk", "wv")],
    ),
    "gemm": (model_of(GEMM, **square("wq", "wk", "wv"), **bias("bq", "bk", "bv")), [("wq", "wk", "wv")]),
    "1x1 conv": (
        model_of(POINTWISE, **{n: a.reshape(32, 32, 1, 1) for n, a in square("wq", "wk", "wv").items()}),
        [("wq", "wk", "wv")],
    ),
    "talking heads": (
        model_of(TALKING_HEADS, **square("wq", "wk", "wv"), mix=matrix(8, 8, 9)),
        [("wq", "wk", "wv")],
    ),
    "K's scale is cast like Q": (model_of(SCALED_LIKE_Q, **square("wq", "wk", "wv")), [("wq", "wk", "wv")]),
    "einsum": (model_of(EINSUM, **square("wq", "wk", "wv")), [("wq", "wk", "wv")]),
    "disentangled": (model_of(DISENTANGLED, **square("wq", "wk", "wv", "wpk", "wpq")), TRIPLE),
    "einsum with heads": (
        model_of(EINSUM_HEADS, **{n: a.reshape(32, 4, 8) for n, a in square("wq", "wk", "wv").items()}),
        TRIPLE,
    ),
    "weight first": (model_of(WEIGHT_FIRST, **square("wq", "wk", "wv")), TRIPLE),
    "K and V shared": (model_of(SHARED_KEYS, **square("wq", "wk", "wv", "wq1")), TRIPLE),
    "difference of two": (model_of(DIFFERENCE, **square("wq", "wk", "wv")), TRIPLE),
    "softmax spelled out": (model_of(SPELLED_SOFTMAX, **square("wq", "wk", "wv")), TRIPLE),
    "low-rank adapter": (
        model_of(LOW_RANK_ADAPTERS, **square("wq", "wk", "wv"), a=matrix(32, 4, 8), b=matrix(4, 32, 9)),
        TRIPLE,
    ),
    "content and position": (model_of(CONTENT_AND_POSITION, **square("wq", "wk", "wv", "wqp", "wkp")), TRIPLE),
    "nothing projected": (model_of(POOLED), []),
    "V not projected": (model_of(UNPROJECTED_VALUES, **RESIDUAL), []),
    "V not projected, no norm": (model_of(UNPROJECTED_VALUES_WITHOUT_NORM, **square("wq", "wk", "w0")), []),
    "Q learned": (model_of(LEARNED_QUERIES, **square("wq", "wk", "wv"), latents=matrix(8, 32, 9)[None]), []),
    "Q not projected": (model_of(UNPROJECTED_QUERIES, **RESIDUAL), []),
    "latent": (
        model_of(
            LATENT, wq=matrix(32, 16, 0), wdown=matrix(32, 24, 1), wup=matrix(16, 24, 2), gamma=np.ones(16, np.float32)
        ),
        [],
    ),
    "experts": (model_of(EXPERTS, router=matrix(32, 4, 0), experts=matrix(32, 128, 1)), []),
    "squeeze and excite": (
        model_of(SQUEEZE_AND_EXCITE, w1=matrix(8, 32, 0)[:, :, None, None], w2=matrix(32, 8, 1)[:, :, None, None]),
        [],
    ),
    "linear attention": (model_of(LINEAR, **square("wq", "wk", "wv")), []),
    "stored in half precision": (
        model_of(
            STORED_IN_HALF, **{name: array.astype(np.float16) for name, array in square("wq", "wk", "wv").items()}
        ),
        TRIPLE,
    ),
    "merged in the source": (merged_attention(), []),
    "no attention": (model_of(CLASSIFIER, w1=matrix(32, 32, 0), w2=matrix(32, 10, 1)), []),
}


@pytest.mark.parametrize("name", FOUND)
def test_finds_each_triple_and_no_other(name: str) -> None:
    model, expected = FOUND[name]
    found = QKV.find(detached(model))
    assert [tuple(weight.name for weight in one.weights) for one in found.instances] == expected


@pytest.mark.parametrize("name", [name for name, (_, triples) in FOUND.items() if triples])
def test_nothing_is_lost_before_anything_happens(name: str) -> None:
    model = detached(FOUND[name][0])
    assert QKV.lost(QKV.find(model).instances, model) == {}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("merged in the source", "1 attention block whose Q, K and V are one matrix in the source already: w (32×96)"),
        ("no attention", "no attention (no softmax between two matrix products)"),
    ],
)
def test_says_what_is_there_instead(name: str, words: str) -> None:
    assert QKV.find(detached(FOUND[name][0])).instead == words


def test_pins_are_the_products_with_their_types() -> None:
    (instance,) = QKV.find(detached(attention())).instances
    assert [pin.name for pin in instance.pins] == ["q", "k", "v"]
    assert all(len(pin.type.tensor_type.shape.dim) == 3 for pin in instance.pins)


def merge(model: onnx.ModelProto) -> None:
    """What fuse_qkv does: one product with the three matrices side by side, split afterwards."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    joined = np.concatenate([arrays[name] for name in ("wq", "wk", "wv")], axis=1)
    keep = [node for node in model.graph.node if node.output[0] not in ("q", "k", "v")]
    at = next(i for i, node in enumerate(keep) if node.output[0] == "qh")
    keep.insert(at, onnx.helper.make_node("MatMul", ["h", "wqkv"], ["qkv"]))
    keep.insert(at + 1, onnx.helper.make_node("Split", ["qkv"], ["q", "k", "v"], axis=-1, num_outputs=3))
    del model.graph.node[:]
    model.graph.node.extend(keep)
    del model.graph.initializer[:]
    model.graph.initializer.extend(
        [numpy_helper.from_array(joined, "wqkv"), numpy_helper.from_array(arrays["wo"], "wo")]
    )


def transpose_a_weight(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(numpy_helper.to_array(tensor).T), "wq"))
    product = next(node for node in model.graph.node if list(node.output) == ["q"])
    index = list(model.graph.node).index(product)
    model.graph.node.insert(index, onnx.helper.make_node("Transpose", ["wq"], ["wq_t"], perm=[1, 0]))
    product.input[1] = "wq_t"


def change_a_bit(model: onnx.ModelProto) -> None:
    array = numpy_helper.to_array(model.graph.initializer[2]).copy()
    array[5, 5] = np.nextafter(array[5, 5], np.float32(9))
    model.graph.initializer[2].CopyFrom(numpy_helper.from_array(array, "wv"))


def share_one_product(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.input[:] = ["q" if name == "k" else name for name in node.input]
    keep = [node for node in model.graph.node if node.output[0] != "k"]
    del model.graph.node[:]
    model.graph.node.extend(keep)


def merge_and_leave_the_products_dead(model: onnx.ModelProto) -> None:
    """The separate products stay, and nobody reads them."""
    products = [node for node in attention().graph.node if node.output[0] in ("q", "k", "v")]
    weights = [tensor for tensor in attention().graph.initializer if tensor.name in ("wq", "wk", "wv")]
    merge(model)
    for node in products:
        node.output[0] = f"dead_{node.output[0]}"
    model.graph.node.extend(products)
    model.graph.initializer.extend(weights)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (lambda model: None, []),
        (transpose_a_weight, []),
        (merge, ["attention 0"]),
        (merge_and_leave_the_products_dead, ["attention 0"]),
        (change_a_bit, ["attention 0"]),
        (share_one_product, ["attention 0"]),
    ],
    ids=["as it was", "transposed", "merged", "merged, products dead", "one bit", "product dropped"],
)
def test_the_checker_sees_what_was_lost(change, lost: list[str]) -> None:
    instances = QKV.find(detached(attention())).instances
    model = attention()
    change(model)
    assert list(QKV.lost(instances, detached(model))) == lost


def test_a_matrix_may_be_stored_in_the_type_that_it_is_used_in() -> None:
    model = FOUND["stored in half precision"][0]
    instances = QKV.find(detached(model)).instances
    folded = model_of(
        STORED_IN_HALF.replace("32 = Cast <to = 1> (w", "32 = Identity (w"),
        **{name: array.astype(np.float16).astype(np.float32) for name, array in square("wq", "wk", "wv").items()},
    )
    assert list(QKV.lost(instances, detached(folded))) == []


def test_layers_that_share_their_matrices_need_a_product_each() -> None:
    """As in ALBERT: the same three matrices in two layers, of which one is merged."""
    layer = """
        q{0} = MatMul ({1}, wq)
        k{0} = MatMul ({1}, wk)
        v{0} = MatMul ({1}, wv)
        kt{0} = Transpose <perm = [0, 2, 1]> (k{0})
        s{0} = MatMul (q{0}, kt{0})
        p{0} = Softmax <axis = -1> (s{0})
        y{0} = MatMul (p{0}, v{0})
    """
    text = f"g (float[2, 8, 32] x) => (float[2, 8, 32] y1) {{ {layer.format(0, 'x')}\n {layer.format(1, 'y0')} }}"
    model = model_of(text, **square("wq", "wk", "wv"))
    instances = QKV.find(detached(model)).instances
    assert len(instances) == 2
    broken = model_of(text.replace("MatMul (y0, wk)", "Relu (y0)"), **square("wq", "wk", "wv"))
    assert list(QKV.lost(instances, detached(model))) == []
    assert list(QKV.lost(instances, detached(broken))) == ["attention 1"]
