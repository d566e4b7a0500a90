"""Elementwise operators as calls of torch. Broadcasting is numpy's, and stays implicit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipeline.importers.from_onnx.moves import emit_expand
from pipeline.importers.from_onnx.node import Importer, Node, call, read_number, read_text
from pipeline.importers.from_onnx.specs import ir_dtype
from pipeline.ir.graph import InputRef, TensorSpec


def passthrough(node: Node) -> None:
    """The output is another name of input 0."""
    node.alias(node.operand(0))


def binary(operator: str, name: str, of_integers: str = "") -> Importer:
    """An importer for an operator of two tensors, with numpy's broadcasting.

    name: that of the function for unsigned integers of 16 bits and more, which torch's CPU lacks (`onnxline.unsigned`).
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


def modulo(node: Node) -> None:
    """`fmod` takes the sign of the dividend, as C does; otherwise the sign of the divisor, as Python does."""
    operator = "aten.fmod.Tensor" if node.attributes.flag("fmod") else "aten.remainder.Tensor"
    combine(node, operator, "remainder", node.operands())


def power(node: Node) -> None:
    """The result has the dtype of the base; x², x³ and other constant exponents are numbers of the call."""
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


def prelu(node: Node) -> None:
    """x where x is not negative, else slope · x."""
    x, slope = node.operands()
    spec = node.output()
    negative = node.step("aten.lt.Scalar", [x], TensorSpec(node.vid_spec(x).shape, "bool"), {"other": 0})
    node.emit("aten.where.self", [negative, node.step("aten.mul.Tensor", [x, slope], spec), x])


def sign(node: Node) -> None:
    """NaN for NaN, for which torch has 0."""
    x, spec = node.operand(0), node.spec(0)
    if "float" not in spec.dtype:
        node.emit("aten.sign.default", [x])
        return
    is_nan = node.step("aten.ne.Tensor", [x, x], TensorSpec(spec.shape, "bool"))
    node.emit("aten.where.self", [is_nan, x, node.step("aten.sign.default", [x], spec)])


def softplus(node: Node) -> None:
    node.emit("aten.softplus.default", node.operands(), {"beta": 1, "threshold": LINEAR_FROM})


def hard_sigmoid(node: Node) -> None:
    """max(0, min(1, alpha · x + beta))."""
    spec, read = node.spec(0), node.attributes
    scaled = node.step("aten.mul.Tensor", node.operands(0), spec, {"other": read.number("alpha", 0.2)})
    moved = node.step("aten.add.Tensor", [scaled], spec, {"other": read.number("beta", 0.5)})
    node.emit("aten.clamp.default", [moved], {"min": 0, "max": 1})


def swish(node: Node) -> None:
    alpha = node.attributes.number("alpha", 1.0)
    if alpha != 1.0:
        raise node.refusal(f"found alpha {alpha}, expected 1.0, which is Silu")
    node.emit("aten.silu.default", node.operands(0))


def is_nan(node: Node) -> None:
    node.emit("aten.ne.Tensor", node.operands(0, 0))


def is_infinite(node: Node) -> None:
    signs = [
        sign for sign, name in ((-1, "detect_negative"), (1, "detect_positive")) if node.attributes.flag(name, True)
    ]
    if len(signs) == 2:
        size = node.step("aten.abs.default", node.operands(0), node.spec(0))
        node.emit("aten.eq.Scalar", [size], {"other": math.inf})
    elif signs:
        node.emit("aten.eq.Scalar", node.operands(0), {"other": signs[0] * math.inf})
    else:
        node.settle_inputs(0)
        emit_expand(node, node.constant_operand(np.array(False)))


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


def bit_shift(node: Node) -> None:
    """Towards higher bits or lower ones; torch shifts no unsigned integers but bytes."""
    direction = {"LEFT": "left", "RIGHT": "right"}.get(node.attributes.text("direction"))
    if direction is None:
        raise node.refusal(f"found direction {node.attributes.text('direction')!r}, expected LEFT or RIGHT")
    dtype = node.spec(0).dtype
    wide = {"uint16": "int32", "uint32": "int64"}.get(dtype, dtype)
    if wide == "uint64":
        raise node.refusal("it shifts uint64, which torch cannot")
    operator = f"aten.bitwise_{direction}_shift.Tensor"
    if wide == dtype:
        node.emit(operator, node.operands())
        return
    widened = [node.convert(node.operand(at), wide) for at in (0, 1)]
    node.emit_conversion(node.step(operator, widened, TensorSpec(node.output().shape, wide)))


def mean(node: Node) -> None:
    """The mean of its inputs, element by element."""
    total = join_all(node, "aten.add.Tensor", "add", node.operands())
    node.emit("aten.div.Tensor", [total], {"other": len(node.input_names)})


def selu(node: Node) -> None:
    """gamma · Elu(x)."""
    read, spec = node.attributes, node.spec(0)
    alpha = read.number("alpha", 1.67326319217681884765625)
    gamma = read.number("gamma", 1.05070102214813232421875)
    curve = node.step("aten.elu.default", node.operands(0), spec, {"alpha": alpha})
    node.emit("aten.mul.Tensor", [curve], {"other": gamma})


def cast(node: Node) -> None:
    to = ir_dtype(node.attributes.integer("to"), f"the attribute `to` of node {node.name!r}")
    cast_to(node, to)


def cast_like(node: Node) -> None:
    if narrow := node.element(1):
        raise node.refusal(f"it casts to {narrow}, which the graph holds in bytes")
    cast_to(node, node.spec(1).dtype)


def cast_to(node: Node, to: str) -> None:
    """`saturate` and `round_mode` matter for float8 types only."""
    saturates = node.attributes.flag("saturate", True) or not to.startswith("float8")
    node.emit_conversion(node.operand(0), saturates=saturates)


def clip(node: Node) -> None:
    """Constant bounds become numbers of the call, unless the dtype cannot reach them; computed ones are min(max(x))."""
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


LINEAR_FROM = 50
"""log(1 + exp(x)) and x are the same float64 from here on; torch's own default of 20 is right for float32 only."""

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
    "Elu": call("aten.elu.default", alpha=read_number("alpha", 1.0)),
    "Equal": call("aten.eq.Tensor"),
    "Gelu": call("aten.gelu.default", approximate=read_text("approximate", "none")),
    "Greater": binary("aten.gt.Tensor", "gt"),
    "GreaterOrEqual": binary("aten.ge.Tensor", "ge"),
    "HardSigmoid": hard_sigmoid,
    "Identity": passthrough,
    "IsInf": is_infinite,
    "IsNaN": is_nan,
    "LeakyRelu": call("aten.leaky_relu.default", negative_slope=read_number("alpha", 0.01)),
    "Less": binary("aten.lt.Tensor", "lt"),
    "LessOrEqual": binary("aten.le.Tensor", "le"),
    "Max": chain("aten.maximum.default", "maximum"),
    "Mean": mean,
    "Min": chain("aten.minimum.default", "minimum"),
    "Mod": modulo,
    "Mul": call("aten.mul.Tensor"),
    "Not": call("aten.logical_not.default"),
    "Or": call("aten.logical_or.default"),
    "PRelu": prelu,
    "Pow": power,
    "Selu": selu,
    "Sign": sign,
    "Softplus": softplus,
    "Sub": binary("aten.sub.Tensor", "sub"),
    "Sum": chain("aten.add.Tensor", "add"),
    "Swish": swish,
    "Where": call("aten.where.self"),
    "Xor": call("aten.logical_xor.default"),
}
