"""Attention whose projections, weights or scores are written in unusual ways, each with the weights that it has.

A model is a head that makes `q`, `k` and `v` of `x`, and a tail that makes `y` of these. `{r}` stands for each of the
three roles. What is declared in a text and not computed is a weight, drawn by its name (`pictures.drawn`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper
from scipy.linalg import hadamard

from tests.passes.structures.pictures import drawn

__all__ = ["MERGED_PARTLY", "TRICKY", "Tricky"]


@dataclass(frozen=True)
class Tricky:
    """`weights` are the names of the stored tensors of Q, K and V; `products` the values that they make, where these
    lie in the model's own graph and have a type, so that they can be pinned."""

    model: onnx.ModelProto
    weights: tuple[str, str, str] = ("wq", "wk", "wv")
    products: tuple[str, str, str] | None = ("q0", "k0", "v0")


WEIGHTS = "float[32, 32] wq, float[32, 32] wk, float[32, 32] wv"
PLAIN = "{r}0 = MatMul (x, w{r}) {r} = Identity ({r}0)"
HEADS = """
    shape = Constant <value_ints = [2, 8, 2, 16]> ()
    flat = Constant <value_ints = [2, 8, 32]> ()
    qh = Reshape (q, shape)
    kh = Reshape (k, shape)
    vh = Reshape (v, shape)
    qt = Transpose <perm = [0, 2, 1, 3]> (qh)
    kt = Transpose <perm = [0, 2, 1, 3]> (kh)
    vt = Transpose <perm = [0, 2, 1, 3]> (vh)
"""
SCORES = "ku = Transpose <perm = [0, 1, 3, 2]> (kt) s = MatMul (qt, ku)"
CONTEXT = "c = MatMul (p, vt) ct = Transpose <perm = [0, 2, 1, 3]> (c) y = Reshape (ct, flat)"
SOFTMAX = "p = Softmax <axis = -1> (s)"
BLOCK = f"{HEADS} {SCORES} {SOFTMAX} {CONTEXT}"


def model(projected: str = PLAIN, tail: str = BLOCK, weights: str = WEIGHTS, once: str = "") -> onnx.ModelProto:
    """`projected` is written for each role, `once` before them."""
    heads = " ".join(projected.replace("{r}", role) for role in "qkv")
    return drawn(f"g (float[2, 8, 32] x) => (float[2, 8, 32] y) <{weights}> {{ {once} {heads} {tail} }}")


def weighed(weighting: str, tail: str = CONTEXT) -> onnx.ModelProto:
    """Scores are weighed by `weighting`, which makes `p` of `s`."""
    return model(tail=f"{HEADS} {SCORES} {weighting} {tail}")


def with_tensors(made: onnx.ModelProto, **tensors: np.ndarray) -> onnx.ModelProto:
    """The same with other numbers in some weights."""
    for tensor in made.graph.initializer:
        if tensor.name in tensors:
            tensor.CopyFrom(numpy_helper.from_array(tensors[tensor.name], tensor.name))
    return made


def with_constants(made: onnx.ModelProto) -> onnx.ModelProto:
    """The weights in Constant nodes."""
    stored = list(made.graph.initializer)
    del made.graph.initializer[:]
    nodes = [onnx.helper.make_node("Constant", [], [one.name], value=one) for one in stored]
    rest = list(made.graph.node)
    del made.graph.node[:]
    made.graph.node.extend([*nodes, *rest])
    return made


def each(**others: str) -> str:
    """The three weights, and others for each role, by the dims that they have: `g="float[32]"` declares gq, gk, gv."""
    return WEIGHTS + "".join(f", {dims} {name}{role}" for name, dims in others.items() for role in "qkv")


EIGHT_BIT = ", ".join(f"int8[32, 32] w{role}, float[1] s{role}" for role in "qkv")


def of_integers(made: onnx.ModelProto) -> onnx.ModelProto:
    """8-bit weights and their scales, drawn."""
    numbers = np.random.default_rng(0)
    weights = {f"w{role}": numbers.integers(-127, 127, (32, 32)).astype(np.int8) for role in "qkv"}
    scales = {f"s{role}": np.array(0.01 * (at + 1), np.float32) for at, role in enumerate("qkv")}
    return with_tensors(made, **weights, **scales)


STACKED = "float[3, 32, 32] stack"
STACK = ("stack", "stack", "stack")

