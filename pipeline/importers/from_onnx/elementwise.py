"""Elementwise operators and matrix products as calls of torch. Broadcasting is numpy's, and stays implicit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipeline.importers.from_onnx.definitions import aten, compute, constant, define, give, term, where
from pipeline.importers.from_onnx.node import Importer, Node, call
from pipeline.importers.from_onnx.shape import emit_expand
from pipeline.importers.from_onnx.source import ir_dtype
from pipeline.ir.graph import Attr, InputRef, TensorSpec


def binary(operator: str, name: str, of_integers: str = "") -> Importer:
    """An importer for an operator of two tensors, with numpy's broadcasting.

    Args:
        operator: the name of torch's operator.
        name: the function of `onnxline.unsigned`, which computes unsigned integers of 16 bits and more where torch's
            CPU does not.
        of_integers: how the operator rounds a quotient of integers.
    """

    def importer(node: Node) -> None:
        combine(node, operator, name, node.operands(), of_integers)

    return importer


def combine(node: Node, operator: str, name: str, operands: Sequence[int], of_integers: str = "") -> None:
    """Add the op of two operands that makes the node's output."""
    dtype = node.vid_spec(operands[0]).dtype
    if dtype in UNSIGNED:
        node.emit("onnxline.unsigned.default", operands, {"function": name})
    elif of_integers and "float" not in dtype:
        node.emit("aten.div.Tensor_mode", operands, {"rounding_mode": of_integers})
    else:
        node.emit(operator, operands)


def chain(operator: str, name: str) -> Importer:
    """An importer that turns an op on any number of inputs into a chain of ops on two."""

    def importer(node: Node) -> None:
        first, *rest = node.operands()
        if not rest:
            node.alias(first)
            return
        *middle, last = rest
        combine(node, operator, name, [join_all(node, operator, name, [first, *middle]), last])

    return importer


def join_all(node: Node, operator: str, name: str, operands: Sequence[int]) -> int:
    """The operands as one value, by ops on two of them."""
    first, *rest = operands
    dtype = node.output().dtype
    for vid in rest:
        spec = TensorSpec(np.broadcast_shapes(node.vid_spec(first).sizes, node.vid_spec(vid).sizes), dtype)
        if dtype in UNSIGNED:
            first = node.step("onnxline.unsigned.default", [first, vid], spec, {"function": name})
        else:
            first = node.step(operator, [first, vid], spec)
    return first


def modulo(node: Node, *, fmod: bool = False) -> None:
    """`fmod` takes the sign of the dividend, as C does; otherwise the sign of the divisor, as Python does."""
    operator = "aten.fmod.Tensor" if fmod else "aten.remainder.Tensor"
    combine(node, operator, "remainder", node.operands())


def power(node: Node) -> None:
    """The result has the dtype of the base; constant exponents, as in x² and x³, are arguments of the call."""
    base, exponent = node.spec(0), node.spec(1)
    number = node.constant(1)
    if "float" in base.dtype and number is not None and number.size == 1 and number.ndim <= base.rank:
        node.emit("aten.pow.Tensor_Scalar", node.operands(0), {"exponent": float(number.item())})
    elif "float" in base.dtype or "float" not in exponent.dtype:
        node.emit("aten.pow.Tensor_Tensor", [node.operand(0), node.convert(node.operand(1), base.dtype)])
    else:
        wide = [node.convert(node.operand(at), "float64") for at in (0, 1)]
        powers = node.step("aten.pow.Tensor_Tensor", wide, TensorSpec(node.output().shape, "float64"))
        node.emit_conversion(powers)


def is_infinite(node: Node, *, detect_negative: bool = True, detect_positive: bool = True) -> None:
    signs = [sign for sign, is_asked in ((-1, detect_negative), (1, detect_positive)) if is_asked]
    if len(signs) == 2:
        give(node, aten("eq.Scalar", aten("abs", term(node, node.operand(0))), other=math.inf))
    elif signs:
        node.emit("aten.eq.Scalar", node.operands(0), {"other": signs[0] * math.inf})
    else:
        node.settle_inputs(0)
        emit_expand(node, node.constant_operand(np.array(False)))


def shrink(node: Node, *, bias: float = 0.0, lambd: float = 0.5) -> None:
    """As the operator says; ONNX's function of it rounds the bias to an integer before the sum, where x is one."""
    dtype = node.spec(0).dtype
    x = term(node, node.convert(node.operand(0), dtype if "float" in dtype else "float64"))
    small = where(aten("gt.Scalar", x, other=lambd), x - bias, constant(node, 0, x))
    shrunk = where(x < -lambd, x + bias, small)
    if x.spec.dtype == dtype:
        give(node, shrunk)
    else:
        node.emit_conversion(compute(node, shrunk))


