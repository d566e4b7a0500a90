"""Elementwise ops. Broadcasting is numpy's, and stays implicit."""

from __future__ import annotations

import math

import numpy as np

from pipeline.importers.from_onnx.node import Importer, Node, direct, read_flag, read_number, read_text
from pipeline.importers.from_onnx.specs import ir_dtype
from pipeline.ir.graph import Attr, InputRef, TensorSpec


def passthrough(node: Node) -> None:
    """The output is another name of input 0."""
    node.alias(node.operand(0))


def chain_binary(kind: str) -> Importer:
    """An importer that turns an op on any number of inputs into a chain of ops on two."""

    def importer(node: Node) -> None:
        first, *rest = node.operands()
        if not rest:
            node.alias(first)
            return
        *middle, last = rest
        for vid in middle:
            shape = np.broadcast_shapes(node.vid_spec(first).sizes, node.vid_spec(vid).sizes)
            first = node.step(kind, [first, vid], TensorSpec(shape, node.output().dtype))
        node.emit(kind, [first, last])

    return importer


def swish(node: Node) -> None:
    alpha = node.attributes.number("alpha", 1.0)
    if alpha != 1.0:
        raise node.refusal(f"found alpha {alpha}, expected 1.0, which is Silu")
    node.emit("Silu", node.operands(0))


def is_infinite(node: Node) -> None:
    signs = [
        sign for sign, name in ((-1, "detect_negative"), (1, "detect_positive")) if node.attributes.flag(name, True)
    ]
    if len(signs) == 2:
        node.emit("IsInf", node.operands(0))
    elif signs:
        infinity = node.constant_operand(np.array(signs[0] * np.inf, node.spec(0).dtype))
        node.emit("Equal", [node.operand(0), infinity])
    else:
        node.settle_inputs(0)
        node.emit("Expand", [node.constant_operand(np.array(False))], {"shape": node.output().sizes})


def of_torch(operator: str) -> Importer:
    """An importer for an operator that torch has under the name `operator`, with operands in the same order."""

    def importer(node: Node) -> None:
        operands = node.operands()
        call: dict[str, Attr] = {"self": InputRef(0), **({"other": InputRef(1)} if len(operands) == 2 else {})}
        node.emit(operator, operands, call)

    return importer


def determinant(node: Node) -> None:
    node.emit("aten.linalg_det.default", node.operands(), {"A": InputRef(0)})


def bitwise_not(node: Node) -> None:
    """All bits flipped; torch flips no unsigned integers but bytes, so there it is an exclusive or with all bits."""
    dtype = node.spec(0).dtype
    if dtype not in ("uint16", "uint32", "uint64"):
        node.emit("aten.bitwise_not.default", node.operands(), {"self": InputRef(0)})
        return
    ones = node.constant_operand(np.array(np.iinfo(dtype).max, dtype))
    node.emit("aten.bitwise_xor.Tensor", [node.operand(0), ones], {"self": InputRef(0), "other": InputRef(1)})


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
    call: dict[str, Attr] = {"self": InputRef(0), "other": InputRef(1)}
    if wide == dtype:
        node.emit(operator, node.operands(), call)
        return
    widened = [
        node.step("Cast", [node.operand(at)], TensorSpec(node.spec(at).shape, wide), {"to": wide}) for at in (0, 1)
    ]
    shifted = node.step(operator, widened, TensorSpec(node.output().shape, wide), call)
    node.emit("Cast", [shifted], {"to": dtype})


def mean(node: Node) -> None:
    """The mean of its inputs, element by element."""
    first, *rest = node.operands()
    for vid in rest:
        shape = np.broadcast_shapes(node.vid_spec(first).sizes, node.vid_spec(vid).sizes)
        first = node.step("Add", [first, vid], TensorSpec(shape, node.output().dtype))
    count = node.constant_operand(np.array(1 + len(rest), node.output().dtype))
    node.emit("Div", [first, count])


def selu(node: Node) -> None:
    """gamma · Elu(x)."""
    read, spec = node.attributes, node.spec(0)
    alpha = read.number("alpha", 1.67326319217681884765625)
    gamma = node.constant_operand(np.array(read.number("gamma", 1.05070102214813232421875), spec.dtype))
    node.emit("Mul", [node.step("Elu", node.operands(0), spec, {"alpha": alpha}), gamma])


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
    node.emit("Cast" if saturates else "CastUnsaturated", node.operands(0), {"to": to})


def clip(node: Node) -> None:
    """Constant bounds become attributes; bounds that are computed make it Min(Max(x, min), max), as ONNX defines it."""
    if all(not node.has(index) or node.constant(index) is not None for index in (1, 2)):
        attrs: dict[str, Attr] = {
            "min": read_bound(node, 1, "min", -math.inf),
            "max": read_bound(node, 2, "max", math.inf),
        }
        node.emit("Clip", node.operands(0), attrs)
        return
    vid = node.operand(0)
    if node.has(1) and node.has(2):
        vid = node.step("Max", [vid, node.operand(1)], node.output())
    node.emit("Min" if node.has(2) else "Max", [vid, node.operand(2 if node.has(2) else 1)])


def read_bound(node: Node, index: int, name: str, default: float) -> float | int:
    """A bound of Clip as an exact number: an int, or for float32 the equal double, not a shorter decimal near it."""
    array = node.constant(index)
    if array is not None:
        return array.item() if array.dtype.kind in "iu" else float(array.item())
    return float(np.float32(node.attributes.number(name))) if name in node.attributes else default


PLAIN = (
    "Abs", "Add", "And", "Ceil", "Cos", "Div", "Equal", "Erf", "Exp", "Floor", "Greater", "GreaterOrEqual", "HardSwish",
    "IsNaN", "Less", "LessOrEqual", "Log", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round",
    "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Tanh", "Where", "Xor",
)  # fmt: skip

OF_TORCH = ("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh", "Tan")

IMPORTERS: dict[str, Importer] = {
    **dict.fromkeys(PLAIN, direct()),
    **{kind: of_torch(f"aten.{kind.lower()}.default") for kind in OF_TORCH},
    "BitShift": bit_shift,
    "BitwiseAnd": of_torch("aten.bitwise_and.Tensor"),
    "BitwiseNot": bitwise_not,
    "BitwiseOr": of_torch("aten.bitwise_or.Tensor"),
    "BitwiseXor": of_torch("aten.bitwise_xor.Tensor"),
    "Det": determinant,
    "Mean": mean,
    "Selu": selu,
    "Cast": cast,
    "CastLike": cast_like,
    "Clip": clip,
    "Elu": direct(alpha=read_number("alpha", 1.0)),
    "Gelu": direct(approximate=read_text("approximate", "none")),
    "HardSigmoid": direct(alpha=read_number("alpha", 0.2), beta=read_number("beta", 0.5)),
    "Identity": passthrough,
    "IsInf": is_infinite,
    "LeakyRelu": direct(alpha=read_number("alpha", 0.01)),
    "Max": chain_binary("Max"),
    "Min": chain_binary("Min"),
    "Mod": direct(fmod=read_flag("fmod")),
    "Sum": chain_binary("Add"),
    "Swish": swish,
}