PROJECTIONS: Mapping[str, Callable[[], Tricky]] = {
    "plain": lambda: Tricky(model()),
    "weight norm": lambda: Tricky(
        model(
            "n{r} = ReduceL2 <keepdims = 1> (w{r}, rows) d{r} = Div (w{r}, n{r}) m{r} = Mul (d{r}, g{r}) "
            "{r}0 = MatMul (x, m{r}) {r} = Identity ({r}0)",
            weights=each(g="float[32]"),
            once="rows = Constant <value_ints = [0]> ()",
        )
    ),
    "weight times a vector": lambda: Tricky(
        model("m{r} = Mul (w{r}, g{r}) {r}0 = MatMul (x, m{r}) {r} = Identity ({r}0)", weights=each(g="float[32]"))
    ),
    "weight times a scalar": lambda: Tricky(
        model(
            "m{r} = Mul (w{r}, eighth) {r}0 = MatMul (x, m{r}) {r} = Identity ({r}0)",
            once="eighth = Constant <value_float = 0.125> ()",
        )
    ),
    "weight over a scalar, transposed": lambda: Tricky(
        model(
            "m{r} = Div (w{r}, two) t{r} = Transpose <perm = [1, 0]> (m{r}) {r}0 = MatMul (x, t{r}) "
            "{r} = Identity ({r}0)",
            once="two = Constant <value_float = 2.0> ()",
        )
    ),
    "weight plus a low-rank one": lambda: Tricky(
        model(
            "u{r} = MatMul (a{r}, b{r}) m{r} = Add (w{r}, u{r}) {r}0 = MatMul (x, m{r}) {r} = Identity ({r}0)",
            weights=each(a="float[32, 4]", b="float[4, 32]"),
        )
    ),
    "Constant nodes": lambda: Tricky(with_constants(model())),
    "Constant nodes, transposed": lambda: Tricky(
        with_constants(model("t{r} = Transpose <perm = [1, 0]> (w{r}) {r}0 = MatMul (x, t{r}) {r} = Identity ({r}0)"))
    ),
    "DequantizeLinear": lambda: Tricky(
        of_integers(
            model("m{r} = DequantizeLinear (w{r}, s{r}) {r}0 = MatMul (x, m{r}) {r} = Identity ({r}0)", weights=EIGHT_BIT)
        )
    ),
    "DequantizeLinear behind Transpose": lambda: Tricky(
        of_integers(
            model(
                "t{r} = Transpose <perm = [1, 0]> (w{r}) m{r} = DequantizeLinear (t{r}, s{r}) {r}0 = MatMul (x, m{r}) "
                "{r} = Identity ({r}0)",
                weights=EIGHT_BIT,
            )
        )
    ),
    "gathered from a stack": lambda: Tricky(
        model(
            tail=BLOCK,
            projected="m{r} = Gather <axis = 0> (stack, i{r}) {r}0 = MatMul (x, m{r}) {r} = Identity ({r}0)",
            weights=STACKED,
            once=" ".join(f"i{role} = Constant <value_int = {at}> ()" for at, role in enumerate("qkv")),
        ),
        STACK,
    ),
    "sliced from a stack": lambda: Tricky(
        model(
            "m{r} = Slice (stack, b{r}, e{r}) t{r} = Transpose <perm = [1, 0]> (m{r}) {r}0 = MatMul (x, t{r}) "
            "{r} = Identity ({r}0)",
            weights="float[96, 32] stack",
            once=" ".join(
                f"b{role} = Constant <value_ints = [{32 * at}]> () e{role} = Constant <value_ints = [{32 * at + 32}]> ()"
                for at, role in enumerate("qkv")
            ),
        ),
        STACK,
    ),
    "split from a stack": lambda: Tricky(
        model(
            "{r}0 = MatMul (x, m{r}) {r} = Identity ({r}0)",
            weights="float[32, 96] stack",
            once="mq, mk, mv = Split <axis = 1, num_outputs = 3> (stack)",
        ),
        STACK,
    ),
    "MatMulInteger": lambda: Tricky(
        of_integers(
            model(
                "{r}0 = MatMulInteger (xi, w{r}, xz) f{r} = Cast <to = 1> ({r}0) m{r} = Mul (xs, s{r}) "
                "{r} = Mul (f{r}, m{r})",
                weights=EIGHT_BIT,
                once="xi, xs, xz = DynamicQuantizeLinear (x)",
            )
        )
    ),
    "FusedMatMul": lambda: Tricky(
        model("{r}0 = com.microsoft.FusedMatMul <alpha = 0.5> (x, w{r}) {r} = Identity ({r}0)"), products=None
    ),
    "FusedMatMul, transposed": lambda: Tricky(
        model("{r}0 = com.microsoft.FusedMatMul <transB = 1> (x, w{r}) {r} = Identity ({r}0)"), products=None
    ),
    "QDQ around activations": lambda: Tricky(
        model(
            "{r}0 = MatMul (xd, w{r}) {r}i = QuantizeLinear ({r}0, half) {r} = DequantizeLinear ({r}i, half)",
            once="half = Constant <value_float = 0.05> () xi = QuantizeLinear (x, half) xd = DequantizeLinear (xi, half)",
        )
    ),
    "QDQ around both": lambda: Tricky(
        of_integers(
            model(
                "m{r} = DequantizeLinear (w{r}, s{r}) {r}0 = MatMul (xd, m{r}) {r}i = QuantizeLinear ({r}0, half) "
                "{r} = DequantizeLinear ({r}i, half)",
                weights=EIGHT_BIT,
                once="half = Constant <value_float = 0.05> () "
                "xi = QuantizeLinear (x, half) xd = DequantizeLinear (xi, half)",
            )
        )
    ),
    "Dropout behind": lambda: Tricky(model("{r}0 = MatMul (x, w{r}) {r} = Dropout ({r}0)")),
    "ReLU behind": lambda: Tricky(model("{r}0 = MatMul (x, w{r}) {r} = Relu ({r}0)")),
    "tanh behind": lambda: Tricky(model("{r}0 = MatMul (x, w{r}) {r} = Tanh ({r}0)")),
    "SiLU behind": lambda: Tricky(model("{r}0 = MatMul (x, w{r}) g{r} = Sigmoid ({r}0) {r} = Mul ({r}0, g{r})")),
    "GELU with Erf behind": lambda: Tricky(
        model(
            "{r}0 = MatMul (x, w{r}) d{r} = Div ({r}0, root) f{r} = Erf (d{r}) a{r} = Add (f{r}, one) "
            "{r} = Mul ({r}0, a{r})",
            once="root = Constant <value_float = 1.414> () one = Constant <value_float = 1.0> ()",
        )
    ),
    "Einsum of three axes": lambda: Tricky(
        model(
            'x3{r} = Einsum <equation = "bsd,dhe->bhse"> (x, w{r}) {r}0 = Identity (x3{r})',
            weights=", ".join(f"float[32, 2, 16] w{role}" for role in "qkv"),
            tail='s = Einsum <equation = "bhqe,bhke->bhqk"> (q0, k0) p = Softmax <axis = -1> (s) '
            'c = Einsum <equation = "bhqk,bhke->bqhe"> (p, v0) flat = Constant <value_ints = [2, 8, 32]> () '
            "y = Reshape (c, flat)",
        ),
        products=("x3q", "x3k", "x3v"),
    ),
    "Einsum, heads first": lambda: Tricky(
        model(
            '{r}0 = Einsum <equation = "bsd,hde->hbse"> (x, w{r})',
            weights=", ".join(f"float[2, 32, 16] w{role}" for role in "qkv"),
            tail='s = Einsum <equation = "hbqe,hbke->hbqk"> (q0, k0) p = Softmax <axis = -1> (s) '
            'c = Einsum <equation = "hbqk,hbke->bqhe"> (p, v0) flat = Constant <value_ints = [2, 8, 32]> () '
            "y = Reshape (c, flat)",
        )
    ),
    "Einsum with an ellipsis": lambda: Tricky(
        model(
            '{r}0 = Einsum <equation = "...d,ed->...e"> (x, w{r})',
            tail='s = Einsum <equation = "...qe,...ke->...qk"> (q0, k0) p = Softmax <axis = -1> (s) '
            'y = Einsum <equation = "...qk,...ke->...qe"> (p, v0)',
        )
    ),
}

