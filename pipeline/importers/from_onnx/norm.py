"""Normalisations and softmaxes. Axes count from the front."""

from __future__ import annotations

import math

import numpy as np

from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.ir.graph import Attr
from pipeline.ir.spec import TensorSpec

__all__ = ["IMPORTERS"]


def layer_norm(node: Node) -> None:
    """LayerNormalization and RMSNormalization: over every axis from `axis` on."""
    attrs: dict[str, Attr] = {"axis": node.axis(-1), "epsilon": epsilon(node)}
    node.emit_first(node.kind, node.operands(), attrs)


def batch_norm(node: Node) -> None:
    """The inference form: mean and variance are inputs."""
    if node.attributes.flag("training_mode"):
        raise node.refusal("it is in training mode; export the model after model.eval()")
    node.attributes.settle("momentum")  # of training alone
    node.emit_first("BatchNormalization", node.operands(), {"epsilon": epsilon(node)})


def instance_norm(node: Node) -> None:
    node.emit("InstanceNormalization", node.operands(), {"epsilon": epsilon(node)})


def group_norm(node: Node) -> None:
    """Before opset 21 scale and bias are given for each group; they are spread over its channels."""
    x, *weights = node.operands()
    groups = node.attributes.integer("num_groups", 1)
    if node.opset < 21:
        weights = [per_channel(node, vid, groups) for vid in weights]
    node.emit("GroupNormalization", [x, *weights], {"groups": groups, "epsilon": epsilon(node)})


def per_channel(node: Node, vid: int, groups: int) -> int:
    channels, dtype = node.spec(0).sizes[1], node.vid_spec(vid).dtype
    column, table = (groups, 1), (groups, channels // groups)
    vid = node.step("Reshape", [vid], TensorSpec(column, dtype), {"shape": column})
    vid = node.step("Expand", [vid], TensorSpec(table, dtype), {"shape": table})
    return node.step("Reshape", [vid], TensorSpec((channels,), dtype), {"shape": (channels,)})


def softmax(node: Node) -> None:
    """Before opset 13 everything from `axis` on is one axis, 1 unless it is given."""
    if node.opset >= 13:
        node.emit(node.kind, node.operands(0), {"axis": node.axis(-1)})
        return
    spec, axis = node.spec(0), node.axis(1)
    if axis == spec.rank - 1:
        node.emit(node.kind, node.operands(0), {"axis": axis})
        return
    flat = TensorSpec((math.prod(spec.sizes[:axis]), math.prod(spec.sizes[axis:])), spec.dtype)
    vid = node.step("Reshape", node.operands(0), flat, {"shape": flat.sizes})
    vid = node.step(node.kind, [vid], flat, {"axis": 1})
    node.emit("Reshape", [vid], {"shape": spec.sizes})


def lp_norm(node: Node) -> None:
    """Everything by its norm along one axis; where that is 0, what it is of is 0 and stays so."""
    order, axis, spec = node.attributes.integer("p", 2), node.axis(-1), node.spec(0)
    if order not in (1, 2):
        raise node.refusal(f"found p {order}, expected 1 or 2")
    one = TensorSpec(tuple(1 if at == axis else size for at, size in enumerate(spec.sizes)), spec.dtype)
    reduced: dict[str, Attr] = {"axes": (axis,), "keepdims": True}
    if order == 1:
        norm = node.step("ReduceSum", [node.step("Abs", node.operands(0), spec)], one, reduced)
    else:
        norm = node.step("ReduceL2", node.operands(0), one, reduced)
    zero, unit = (node.constant_operand(np.array(number, spec.dtype)) for number in (0, 1))
    is_zero = node.step("Equal", [norm, zero], TensorSpec(one.shape, "bool"))
    node.emit("Div", [node.operand(0), node.step("Where", [is_zero, unit, norm], one)])


def epsilon(node: Node) -> float:
    return node.attributes.number("epsilon", 1e-5)


IMPORTERS: dict[str, Importer] = {
    "BatchNormalization": batch_norm,
    "GroupNormalization": group_norm,
    "InstanceNormalization": instance_norm,
    "LayerNormalization": layer_norm,
    "LogSoftmax": softmax,
    "LpNormalization": lp_norm,
    "RMSNormalization": layer_norm,
    "Softmax": softmax,
}