def determinant(node: Node) -> None:
    node.emit("aten.linalg_det.default", node.operands(), {"A": InputRef(0)})


def bitwise_not(node: Node) -> None:
    """All bits flipped; torch flips no unsigned integers but bytes, so there it is an exclusive or with all bits."""
    dtype = node.spec(0).dtype
    if dtype not in UNSIGNED:
        node.emit("aten.bitwise_not.default", node.operands())
        return
    ones = node.constant_operand(np.array(np.iinfo(dtype).max, dtype))
    node.emit("aten.bitwise_xor.Tensor", [node.operand(0), ones])


def bit_shift(node: Node, *, direction: str = "") -> None:
    """Towards higher bits or lower ones; torch shifts no unsigned integers but bytes."""
    if direction not in ("LEFT", "RIGHT"):
        raise node.refusal(f"found direction {direction!r}, expected LEFT or RIGHT")
    dtype = node.spec(0).dtype
    wide = {"uint16": "int32", "uint32": "int64"}.get(dtype, dtype)
    if wide == "uint64":
        raise node.refusal("it shifts uint64, which torch cannot")
    operator = f"aten.bitwise_{direction.lower()}_shift.Tensor"
    if wide == dtype:
        node.emit(operator, node.operands())
        return
    widened = [node.convert(node.operand(at), wide) for at in (0, 1)]
    node.emit_conversion(node.step(operator, widened, TensorSpec(node.output().shape, wide)))


def mean(node: Node) -> None:
    """The mean of its inputs, element by element."""
    total = join_all(node, "aten.add.Tensor", "add", node.operands())
    node.emit("aten.div.Tensor", [total], {"other": len(node.input_names)})


def cast(node: Node, *, to: int = 0, saturate: bool = True) -> None:
    cast_to(node, ir_dtype(to, f"the attribute `to` of node {node.name!r}"), saturate)


def cast_like(node: Node, *, saturate: bool = True) -> None:
    if narrow := node.element(1):
        raise node.refusal(f"it casts to {narrow}, which the graph holds in bytes")
    cast_to(node, node.spec(1).dtype, saturate)


def cast_to(node: Node, to: str, saturate: bool) -> None:
    """`saturate` and `round_mode` matter for float8 types only."""
    node.emit_conversion(node.operand(0), saturates=saturate or not to.startswith("float8"))


def clip(node: Node) -> None:
    """Constant bounds become arguments of the call, unless the dtype cannot reach them; for computed bounds,
    min(max(x))."""
    if all(not node.has(index) or node.constant(index) is not None for index in (1, 2)):
        bounds = {"min": read_bound(node, 1, "min", -math.inf), "max": read_bound(node, 2, "max", math.inf)}
        node.emit_clamp(node.operand(0), bounds["min"], bounds["max"])
        return
    vid = node.operand(0)
    if node.has(1) and node.has(2):
        vid = node.step("aten.maximum.default", [vid, node.operand(1)], node.output())
    last = 2 if node.has(2) else 1
    node.emit("aten.minimum.default" if last == 2 else "aten.maximum.default", [vid, node.operand(last)])


def read_bound(node: Node, index: int, name: str, default: float) -> float | int:
    """A bound of Clip as an exact number: an int, or for float32 the equal double, not a shorter decimal near it."""
    array = node.constant(index)
    if array is not None:
        return array.item() if array.dtype.kind in "iu" else float(array.item())
    return float(np.float32(node.attributes.number(name))) if name in node.attributes else default


def gemm(node: Node, *, alpha: float = 1.0, beta: float = 1.0) -> None:
    """alpha · op(a) @ op(b) + beta · c, where c broadcasts to the product."""
    trans_a, trans_b = (node.attributes.flag(name) for name in ("transA", "transB"))
    alpha, beta = (fit_factor(node, factor) for factor in (alpha, beta))
    a, b, *c = node.operands()
    columns = node.output().shape[1:]
    if alpha == beta == 1 and not trans_a and trans_b and (not c or node.vid_spec(c[0]).shape == columns):
        node.emit("aten.linear.default", [a, b, *c])
        return
    a, b = (transpose_matrix(node, a) if trans_a else a), (transpose_matrix(node, b) if trans_b else b)
    if c:
        scales: dict[str, Attr] = {name: item for name, item in (("beta", beta), ("alpha", alpha)) if item != 1}
        node.emit("aten.addmm.default", [*c, a, b], scales)
    elif alpha == 1:
        node.emit("aten.mm.default", [a, b])
    else:
        product = node.step("aten.mm.default", [a, b], node.output())
        node.emit("aten.mul.Tensor", [product], {"other": alpha})