CHANNELS = """
    q0 = Conv (x, wq) k0 = Conv (x, wk) v0 = Conv (x, wv)
    q = BatchNormalization (q0, g, b, m, d) k = BatchNormalization (k0, g, b, m, d) v = BatchNormalization (v0, g, b, m, d)
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


def rotated(turned: str, once: str = "") -> onnx.ModelProto:
    """`turned` makes `{r}r` of the heads `{r}t` of Q and K, with the matrix `turn`."""
    tail = " ".join(turned.replace("{r}", role) for role in "qk")
    scores = "ku = Transpose <perm = [0, 1, 3, 2]> (kr) s = MatMul (qr, ku)"
    made = model(
        tail=f"{once} {HEADS} {tail} {scores} {SOFTMAX} {CONTEXT}",
        weights=f"{WEIGHTS}, float[16, 16] turn, float[8, 16] cos, float[8, 16] sin",
    )
    return with_tensors(made, turn=(hadamard(16) / 4).astype(np.float32))


def quarter_turn() -> np.ndarray:
    """(a, b) → (-b, a), as a matrix that stands on the right."""
    eye = np.eye(8, dtype=np.float32)
    return np.block([[np.zeros_like(eye), eye], [-eye, np.zeros_like(eye)]])


CORES: Mapping[str, Callable[[], Tricky]] = {
    "Conv and BatchNormalization": lambda: Tricky(drawn(f"{CONVOLVED} {CHANNELS} }}")),
    "ReLU weighs": lambda: Tricky(weighed("p = Relu (s)")),
    "squared ReLU weighs": lambda: Tricky(weighed("r = Relu (s) p = Mul (r, r)")),
    "sigmoid weighs": lambda: Tricky(weighed("p = Sigmoid (s)")),
    "LogSoftmax and Exp": lambda: Tricky(weighed("l = LogSoftmax <axis = -1> (s) p = Exp (l)")),
    "Softmax of a flat matrix": lambda: Tricky(
        weighed(
            "rows = Constant <value_ints = [32, 8]> () cube = Constant <value_ints = [2, 2, 8, 8]> () "
            "sf = Reshape (s, rows) pf = Softmax <axis = -1> (sf) p = Reshape (pf, cube)"
        )
    ),
    "Softmax behind Flatten": lambda: Tricky(
        weighed(
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
    "linear attention, scores first": lambda: Tricky(weighed("two = Constant <value_float = 2.0> () p = Div (s, two)")),
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
    "Hadamard behind rope (QuaRot R3)": lambda: Tricky(
        rotated(
            "h{r}, l{r} = Split <axis = -1, num_outputs = 2> ({r}t) n{r} = Neg (l{r}) j{r} = Concat <axis = -1> (n{r}, h{r}) "
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
            rotated("a{r} = Mul ({r}t, cos) j{r} = MatMul ({r}t, turn) b{r} = Mul (j{r}, sin) {r}r = Add (a{r}, b{r})"),
            turn=quarter_turn(),
        )
    ),
    "rope as a product, the product first": lambda: Tricky(
        with_tensors(
            rotated("a{r} = Mul ({r}t, cos) j{r} = MatMul ({r}t, turn) b{r} = Mul (j{r}, sin) {r}r = Add (b{r}, a{r})"),
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

CACHED = f"""
g (float[2, 1, 32] x, float[2, 8, 32] kc, float[2, 8, 32] vc, int64[1] at, int64[2, 1, 32] where)
    => (float[2, 1, 32] y) <{WEIGHTS}> {{
    q0 = MatMul (x, wq) k0 = MatMul (x, wk) v0 = MatMul (x, wv) WRITTEN
    kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q0, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v) }}"""

WRITES = {
    "ScatterElements": """
        k = ScatterElements <axis = 1> (kc, where, k0) v = ScatterElements <axis = 1> (vc, where, v0)""",
    "ScatterND": """
        last = Constant <value_ints = [1]> () row = Unsqueeze (at, last)
        ku = Transpose <perm = [1, 0, 2]> (kc) kn = Transpose <perm = [1, 0, 2]> (k0) kw = ScatterND (ku, row, kn)
        vu = Transpose <perm = [1, 0, 2]> (vc) vn = Transpose <perm = [1, 0, 2]> (v0) vw = ScatterND (vu, row, vn)
        k = Transpose <perm = [1, 0, 2]> (kw) v = Transpose <perm = [1, 0, 2]> (vw)""",
    "Concat": "k = Concat <axis = 1> (kc, k0) v = Concat <axis = 1> (vc, v0)",
}
CACHES: Mapping[str, Callable[[], Tricky]] = {
    f"cache by {name}": lambda text=text: Tricky(drawn(CACHED.replace("WRITTEN", text))) for name, text in WRITES.items()
}

FUNCTION = f"""
g (float[2, 8, 32] x) => (float[2, 8, 32] y) <{WEIGHTS}> {{ y = own.attend (x, wq, wk, wv) }}
<domain: "own", opset_import: ["": 20]>
attend (x, wq, wk, wv) => (y) {{
    q0 = MatMul (x, wq) k0 = MatMul (x, wk) v0 = MatMul (x, wv)
    kt = Transpose <perm = [0, 2, 1]> (k0) s = MatMul (q0, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v0)
}}"""

INSIDE = """q0 = MatMul (X, wq) k0 = MatMul (X, wk) v0 = MatMul (X, wv) kt = Transpose <perm = [0, 2, 1]> (k0)
    s = MatMul (q0, kt) p = Softmax <axis = -1> (s)"""
BODIES = {
    "If": f"""g (float[2, 8, 32] x, bool c) => (float[2, 8, 32] y) <{WEIGHTS}> {{
        y = If (c) <then_branch = t () => (float[2, 8, 32] a) {{ {INSIDE.replace("X", "x")} a = MatMul (p, v0) }},
                    else_branch = e () => (float[2, 8, 32] b) {{ b = Relu (x) }}> }}""",
    "If, projected outside": f"""g (float[2, 8, 32] x, bool c) => (float[2, 8, 32] y) <{WEIGHTS}> {{
        q0 = MatMul (x, wq) k0 = MatMul (x, wk) v0 = MatMul (x, wv)
        y = If (c) <then_branch = t () => (float[2, 8, 32] a) {{
            kt = Transpose <perm = [0, 2, 1]> (k0) s = MatMul (q0, kt) p = Softmax <axis = -1> (s) a = MatMul (p, v0) }},
                    else_branch = e () => (float[2, 8, 32] b) {{ b = Relu (x) }}> }}""",
    "Loop": f"""g (float[2, 8, 32] x) => (float[2, 8, 32] y) <{WEIGHTS}, int64 n = {{3}}, bool go = {{1}}> {{
        y = Loop (n, go, x) <body = b (int64 i, bool ci, float[2, 8, 32] h) => (bool co, float[2, 8, 32] a) {{
            co = Identity (ci) {INSIDE.replace("X", "h")} a = MatMul (p, v0) }}> }}""",
    "Scan": f"""g (float[4, 2, 8, 32] x) => (float[4, 2, 8, 32] y) <{WEIGHTS}> {{
        y = Scan <num_scan_inputs = 1, body = b (float[2, 8, 32] h) => (float[2, 8, 32] a) {{
            {INSIDE.replace("X", "h")} a = MatMul (p, v0) }}> (x) }}""",
    "If in a Loop": f"""g (float[2, 8, 32] x, bool c) => (float[2, 8, 32] y)
        <{WEIGHTS}, int64 n = {{3}}, bool go = {{1}}> {{
        y = Loop (n, go, x) <body = b (int64 i, bool ci, float[2, 8, 32] h) => (bool co, float[2, 8, 32] a) {{
            co = Identity (ci) a = If (c) <then_branch = t () => (float[2, 8, 32] u) {{
                {INSIDE.replace("X", "h")} u = MatMul (p, v0) }},
                else_branch = e () => (float[2, 8, 32] w) {{ w = Relu (h) }}> }}> }}""",
}


def function() -> onnx.ModelProto:
    """Attention in a function of the model's own."""
    head = '<ir_version: 10, opset_import: ["": 20, "own": 1]>'
    made = onnx.parser.parse_model(f"{head}\n{FUNCTION}")
    plain = drawn(f"g (float[2, 8, 32] x) => (float[2, 8, 32] y) <{WEIGHTS}> {{ y = Identity (x) }}")
    made.graph.initializer.extend(plain.graph.initializer)
    del made.graph.value_info[:]
    return made


