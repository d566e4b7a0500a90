"""Scores that are weighed, turned, rotated or summed in unusual ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from scipy.linalg import hadamard

from tests.passes.structures.tricky_model import (
    CONTEXT,
    HEADS,
    SCORES,
    SOFTMAX,
    WEIGHTS,
    Tricky,
    model,
    weigh_scores,
    with_tensors,
)
from tests.support.structure_models import drawn

CHANNELS = """
    q0 = Conv (x, wq) k0 = Conv (x, wk) v0 = Conv (x, wv)
    q = BatchNormalization (q0, g, b, m, d) k = BatchNormalization (k0, g, b, m, d)
    v = BatchNormalization (v0, g, b, m, d)
    flat = Constant <value_ints = [1, 32, 16]> () back = Constant <value_ints = [1, 32, 4, 4]> ()
    qf = Reshape (q, flat) kf = Reshape (k, flat) vf = Reshape (v, flat)
    qt = Transpose <perm = [0, 2, 1]> (qf) s = MatMul (qt, kf) p = Softmax <axis = -1> (s)
    pt = Transpose <perm = [0, 2, 1]> (p) c = MatMul (vf, pt) y = Reshape (c, back)
"""
CONVOLVED = """
g (float[1, 32, 4, 4] x) => (float[1, 32, 4, 4] y)
<float[32, 32, 1, 1] wq, float[32, 32, 1, 1] wk, float[32, 32, 1, 1] wv, float[32] g, float[32] b, float[32] m,
 float[32] d> {"""

LINEAR = f"""{HEADS}
    one = Constant <value_float = 1.0> () qe = Elu (qt) qf = Add (qe, one) ke = Elu (kt) kf = Add (ke, one)
    kfu = Transpose <perm = [0, 1, 3, 2]> (kf) kv = MatMul (kfu, vt) c0 = MatMul (qf, kv)
    places = Constant <value_ints = [2]> () ks = ReduceSum <keepdims = 1> (kf, places)
    ksu = Transpose <perm = [0, 1, 3, 2]> (ks) z = MatMul (qf, ksu) c = Div (c0, z)
    ct = Transpose <perm = [0, 2, 1, 3]> (c) y = Reshape (ct, flat)
"""
LAST = "ct = Transpose <perm = [0, 2, 1, 3]> (c) y = Reshape (ct, flat)"


def rotate_heads(turned: str, once: str = "") -> onnx.ModelProto:
    """`turned` makes `{r}r` of the heads `{r}t` of Q and K, with the matrix `turn`."""
    tail = " ".join(turned.replace("{r}", role) for role in "qk")
    scores = "ku = Transpose <perm = [0, 1, 3, 2]> (kr) s = MatMul (qr, ku)"
    attention_model = model(
        tail=f"{once} {HEADS} {tail} {scores} {SOFTMAX} {CONTEXT}",
        weights=f"{WEIGHTS}, float[16, 16] turn, float[8, 16] cos, float[8, 16] sin",
    )
    return with_tensors(attention_model, turn=(hadamard(16) / 4).astype(np.float32))


def quarter_turn() -> np.ndarray:
    """(a, b) → (-b, a), as a matrix that stands on the right."""
    eye = np.eye(8, dtype=np.float32)
    return np.block([[np.zeros_like(eye), eye], [-eye, np.zeros_like(eye)]])


CORES: Mapping[str, Callable[[], Tricky]] = {
    "Conv and BatchNormalization": lambda: Tricky(drawn(f"{CONVOLVED} {CHANNELS} }}")),
    "ReLU weighs": lambda: Tricky(weigh_scores("p = Relu (s)")),
    "squared ReLU weighs": lambda: Tricky(weigh_scores("r = Relu (s) p = Mul (r, r)")),
    "sigmoid weighs": lambda: Tricky(weigh_scores("p = Sigmoid (s)")),
    "LogSoftmax and Exp": lambda: Tricky(weigh_scores("l = LogSoftmax <axis = -1> (s) p = Exp (l)")),
    "Softmax of a flat matrix": lambda: Tricky(
        weigh_scores(
            "rows = Constant <value_ints = [32, 8]> () cube = Constant <value_ints = [2, 2, 8, 8]> () "
            "sf = Reshape (s, rows) pf = Softmax <axis = -1> (sf) p = Reshape (pf, cube)"
        )
    ),
    "Softmax after Flatten": lambda: Tricky(
        weigh_scores(
            "cube = Constant <value_ints = [2, 2, 8, 8]> () "
            "sf = Flatten <axis = 3> (s) pf = Softmax <axis = -1> (sf) p = Reshape (pf, cube)"
        )
    ),
    "transposed scores": lambda: Tricky(
        model(
            tail=f"{HEADS} qu = Transpose <perm = [0, 1, 3, 2]> (qt) s = MatMul (kt, qu) p = Softmax <axis = -2> (s) "
            "pt = Transpose <perm = [0, 1, 3, 2]> (p) c = MatMul (pt, vt) " + LAST
        )
    ),
    "everything transposed": lambda: Tricky(
        model(
            tail=f"{HEADS} qu = Transpose <perm = [0, 1, 3, 2]> (qt) s = MatMul (kt, qu) p = Softmax <axis = -2> (s) "
            "vu = Transpose <perm = [0, 1, 3, 2]> (vt) cu = MatMul (vu, p) c = Transpose <perm = [0, 1, 3, 2]> (cu) "
            + LAST
        )
    ),
    "transposed scores by Einsum": lambda: Tricky(
        model(
            tail=f'{HEADS} s = Einsum <equation = "bhke,bhqe->bhkq"> (kt, qt) p = Softmax <axis = 2> (s) '
            'c = Einsum <equation = "bhkq,bhke->bhqe"> (p, vt) ' + LAST
        )
    ),
    "linear attention": lambda: Tricky(model(tail=LINEAR)),
    "linear attention, scores first": lambda: Tricky(
        weigh_scores("two = Constant <value_float = 2.0> () p = Div (s, two)")
    ),
    "linear attention, transposed": lambda: Tricky(
        model(
            tail=f"{HEADS} vu = Transpose <perm = [0, 1, 3, 2]> (vt) vk = MatMul (vu, kt) "
            "qu = Transpose <perm = [0, 1, 3, 2]> (qt) cu = MatMul (vk, qu) c = Transpose <perm = [0, 1, 3, 2]> (cu) "
            + LAST
        )
    ),
    "linear attention by Einsum, with its divisor": lambda: Tricky(
        model(
            tail=f"{HEADS} qf = Relu (qt) kf = Relu (kt) places = Constant <value_ints = [2]> () "
            'kv = Einsum <equation = "bhnd,bhne->bhde"> (kf, vt) ks = ReduceSum <keepdims = 0> (kf, places) '
            'n = Einsum <equation = "bhnd,bhd->bhn"> (qf, ks) z = Reciprocal (n) '
            'c = Einsum <equation = "bhnd,bhde,bhn->bhne"> (qf, kv, z) ' + LAST
        )
    ),
    "softmax of Q and of K": lambda: Tricky(
        model(
            tail=f"{HEADS} qs = Softmax <axis = -1> (qt) ks = Softmax <axis = 2> (kt) "
            "ku = Transpose <perm = [0, 1, 3, 2]> (ks) kv = MatMul (ku, vt) c = MatMul (qs, kv) " + LAST
        )
    ),
    "attention over channels": lambda: Tricky(
        model(
            tail=f"{HEADS} qu = Transpose <perm = [0, 1, 3, 2]> (qt) s = MatMul (qu, kt) p = Softmax <axis = -1> (s) "
            "vu = Transpose <perm = [0, 1, 3, 2]> (vt) cu = MatMul (p, vu) c = Transpose <perm = [0, 1, 3, 2]> (cu) "
            + LAST
        )
    ),
    "Hadamard after rope (QuaRot R3)": lambda: Tricky(
        rotate_heads(
            "h{r}, l{r} = Split <axis = -1, num_outputs = 2> ({r}t) n{r} = Neg (l{r}) "
            "j{r} = Concat <axis = -1> (n{r}, h{r}) "
            "a{r} = Mul ({r}t, cos) b{r} = Mul (j{r}, sin) o{r} = Add (a{r}, b{r}) {r}r = MatMul (o{r}, turn)"
        )
    ),
    "two equal Hadamards": lambda: Tricky(
        with_tensors(
            model(
                tail=f"{HEADS} qr = MatMul (qt, turn) kr = MatMul (kt, back) "
                f"ku = Transpose <perm = [0, 1, 3, 2]> (kr) s = MatMul (qr, ku) {SOFTMAX} {CONTEXT}",
                weights=f"{WEIGHTS}, float[16, 16] turn, float[16, 16] back",
            ),
            turn=(hadamard(16) / 4).astype(np.float32),
            back=(hadamard(16) / 4).astype(np.float32),
        )
    ),
    "a matrix of V's heads": lambda: Tricky(
        with_tensors(
            model(
                tail=f"{HEADS} {SCORES} {SOFTMAX} vr = MatMul (vt, turn) c = MatMul (p, vr) " + LAST,
                weights=f"{WEIGHTS}, float[16, 16] turn",
            ),
            turn=(hadamard(16) / 4).astype(np.float32),
        )
    ),
    "rope as a product": lambda: Tricky(
        with_tensors(
            rotate_heads(
                "a{r} = Mul ({r}t, cos) j{r} = MatMul ({r}t, turn) b{r} = Mul (j{r}, sin) {r}r = Add (a{r}, b{r})"
            ),
            turn=quarter_turn(),
        )
    ),
    "rope as a product, the product first": lambda: Tricky(
        with_tensors(
            rotate_heads(
                "a{r} = Mul ({r}t, cos) j{r} = MatMul ({r}t, turn) b{r} = Mul (j{r}, sin) {r}r = Add (b{r}, a{r})"
            ),
            turn=quarter_turn(),
        )
    ),
    "rope as one matrix for each place": lambda: Tricky(
        model(
            tail=f"{HEADS} one = Constant <value_ints = [3]> () qe = Unsqueeze (qt, one) ke = Unsqueeze (kt, one) "
            "qp = MatMul (qe, turns) kp = MatMul (ke, turns) qr = Squeeze (qp, one) kr = Squeeze (kp, one) "
            f"ku = Transpose <perm = [0, 1, 3, 2]> (kr) s = MatMul (qr, ku) {SOFTMAX} {CONTEXT}",
            weights=f"{WEIGHTS}, float[8, 16, 16] turns",
        )
    ),
    "rope as a product of whole rows": lambda: Tricky(
        with_tensors(
            model(
                "{r}0 = MatMul (x, w{r}) c{r} = Mul ({r}0, cos) j{r} = MatMul ({r}0, turn) d{r} = Mul (j{r}, sin) "
                "{r} = Add (c{r}, d{r})",
                weights=f"{WEIGHTS}, float[32, 32] turn, float[8, 32] cos, float[8, 32] sin",
            ),
            turn=np.kron(np.eye(2, dtype=np.float32), quarter_turn()),
        )
    ),
    "Linformer": lambda: Tricky(
        model(
            tail=f"{HEADS} kl = MatMul (e, kt) vl = MatMul (f, vt) ku = Transpose <perm = [0, 1, 3, 2]> (kl) "
            f"s = MatMul (qt, ku) {SOFTMAX} c = MatMul (p, vl) " + LAST,
            weights=f"{WEIGHTS}, float[4, 8] e, float[4, 8] f",
        )
    ),
    "Linformer, before the heads": lambda: Tricky(
        model(
            "{r}0 = MatMul (x, w{r})",
            tail="k1 = MatMul (e, k0) v1 = MatMul (f, v0) kt = Transpose <perm = [0, 2, 1]> (k1) s = MatMul (q0, kt) "
            f"{SOFTMAX} y = MatMul (p, v1)",
            weights=f"{WEIGHTS}, float[4, 8] e, float[4, 8] f",
        )
    ),
    "Linformer by Linear over places": lambda: Tricky(
        model(
            "{r}0 = MatMul (x, w{r})",
            tail="k1 = Transpose <perm = [0, 2, 1]> (k0) kt = MatMul (k1, e) v1 = Transpose <perm = [0, 2, 1]> (v0) "
            "v2 = MatMul (v1, f) v3 = Transpose <perm = [0, 2, 1]> (v2) s = MatMul (q0, kt) "
            f"{SOFTMAX} y = MatMul (p, v3)",
            weights=f"{WEIGHTS}, float[8, 4] e, float[8, 4] f",
        )
    ),
}