def transpose_matrix(node: Node, vid: int) -> int:
    """The transposed matrix."""
    spec = node.vid_spec(vid)
    return node.step("aten.t.default", [vid], TensorSpec(spec.shape[::-1], spec.dtype))


def fit_factor(node: Node, factor: float) -> float | int:
    """`factor` as torch takes it: an integer for matrices of integers."""
    return factor if "float" in node.output().dtype else int(factor)


def einsum(node: Node, *, equation: str = "") -> None:
    node.emit("aten.einsum.default", node.operands(), {"equation": equation.replace(" ", "")})


LINEAR_FROM = 50
"""log(1 + exp(x)) and x are the same float64 above this number; torch's own default of 20 is right for float32 only."""

SELU = (1.67326319217681884765625, 1.05070102214813232421875)
"""The standard's alpha and gamma of Selu."""

UNSIGNED = ("uint16", "uint32", "uint64")
"""Integers for which torch's CPU has little arithmetic."""

OF_ONE = """
Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor HardSwish Log Neg Reciprocal Relu Round Sigmoid Sin
Sinh Sqrt Tan Tanh
"""
"""Operators of one tensor that torch has under the same name."""

IMPORTERS: dict[str, Importer] = {
    **{kind: call(f"aten.{kind.lower()}.default") for kind in OF_ONE.split()},
    "Add": binary("aten.add.Tensor", "add"),
    "And": call("aten.logical_and.default"),
    "BitShift": bit_shift,
    "BitwiseAnd": call("aten.bitwise_and.Tensor"),
    "BitwiseNot": bitwise_not,
    "BitwiseOr": call("aten.bitwise_or.Tensor"),
    "BitwiseXor": call("aten.bitwise_xor.Tensor"),
    "Cast": cast,
    "CastLike": cast_like,
    "Clip": clip,
    "Det": determinant,
    "Div": binary("aten.div.Tensor", "div", of_integers="trunc"),
    "Einsum": einsum,
    "Elu": define(lambda x, alpha=1.0: aten("elu", x, alpha=alpha)),
    "Equal": call("aten.eq.Tensor"),
    "Gelu": define(lambda x, approximate="none": aten("gelu", x, approximate=approximate)),
    "Gemm": gemm,
    "Greater": binary("aten.gt.Tensor", "gt"),
    "GreaterOrEqual": binary("aten.ge.Tensor", "ge"),
    "HardSigmoid": define(lambda x, alpha=0.2, beta=0.5: aten("clamp", x * alpha + beta, min=0, max=1)),
    "Identity": define(lambda x: x),
    "IsInf": is_infinite,
    "IsNaN": define(lambda x: x != x),
    "LeakyRelu": define(lambda x, alpha=0.01: aten("leaky_relu", x, negative_slope=alpha)),
    "Less": binary("aten.lt.Tensor", "lt"),
    "LessOrEqual": binary("aten.le.Tensor", "le"),
    "MatMul": call("aten.matmul.default"),
    "Max": chain("aten.maximum.default", "maximum"),
    "Mean": mean,
    "Min": chain("aten.minimum.default", "minimum"),
    "Mod": modulo,
    "Mul": call("aten.mul.Tensor"),
    "Not": call("aten.logical_not.default"),
    "Or": call("aten.logical_or.default"),
    "PRelu": define(lambda x, slope: where(x < 0, x * slope, x)),
    "Pow": power,
    "Selu": define(lambda x, alpha=SELU[0], gamma=SELU[1]: aten("elu", x, alpha=alpha) * gamma),
    # NaN for NaN, for which torch has 0.
    "Shrink": shrink,
    "Sign": define(lambda x: where(x != x, x, aten("sign", x)) if x.is_float else aten("sign", x)),
    "Softplus": define(lambda x: aten("softplus", x, beta=1, threshold=LINEAR_FROM)),
    "Sub": binary("aten.sub.Tensor", "sub"),
    "Sum": chain("aten.add.Tensor", "add"),
    "Swish": define(lambda x, alpha=1.0: aten("silu", x) if alpha == 1 else x * aten("sigmoid", x * alpha)),
    "Where": call("aten.where.self"),
    "Xor": call("aten.logical_xor.default"),
}