NESTED: Mapping[str, Callable[[], Tricky]] = {
    "function": lambda: Tricky(function(), products=None),
    **{
        name: lambda text=text, name=name: Tricky(drawn(text), products=("q0", "k0", "v0") if "outside" in name else None)
        for name, text in BODIES.items()
    },
}

TRICKY: Mapping[str, Callable[[], Tricky]] = {**PROJECTIONS, **CORES, **CACHES, **NESTED}


def merged_partly() -> onnx.ModelProto:
    """Two blocks with three projections, and two with one."""
    block = """
        q{0} = MatMul ({1}, wq{0}) k{0} = MatMul ({1}, wk{0}) v{0} = MatMul ({1}, wv{0})"""
    joined = """
        j{0} = MatMul ({1}, w{0}) q{0}, k{0}, v{0} = Split <axis = -1, num_outputs = 3> (j{0})"""
    rest = """
        kt{0} = Transpose <perm = [0, 2, 1]> (k{0}) s{0} = MatMul (q{0}, kt{0}) p{0} = Softmax <axis = -1> (s{0})
        {2} = MatMul (p{0}, v{0})"""
    body, weights = [], []
    for at, source, result in ((0, "x", "h0"), (1, "h0", "h1"), (2, "h1", "h2"), (3, "h2", "y")):
        body.append(((block if at % 2 else joined) + rest).format(at, source, result))
        weights += [f"float[32, 32] w{role}{at}" for role in "qkv"] if at % 2 else [f"float[32, 96] w{at}"]
    return drawn(f"g (float[2, 8, 32] x) => (float[2, 8, 32] y) <{', '.join(weights)}> {{ {' '.join(body)} }}")


MERGED_PARTLY = merged_partly
