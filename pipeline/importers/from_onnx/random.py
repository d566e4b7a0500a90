"""Ops that draw numbers. Each gets a fixed seed: that of the node, or a hash of the name of its output."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from pipeline.importers.from_onnx.moves import EXPAND
from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.ir.graph import Attr, TensorSpec


def normal(node: Node) -> None:
    """RandomNormal and RandomNormalLike: of their input only shape and dtype count, and both are known."""
    draw(node, "random_normal", mean=node.attributes.number("mean"), scale=node.attributes.number("scale", 1.0))


def uniform(node: Node) -> None:
    draw(node, "random_uniform", low=node.attributes.number("low"), high=node.attributes.number("high", 1.0))


def draw(node: Node, operator: str, **numbers: float) -> None:
    node.attributes.settle("shape", "dtype")
    node.settle_inputs(0)
    out = node.output()
    attrs: dict[str, Attr] = {"size": out.sizes, **numbers, "dtype": out.dtype, "seed": seed_of(node)}
    node.emit(f"onnxline.{operator}.default", [], attrs)


def bernoulli(node: Node) -> None:
    node.attributes.settle("dtype")
    node.emit("onnxline.bernoulli.default", node.operands(), {"dtype": node.output().dtype, "seed": seed_of(node)})


def multinomial(node: Node) -> None:
    node.attributes.settle("dtype", "sample_size")
    out = node.output()
    attrs: dict[str, Attr] = {"count": out.sizes[1], "dtype": out.dtype, "seed": seed_of(node)}
    node.emit("onnxline.multinomial.default", node.operands(), attrs)


def dropout(node: Node) -> None:
    """In training mode it draws; else its output is another name of input 0, and its mask is all true."""
    training = node.has(2) and bool(node.need_constant(2, "training_mode").item())
    if training:
        drawn_dropout(node)
        return
    node.attributes.settle("ratio", "seed")  # of training alone
    node.settle_inputs(1)
    node.alias(node.operand(0))
    if node.is_read(1):
        mask = node.output(1)  # a number in old opsets
        one = node.constant_operand(np.ones((), mask.dtype))
        node.make(EXPAND, [one], [(node.output_names[1], mask)], {"size": mask.sizes})


def drawn_dropout(node: Node) -> None:
    """Result and mask are both outputs of the op, whichever is read."""
    ratio = float(node.need_constant(1, "the ratio").item()) if node.has(1) else 0.5
    if not 0 <= ratio < 1:
        raise node.refusal(f"its ratio is {ratio}, expected 0 ≤ ratio < 1")
    spec = node.spec(0)
    first, mask = (*node.output_names, "", "")[:2]
    outputs = [
        (first or node.fresh(f"{mask}.kept"), spec),
        (mask or node.fresh(f"{first}.mask"), TensorSpec(spec.shape, "bool")),
    ]
    attrs: dict[str, Attr] = {"ratio": ratio, "seed": seed_of(node)}
    node.make("onnxline.dropout.default", node.operands(0), outputs, attrs)


def seed_of(node: Node) -> int:
    """The bits of `seed`, since 0.1 and 0.2 are two seeds; without one, a hash of the output's name."""
    read = node.attributes
    if "seed" not in read:
        return zlib.crc32(next(filter(None, node.output_names)).encode())
    if node.kind == "Dropout":
        return read.integer("seed")
    return int.from_bytes(struct.pack("<f", read.number("seed")), "little")


IMPORTERS: dict[str, Importer] = {
    "Bernoulli": bernoulli,
    "Dropout": dropout,
    "Multinomial": multinomial,
    "RandomNormal": normal,
    "RandomNormalLike": normal,
    "RandomUniform": uniform,
    "RandomUniformLike": uniform,
}
