"""Projections whose weights are computed, cut out, or in integers, and what may stand after a projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx

from tests.passes.structures.tricky_model import BLOCK, Tricky, declare, model, with_constants, with_tensors

EIGHT_BIT = ", ".join(f"int8[32, 32] w{role}, float[1] s{role}" for role in "qkv")


def of_integers(model: onnx.ModelProto) -> onnx.ModelProto:
    """8-bit weights and their scales, drawn."""
    numbers = np.random.default_rng(0)
    weights = {f"w{role}": numbers.integers(-127, 127, (32, 32)).astype(np.int8) for role in "qkv"}
    scales = {f"s{role}": np.array(0.01 * (at + 1), np.float32) for at, role in enumerate("qkv")}
    return with_tensors(model, **weights, **scales)


STACKED = "float[3, 32, 32] stack"
STACK = ("stack", "stack", "stack")

PROJECTIONS: Mapping[str, Callable[[], Tricky]] = {
    "plain": lambda: Tricky(model()),
    "weight norm": lambda: Tricky(
        model(
            "n{r} = ReduceL2 <keepdims = 1> (w{r}, rows) d{r} = Div (w{r}, n{r}) m{r} = Mul (d{r}, g{r}) "
            "{r}0 = MatMul (x, m{r}) {r} = Identity ({r}0)",
            weights=declare(g="float[32]"),
            once="rows = Constant <value_ints = [0]> ()",
        )
    ),
    "weight times a vector": lambda: Tricky(
        model("m{r} = Mul (w{r}, g{r}) {r}0 = MatMul (x, m{r}) {r} = Identity ({r}0)", weights=declare(g="float[32]"))
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
            weights=declare(a="float[32, 4]", b="float[4, 32]"),
        )
    ),
    "Constant nodes": lambda: Tricky(with_constants(model())),
    "Constant nodes, transposed": lambda: Tricky(
        with_constants(model("t{r} = Transpose <perm = [1, 0]> (w{r}) {r}0 = MatMul (x, t{r}) {r} = Identity ({r}0)"))
    ),
    "DequantizeLinear": lambda: Tricky(
        of_integers(
            model(
                "m{r} = DequantizeLinear (w{r}, s{r}) {r}0 = MatMul (x, m{r}) {r} = Identity ({r}0)", weights=EIGHT_BIT
            )
        )
    ),
    "DequantizeLinear after Transpose": lambda: Tricky(
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
                f"b{role} = Constant <value_ints = [{32 * at}]> () "
                f"e{role} = Constant <value_ints = [{32 * at + 32}]> ()"
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
            once="half = Constant <value_float = 0.05> () xi = QuantizeLinear (x, half) "
            "xd = DequantizeLinear (xi, half)",
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
    "Dropout after": lambda: Tricky(model("{r}0 = MatMul (x, w{r}) {r} = Dropout ({r}0)")),
    "ReLU after": lambda: Tricky(model("{r}0 = MatMul (x, w{r}) {r} = Relu ({r}0)")),
    "tanh after": lambda: Tricky(model("{r}0 = MatMul (x, w{r}) {r} = Tanh ({r}0)")),
    "SiLU after": lambda: Tricky(model("{r}0 = MatMul (x, w{r}) g{r} = Sigmoid ({r}0) {r} = Mul ({r}0, g{r})")),
    "GELU with Erf after": lambda: Tricky(
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
