"""What looks like attention with three projections, and is not; each with why."""

from __future__ import annotations

import numpy as np

from tests.support.onnx_models import matrix, merged_attention, model_of, square

CLASSIFIER = """
g (float[2, 32] x) => (float[2, 10] y) {
    h = MatMul (x, w1)
    a = Relu (h)
    l = MatMul (a, w2)
    y = Softmax <axis = -1> (l)
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

# V is the hidden state, and what follows its norm is the layer before.
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

RESIDUAL = square("wq", "wk", "wv", "w0", "w1") | {"gamma": np.ones(32, np.float32)}

WITHOUT_TRIPLE = {
    "nothing projected": model_of(POOLED),
    "V not projected": model_of(UNPROJECTED_VALUES, **RESIDUAL),
    "V not projected, no norm": model_of(UNPROJECTED_VALUES_WITHOUT_NORM, **square("wq", "wk", "w0")),
    "Q learned": model_of(LEARNED_QUERIES, **square("wq", "wk", "wv"), latents=matrix(8, 32, 9)[None]),
    "Q not projected": model_of(UNPROJECTED_QUERIES, **RESIDUAL),
    "latent": model_of(
        LATENT, wq=matrix(32, 16, 0), wdown=matrix(32, 24, 1), wup=matrix(16, 24, 2), gamma=np.ones(16, np.float32)
    ),
    "experts": model_of(EXPERTS, router=matrix(32, 4, 0), experts=matrix(32, 128, 1)),
    "squeeze and excite": model_of(
        SQUEEZE_AND_EXCITE, w1=matrix(8, 32, 0)[:, :, None, None], w2=matrix(32, 8, 1)[:, :, None, None]
    ),
    "merged in the source": merged_attention(),
    "no attention": model_of(CLASSIFIER, w1=matrix(32, 32, 0), w2=matrix(32, 10, 1)),
}
