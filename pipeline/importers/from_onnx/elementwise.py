"""Elementwise ops. Broadcasting is numpy's, and stays implicit."""

from __future__ import annotations

import math

import numpy as np

from pipeline.importers.from_onnx.node import Importer, Node, direct, read_flag, read_number, read_text
from pipeline.importers.from_onnx.specs import ir_dtype
from pipeline.ir.graph import Attr, TensorSpec

__all__ = ["IMPORTERS"]


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
    if not (node.attributes.flag("detect_negative", True) and node.attributes.flag("detect_positive", True)):
        raise node.refusal("it looks for infinities of one sign only")
    node.emit("IsInf", node.operands(0))


def cast(node: Node) -> None:
    to = ir_dtype(node.attributes.integer("to"), f"the attribute `to` of node {node.name!r}")
    cast_to(node, to)


def cast_like(node: Node) -> None:
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

IMPORTERS: dict[str, Importer] = {
    **dict.fromkeys(PLAIN, direct()),
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
