"""Writes `attention.onnx`, which lies next to this file: a tiny attention block with a matrix each for Q, K and V.

The three read a LayerNormalization, as in a transformer; the default recipe's `fuse_qkv` makes one matrix of them.

`configs/onnx_file.yaml` runs it. To make it again: `python examples/make_attention_onnx.py`
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

HIDDEN, HEADS = 32, 4
SCALE = (HIDDEN // HEADS) ** -0.5

TEXT = f"""
<ir_version: 10, opset_import: ["" : 20]>
attention (float[batch, places, {HIDDEN}] x) => (float[batch, places, {HIDDEN}] y)
<int64[4] heads = {{0, 0, {HEADS}, {HIDDEN // HEADS}}},
 int64[3] joined = {{0, 0, {HIDDEN}}}, float scale = {{{SCALE}}}>
{{
    normal = LayerNormalization <axis = -1> (x, gain, shift)
    q0 = MatMul(normal, query)
    k0 = MatMul(normal, key)
    v0 = MatMul(normal, value)
    q1 = Reshape(q0, heads)
    k1 = Reshape(k0, heads)
    v1 = Reshape(v0, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k = Transpose <perm = [0, 2, 3, 1]> (k1)
    v = Transpose <perm = [0, 2, 1, 3]> (v1)
    scores = MatMul(q, k)
    scaled = Mul(scores, scale)
    weights = Softmax <axis = -1> (scaled)
    context = MatMul(weights, v)
    ordered = Transpose <perm = [0, 2, 1, 3]> (context)
    merged = Reshape(ordered, joined)
    attended = MatMul(merged, out)
    y = Add(x, attended)
}}
"""


def main() -> None:
    model = onnx.parser.parse_model(TEXT)
    random = np.random.default_rng(0)
    tensors = {name: random.normal(0, HIDDEN**-0.5, (HIDDEN, HIDDEN)) for name in ("query", "key", "value", "out")}
    tensors |= {"gain": random.uniform(0.5, 1.5, HIDDEN), "shift": random.normal(0, 0.1, HIDDEN)}
    for name, values in tensors.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, Path(__file__).with_name("attention.onnx"))


if __name__ == "__main__":
    main()
