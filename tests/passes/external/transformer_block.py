"""A block of a transformer as exporters wrote it for years, which the fusions of onnxruntime were written for."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from tests.support.onnx_models import matrix, vector

WIDTH = 32

POST_NORM = """
<ir_version: 8, opset_import: ["": %OPSET%]>
block (float[2, 8, 32] x, int64[2, 8] mask) => (float[2, 8, 32] y) {
    a = Relu (x)
    h = %LAYERNORM% (a, g0, b0)
    q0 = MatMul (h, wq)
    q = Add (q0, bq)
    k0 = MatMul (h, wk)
    k = Add (k0, bk)
    v0 = MatMul (h, wv)
    v = Add (v0, bv)
    qh = Reshape (q, heads)
    kh = Reshape (k, heads)
    vh = Reshape (v, heads)
    qt = Transpose <perm = [0, 2, 1, 3]> (qh)
    kt = Transpose <perm = [0, 2, 3, 1]> (kh)
    vt = Transpose <perm = [0, 2, 1, 3]> (vh)
    scores = MatMul (qt, kt)
    scaled = Div (scores, root)
    mask1 = %UNSQUEEZE1%
    mask2 = %UNSQUEEZE2%
    mask3 = Cast <to = 1> (mask2)
    hidden = Sub (unit, mask3)
    low = Mul (hidden, lowest)
    masked = Add (scaled, low)
    weights = Softmax <axis = 3> (masked)
    mixed = MatMul (weights, vt)
    merged = Transpose <perm = [0, 2, 1, 3]> (mixed)
    flat = Reshape (merged, back)
    o0 = MatMul (flat, wo)
    o = Add (o0, bo)
    r = Add (o, h)
    n = %LAYERNORM% (r, g1, b1)
    y = Relu (n)
}
"""

SPELLED = """
    {out}_mean = ReduceMean <axes = [-1]> ({x})
    {out}_centred = Sub ({x}, {out}_mean)
    {out}_squared = Pow ({out}_centred, two)
    {out}_variance = ReduceMean <axes = [-1]> ({out}_squared)
    {out}_safe = Add ({out}_variance, tiny)
    {out}_deviation = Sqrt ({out}_safe)
    {out}_normed = Div ({out}_centred, {out}_deviation)
    {out}_scaled = Mul ({out}_normed, {scale})
    {out} = Add ({out}_scaled, {bias})
"""
"""LayerNormalization before opset 17."""


def post_norm(opset: int = 17) -> onnx.ModelProto:
    """Biased attention with a mask, between two layer norms. At opset 12 everything is spelled out as in 2020."""
    old = opset < 13
    text = POST_NORM.replace("%OPSET%", str(opset))
    text = text.replace("%UNSQUEEZE1%", "Unsqueeze <axes = [1]> (mask)" if old else "Unsqueeze (mask, first)")
    text = text.replace("%UNSQUEEZE2%", "Unsqueeze <axes = [2]> (mask1)" if old else "Unsqueeze (mask1, second)")
    weights = {name: matrix(WIDTH, WIDTH, seed) for seed, name in enumerate(("wq", "wk", "wv", "wo"))}
    for seed, name in enumerate(("bq", "bk", "bv", "bo", "g0", "b0", "g1", "b1")):
        weights[name] = vector(WIDTH, seed)
    weights |= {"root": np.float32(4), "unit": np.float32(1), "lowest": np.float32(-10000)}
    weights |= {"heads": np.array([0, 0, 2, 16]), "back": np.array([0, 0, WIDTH])}
    if old:
        text = text.replace("h = %LAYERNORM% (a, g0, b0)", SPELLED.format(out="h", x="a", scale="g0", bias="b0"))
        text = text.replace("n = %LAYERNORM% (r, g1, b1)", SPELLED.format(out="n", x="r", scale="g1", bias="b1"))
        weights |= {"two": np.float32(2), "tiny": np.float32(1e-5)}
    else:
        text = text.replace("%LAYERNORM%", "LayerNormalization <axis = -1>")
        weights |= {"first": np.array([1]), "second": np.array([2])}
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def feeds() -> list[dict[str, np.ndarray]]:
    """Inputs of `post_norm`. The mask lets everything through: onnxruntime takes it for padding on the right."""
    x = np.random.default_rng(0).standard_normal((2, 8, WIDTH)).astype(np.float32)
    return [{"x": x, "mask": np.ones((2, 8), np.int64)}]
