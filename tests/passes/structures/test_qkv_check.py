"""Q, K and V: judged by a checker that knows nothing of attention."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.structures import STRUCTURES
from passes.weights.detached import DetachedModel
from tests.passes.structures.attention_forms import STORED_IN_HALF, WITH_TRIPLE, WITHOUT_TRIPLE
from tests.support.onnx_models import attention, detached, matrix, model_of, square

QKV = STRUCTURES["qkv"]


@pytest.mark.parametrize("name", WITH_TRIPLE)
def test_nothing_is_lost_before_anything_happens(name: str) -> None:
    model = detached(WITH_TRIPLE[name])
    assert QKV.find_lost(QKV.find(model).instances, model) == {}


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
    assert list(QKV.find_lost(instances, detached(model))) == lost


def test_a_matrix_may_be_stored_in_the_type_that_it_is_used_in() -> None:
    model = WITH_TRIPLE["stored in half precision"]
    instances = QKV.find(detached(model)).instances
    folded = model_of(
        STORED_IN_HALF.replace("32 = Cast <to = 1> (w", "32 = Identity (w"),
        **{name: array.astype(np.float16).astype(np.float32) for name, array in square("wq", "wk", "wv").items()},
    )
    assert list(QKV.find_lost(instances, detached(folded))) == []


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
    assert list(QKV.find_lost(instances, detached(model))) == []
    assert list(QKV.find_lost(instances, detached(broken))) == ["attention 1"]


def test_outputs_that_a_node_leaves_out_join_nothing() -> None:
    """A fused SkipLayerNormalization leaves mean and deviation out: both have the name '', as a bias left out has."""
    text = """g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
        t = MatMul (x, w0)
        n = LayerNormalization <axis = -1> (t, scale)
        q = MatMul (n, wq) k = MatMul (n, wk) v = MatMul (n, wv)
        kt = Transpose <perm = [0, 2, 1]> (k)
        s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v)
    }"""
    model = model_of(text, **square("w0", "wq", "wk", "wv"), scale=np.ones(32, np.float32))
    instances = QKV.find(detached(model)).instances
    model.graph.node[1].output.extend(["", ""])
    assert len(instances) == 1 and QKV.find_lost(instances, detached(model)) == {}


@pytest.mark.parametrize(
    "operator",
    [
        "y = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v, bias)",
        "y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, , , bias)",
        "y = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2> (q, k, v, , , n, n, cos, sin)",
        "r = com.microsoft.RotaryEmbedding (q, n, cos, sin)y = Attention <q_num_heads = 2, kv_num_heads = 2> (r, k, v)",
    ],
)
def test_constant_masks_and_tables_of_angles_are_no_matrices_of_an_attention(operator: str) -> None:
    weights, stored = (
        square("wq", "wk", "wv"),
        {"bias": matrix(8, 8, 3), "cos": matrix(8, 8, 4), "sin": matrix(8, 8, 5)},
    )
    products = "q = MatMul (x, wq) k = MatMul (x, wk) v = MatMul (x, wv)"
    plain = (
        "kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q, kt) m = Add (s, bias) p = Softmax (m) y = MatMul (p, v)"
    )

    def model_with(before: str, after: str, **tensors: np.ndarray) -> DetachedModel:
        text = f"g (float[2, 8, 32] x, int32[1] n) => (float[2, 8, 32] y) {{ {before} {after} }}"
        model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>' + text)
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
        return detached(model)

    instances = QKV.find(model_with(products, plain, **weights, **stored)).instances
    assert len(instances) == 1
    assert QKV.find_lost(instances, model_with(products, operator, **weights, **stored)) == {}
    joined = np.concatenate(list(weights.values()), axis=1)
    merged = model_with("a = MatMul (x, w) q, k, v = Split <axis = 2> (a, parts)", operator, w=joined, **stored)
    assert list(QKV.find_lost(instances, merged)) == ["attention 0"]


# Q, K and V: found by shape.


@pytest.mark.parametrize("name", WITH_TRIPLE)
def test_finds_each_triple_and_no_other(name: str) -> None:
    found = QKV.find(detached(WITH_TRIPLE[name]))
    assert [tuple(weight.name for weight in one.weights) for one in found.instances] == [("wq", "wk", "wv")]


@pytest.mark.parametrize("name", WITHOUT_TRIPLE)
def test_finds_none_where_there_is_none(name: str) -> None:
    assert QKV.find(detached(WITHOUT_TRIPLE[name])).instances == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("merged in the source", "1 attention block whose Q, K and V are one matrix in the source already: w (32×96)"),
        (
            "no attention",
            "no attention in a form that is looked for (weights made from Q and K that multiply V, or a state made "
            "from K and V that Q multiplies; 1 Softmax)",
        ),
    ],
)
def test_says_what_is_there_instead(name: str, words: str) -> None:
    assert QKV.find(detached(WITHOUT_TRIPLE[name])).instead == words


def test_pins_are_the_products_with_their_types() -> None:
    (instance,) = QKV.find(detached(attention())).instances
    assert [site.tight.name for site in instance.pins] == ["q", "k", "v"]
    assert all(len(site.tight.type.tensor_type.shape.dim) == 3 for site in instance.pins)
