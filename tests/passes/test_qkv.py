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
    "merged in the source": (merged_attention(), []),
    "no attention": (model_of(CLASSIFIER, w1=matrix(32, 32, 0), w2=matrix(32, 10, 1)), []),
}


@pytest.mark.parametrize("name", FOUND)
def test_finds_each_triple_and_no_other(name: str) -> None:
    model, expected = FOUND[name]
    found = QKV.find(detached(model))
    assert [tuple(weight.name for weight in one.weights) for one in found.instances] == expected


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
