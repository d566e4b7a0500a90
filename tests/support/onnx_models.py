"""Small models as ONNX text, with seeded weights."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
from onnx import numpy_helper

from passes.weights.detached import DetachedModel, detach

IR_VERSIONS = {6: 4, 9: 4, 20: 9, 21: 10}


def model_of(text: str, opset: int = 20, /, **weights: np.ndarray | np.generic) -> onnx.ModelProto:
    """A model from a graph in ONNX text; keyword arguments are its initializers."""
    model = onnx.parser.parse_model(f'<ir_version: {IR_VERSIONS[opset]}, opset_import: ["": {opset}]>\n{text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    inferred = onnx.shape_inference.infer_shapes(model)
    return inferred


def detached(model: onnx.ModelProto) -> DetachedModel:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return detach(copy)


def matrix(rows: int, columns: int, seed: int) -> np.ndarray:
    scale = 1.0 / np.sqrt(rows)
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * scale).astype(np.float32)


def square(*names: str, size: int = 32) -> dict[str, np.ndarray]:
    """Matrices of their own by name."""
    return {name: matrix(size, size, seed) for seed, name in enumerate(names)}


def vector(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


ATTENTION = """
block (float[2, 8, {width}] x) => (float[2, 8, {width}] y) {{
    h = Relu (x)
    {projections}
    shape = Constant <value_ints = [2, 8, {heads}, {head}]> ()
    back = Constant <value_ints = [2, 8, {width}]> ()
    qh = Reshape (q, shape)
    kh = Reshape (k, shape)
    vh = Reshape (v, shape)
    qt = Transpose <perm = [0, 2, 1, 3]> (qh)
    kt = Transpose <perm = [0, 2, 3, 1]> (kh)
    vt = Transpose <perm = [0, 2, 1, 3]> (vh)
    scores = MatMul (qt, kt)
    scaled = Mul (scores, scale)
    weights = Softmax <axis = -1> (scaled)
    mixed = MatMul (weights, vt)
    merged = Transpose <perm = [0, 2, 1, 3]> (mixed)
    flat = Reshape (merged, back)
    y = MatMul (flat, wo)
}}
"""

PLAIN = "q = MatMul (h, wq) k = MatMul (h, wk) v = MatMul (h, wv)"
BIASED = """
    q0 = MatMul (h, wq) q = Add (q0, bq)
    k0 = MatMul (h, wk) k = Add (k0, bk)
    v0 = MatMul (h, wv) v = Add (v0, bv)
"""


def attention(width: int = 32, heads: int = 2) -> onnx.ModelProto:
    """One attention block after a Relu: onnxoptimizer's fuse_qkv and onnxsim merge its Q, K and V."""
    return _attention(PLAIN, width, heads)


def attention_on_the_input() -> onnx.ModelProto:
    """The biased block, whose Q, K and V read the model's input: fuse_qkv stops there with an assertion."""
    model = biased_attention()
    for node in model.graph.node[1:]:
        node.input[:] = ["x" if name == "h" else name for name in node.input]
    del model.graph.node[0]
    return model


def biased_attention(width: int = 32, heads: int = 2) -> onnx.ModelProto:
    """The same with biases, as `nn.Linear` has them: onnxsim makes one `com.microsoft::Attention` of it."""
    biases = {name: vector(width, seed) for seed, name in enumerate(("bq", "bk", "bv"))}
    return _attention(BIASED, width, heads, **biases)


def _attention(projections: str, width: int, heads: int, **biases: np.ndarray) -> onnx.ModelProto:
    text = ATTENTION.format(projections=projections, width=width, heads=heads, head=width // heads)
    weights = {name: matrix(width, width, seed) for seed, name in enumerate(("wq", "wk", "wv", "wo"))}
    scale = np.array((width // heads) ** -0.5, np.float32)
    return model_of(text, **weights, **biases, scale=scale)


MERGED = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    qkv = MatMul (x, w)
    q, k, v = Split <axis = -1, num_outputs = 3> (qkv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}
"""


def merged_attention() -> onnx.ModelProto:
    """Q, K and V come from one matrix in the source already, as in GPT-2."""
    return model_of(MERGED, w=matrix(32, 96, 0))


def op_types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def op_counts(model: onnx.ModelProto) -> Counter[str]:
    return Counter(op_types(model))
