"""Operators before opset 7, spelled as opset 7 spells them.

Until then an operand was stretched to another by the attributes `broadcast` and `axis`, not by numpy's rules, and some
operators had attributes of training. What the attribute says is said by a Reshape, or by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.errors import Unsupported
from pipeline.importers.from_onnx.inline import Fresh, PendingNode
from pipeline.ir.graph import TensorSpec

OLDEST_WITH_BROADCASTING = 7

Specs = Mapping[str, TensorSpec]
Adapter = Callable[[onnx.NodeProto, Specs, Fresh], list[onnx.NodeProto]]


def modern_nodes(node: PendingNode, specs: Specs, fresh: Fresh) -> list[PendingNode] | None:
    """The nodes of opset 7 that mean what `node` means in its opset; None where its opset is 7 or later.

    Raises:
        Unsupported: an attribute that opset 7 has no words for.
    """
    opset = node.opsets.get("", OLDEST_WITH_BROADCASTING)
    if opset >= OLDEST_WITH_BROADCASTING:
        return None
    copy = onnx.NodeProto()
    copy.CopyFrom(node.proto)
    drop_attributes(copy, "consumed_inputs")  # a hint about memory
    adapt = ADAPTERS.get(copy.op_type) if node.proto.domain in ("", "ai.onnx") else None
    nodes = adapt(copy, specs, fresh) if adapt else [copy]
    opsets = {**node.opsets, "": OLDEST_WITH_BROADCASTING}
    return [PendingNode(proto, opsets) for proto in nodes]


def broadcast(node: onnx.NodeProto, specs: Specs, fresh: Fresh) -> list[onnx.NodeProto]:
    """Operand 1 is laid along operand 0 from `axis` on, or along its last axes."""
    found = {attribute.name: attribute.i for attribute in node.attribute}
    drop_attributes(node, "broadcast", "axis")
    axis = found.get("axis")
    if not found.get("broadcast") or axis is None or any(name not in specs for name in node.input):
        return [node]
    rank, inner = specs[node.input[0]].rank, specs[node.input[1]]
    trailing = rank - axis % max(rank, 1) - inner.rank
    return [node] if trailing <= 0 else reshape_operand(node, (*inner.sizes, *(1,) * trailing), fresh)


def per_channel(node: onnx.NodeProto, specs: Specs, fresh: Fresh) -> list[onnx.NodeProto]:
    """The slopes of a PRelu lie along axis 1."""
    if any(name not in specs for name in node.input):
        return [node]
    rank, slope = specs[node.input[0]].rank, specs[node.input[1]]
    if slope.rank != 1 or slope.numel == 1 or rank <= 2:
        return [node]
    return reshape_operand(node, (*slope.sizes, *(1,) * (rank - 2)), fresh)


def reshape_operand(node: onnx.NodeProto, shape: tuple[int, ...], fresh: Fresh) -> list[onnx.NodeProto]:
    """`node` with input 1 in this shape."""
    label, sizes = fresh(f"{node.output[0]}.shape"), np.array(shape, np.int64)
    reshaped = fresh(f"{node.output[0]}.operand")
    before = [
        helper.make_node("Constant", [], [label], value=numpy_helper.from_array(sizes)),
        helper.make_node("Reshape", [node.input[1], label], [reshaped], name=node.name),
    ]
    node.input[1] = reshaped
    return [*before, node]


def inference_only(node: onnx.NodeProto, _specs: Specs, _fresh: Fresh) -> list[onnx.NodeProto]:
    """`is_test` says that nothing is trained. Without it these operators would train, which is refused."""
    is_test = any(attribute.name == "is_test" and attribute.i for attribute in node.attribute)
    drop_attributes(node, "is_test")
    if not is_test and (node.op_type == "Dropout" or len(node.output) > 1):
        raise Unsupported(
            f"node {node.name or node.output[0]!r} ({node.op_type}) is in training mode before opset 7, expected "
            "is_test = 1; export the model after model.eval()"
        )
    return [node]


def without_broadcast(node: onnx.NodeProto, _specs: Specs, _fresh: Fresh) -> list[onnx.NodeProto]:
    drop_attributes(node, "broadcast")
    return [node]


def cast(node: onnx.NodeProto, _specs: Specs, _fresh: Fresh) -> list[onnx.NodeProto]:
    """Up to opset 5 the type was a word."""
    for attribute in node.attribute:
        if attribute.name == "to" and attribute.type == onnx.AttributeProto.STRING:
            target = TensorProto.DataType.Value(attribute.s.decode())
            attribute.CopyFrom(helper.make_attribute("to", target))
    return [node]


def default_axis(axis: int) -> Adapter:
    def adapt(node: onnx.NodeProto, _specs: Specs, _fresh: Fresh) -> list[onnx.NodeProto]:
        if all(attribute.name != "axis" for attribute in node.attribute):
            node.attribute.append(helper.make_attribute("axis", axis))
        return [node]

    return adapt


def rename_attribute(old: str, new: str) -> Adapter:
    def adapt(node: onnx.NodeProto, _specs: Specs, _fresh: Fresh) -> list[onnx.NodeProto]:
        for attribute in node.attribute:
            if attribute.name == old:
                attribute.name = new
        return [node]

    return adapt


def drop_attributes(node: onnx.NodeProto, *names: str) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name not in names]
    if len(kept) != len(node.attribute):
        copies = [onnx.AttributeProto.FromString(attribute.SerializeToString()) for attribute in kept]
        del node.attribute[:]
        node.attribute.extend(copies)


ADAPTERS: dict[str, Adapter] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"), broadcast),
    "BatchNormalization": inference_only,
    "Cast": cast,
    "Concat": default_axis(1),
    "Dropout": inference_only,
    "Gemm": without_broadcast,
    "PRelu": per_channel,
    "Pad": rename_attribute("paddings", "pads"),
}
