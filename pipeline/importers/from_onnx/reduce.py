"""Reductions, scans, normalisations and softmaxes. Axes are explicit, ascending, and count from the front."""

from __future__ import annotations

import math

import numpy as np

from pipeline.importers.from_onnx.node import Importer, Node, direct, read_number
from pipeline.ir.graph import Attr, InputRef, TensorSpec, TorchConst

EPSILON = read_number("epsilon", 1e-5)


def reduction(node: Node) -> None:
    axes = node.integers(1, "axes")
    if reduces_nothing(node, axes):
        node.alias(node.operand(0))
        return
    if node.kind in ("ReduceMax", "ReduceMin") and 0 in node.spec(0).sizes:
        extreme_of_nothing(node)
        return
    node.emit(node.kind, node.operands(0), reduction_attrs(node, axes))


def extreme_of_nothing(node: Node) -> None:
    """The largest of no elements is the least number of the type, and the other way round."""
    node.attributes.settle("axes", "keepdims")
    out = node.output()
    if out.dtype == "bool":
        least, most = np.array(False), np.array(True)
    elif "float" in out.dtype:
        least, most = (np.array(number, out.dtype) for number in (-np.inf, np.inf))
    else:
        bounds = np.iinfo(out.dtype)
        least, most = np.array(bounds.min, out.dtype), np.array(bounds.max, out.dtype)
    vid = node.constant_operand(least if node.kind == "ReduceMax" else most)
    node.settle_inputs(0)
    node.emit("Expand", [vid], {"shape": out.sizes})


def reduces_nothing(node: Node, axes: tuple[int, ...] | None) -> bool:
    """Whether each element is reduced alone: no axes mean none here, and else all."""
    nothing = node.attributes.flag("noop_with_empty_axes") and not axes
    if nothing:
        node.attributes.settle("keepdims")
    return nothing


def sum_of(kind: str, after: str = "") -> Importer:
    """An importer for `after`(ReduceSum(`kind`(x))): "Mul" multiplies x by itself, "" is no op."""

    def importer(node: Node) -> None:
        axes = node.integers(1, "axes")
        vid = node.operand(0)
        if reduces_nothing(node, axes):
            steps = [step for step in (kind, after) if step]
            node.emit(steps[0], [vid, vid] if kind == "Mul" else [vid])
            return
        if kind:
            vid = node.step(kind, [vid, vid] if kind == "Mul" else [vid], node.spec(0))
        attrs = reduction_attrs(node, axes)
        if after:
            node.emit(after, [node.step("ReduceSum", [vid], node.output(), attrs)])
        else:
            node.emit("ReduceSum", [vid], attrs)

    return importer


def euclidean_norm(node: Node) -> None:
    axes = node.integers(1, "axes")
    if reduces_nothing(node, axes):
        node.emit("Abs", node.operands(0))
        return
    node.emit(node.kind, node.operands(0), reduction_attrs(node, axes))


def log_sum_exp(node: Node) -> None:
    if "float" not in node.spec(0).dtype:
        raise node.refusal(f"it is of {node.spec(0).dtype}, expected floating point")
    axes = node.integers(1, "axes")
    if reduces_nothing(node, axes):
        node.alias(node.operand(0))
        return
    node.emit(node.kind, node.operands(0), reduction_attrs(node, axes))


def reduction_attrs(node: Node, axes: tuple[int, ...] | None) -> dict[str, Attr]:
    rank = node.spec(0).rank
    every = tuple(sorted(axis % rank for axis in axes)) if axes else tuple(range(rank))
    return {"axes": every, "keepdims": node.attributes.flag("keepdims", True)}


def arg_reduction(node: Node) -> None:
    """The last of equal elements is the first from behind."""
    axis, spec, keepdims = node.axis(0), node.spec(0), node.attributes.flag("keepdims", True)
    if not node.attributes.flag("select_last_index"):
        node.emit(node.kind, node.operands(0), {"axis": axis, "keepdims": keepdims})
        return
    size = spec.sizes[axis]
    backwards: dict[str, Attr] = {"starts": (size - 1,), "ends": (-size - 1,), "axes": (axis,), "steps": (-1,)}
    flipped = node.step("Slice", node.operands(0), spec, backwards)
    place = node.step(node.kind, [flipped], node.output(), {"axis": axis, "keepdims": keepdims})
    node.emit("Sub", [node.constant_operand(np.array(size - 1)), place])


def hardmax(node: Node) -> None:
    """1 at the first largest element, and 0 elsewhere; before opset 13 all axes from `axis` on are one."""
    spec, axis = node.spec(0), node.axis(-1 if node.opset >= 13 else 1)
    flat, operand = spec, node.operand(0)
    if node.opset < 13:
        flat = TensorSpec((math.prod(spec.sizes[:axis]), math.prod(spec.sizes[axis:])), spec.dtype)
        operand, axis = node.step("Reshape", [operand], flat, {"shape": flat.sizes}), 1
    row = TensorSpec((*flat.sizes[:axis], 1, *flat.sizes[axis + 1 :]), "int64")
    place = node.step("ArgMax", [operand], row, {"axis": axis, "keepdims": True})
    places = np.arange(flat.sizes[axis]).reshape([-1 if at == axis else 1 for at in range(flat.rank)])
    chosen = node.step("Equal", [place, node.constant_operand(places)], TensorSpec(flat.shape, "bool"))
    if node.opset >= 13:
        node.emit("Cast", [chosen], {"to": spec.dtype})
        return
    numbers = node.step("Cast", [chosen], flat, {"to": spec.dtype})
    node.emit("Reshape", [numbers], {"shape": spec.sizes})


def cumulative_product(node: Node) -> None:
    """`exclusive` leaves the element itself out; `reverse` multiplies from the end."""
    axis, spec, vid = int(node.need_constant(1, "the axis").item()) % node.spec(0).rank, node.spec(0), node.operand(0)
    size, reverse = spec.sizes[axis], node.attributes.flag("reverse")
    backwards: dict[str, Attr] = {"starts": (size - 1,), "ends": (-size - 1,), "axes": (axis,), "steps": (-1,)}
    if reverse:
        vid = node.step("Slice", [vid], spec, backwards)
    if node.attributes.flag("exclusive"):
        pads = [0] * (2 * spec.rank)
        pads[axis], pads[spec.rank + axis] = 1, -1
        one = 1.0 if "float" in spec.dtype else 1
        vid = node.step("Pad", [vid], spec, {"pads": tuple(pads), "mode": "constant", "value": one})
    call: dict[str, Attr] = {"self": InputRef(0), "dim": axis, "dtype": TorchConst("dtype", spec.dtype)}
    if not reverse:
        node.emit("aten.cumprod.default", [vid], call)
        return
    vid = node.step("aten.cumprod.default", [vid], spec, call)
    node.emit("Slice", [vid], backwards)


def cumulative_sum(node: Node) -> None:
    axis = int(node.need_constant(1, "the axis").item()) % node.spec(0).rank
    read = node.attributes
    attrs: dict[str, Attr] = {"axis": axis, "exclusive": read.flag("exclusive"), "reverse": read.flag("reverse")}
    node.emit("CumSum", node.operands(0), attrs)


def layer_norm(node: Node) -> None:
    """LayerNormalization and RMSNormalization: over every axis from `axis` on."""
    attrs: dict[str, Attr] = {"axis": node.axis(-1), "epsilon": EPSILON(node)}
    node.emit_first(node.kind, node.operands(), attrs)


def batch_norm(node: Node) -> None:
    """The inference form: mean and variance are inputs."""
    if node.attributes.flag("training_mode"):
        raise node.refusal("it is in training mode; export the model after model.eval()")
    if not node.attributes.flag("spatial", True):
        raise node.refusal("it has spatial = 0, a mean for each element of a sample; expected one for each channel")
    node.attributes.settle("momentum")  # of training alone
    node.emit_first("BatchNormalization", node.operands(), {"epsilon": EPSILON(node)})


def group_norm(node: Node) -> None:
    """Before opset 21 scale and bias are given for each group; they are expanded to its channels."""
    x, *weights = node.operands()
    groups = node.attributes.integer("num_groups", 1)
    if node.opset < 21:
        weights = [per_channel(node, vid, groups) for vid in weights]
    node.emit("GroupNormalization", [x, *weights], {"groups": groups, "epsilon": EPSILON(node)})


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
    """Divide by the norm along one axis; where the norm is 0, the elements are 0 and stay 0."""
    order, axis, spec = node.attributes.integer("p", 2), node.axis(-1), node.spec(0)
    if order not in (1, 2):
        raise node.refusal(f"found p {order}, expected 1 or 2")
    one = TensorSpec(tuple(1 if at == axis else size for at, size in enumerate(spec.sizes)), spec.dtype)
    along: dict[str, Attr] = {"axes": (axis,), "keepdims": True}
    if order == 1:
        length = node.step("ReduceSum", [node.step("Abs", node.operands(0), spec)], one, along)
    else:
        length = node.step("ReduceL2", node.operands(0), one, along)
    zero, unit = (node.constant_operand(np.array(number, spec.dtype)) for number in (0, 1))
    is_zero = node.step("Equal", [length, zero], TensorSpec(one.shape, "bool"))
    node.emit("Div", [node.operand(0), node.step("Where", [is_zero, unit, length], one)])


IMPORTERS: dict[str, Importer] = {
    "ArgMax": arg_reduction,
    "ArgMin": arg_reduction,
    "BatchNormalization": batch_norm,
    "CumProd": cumulative_product,
    "CumSum": cumulative_sum,
    "GroupNormalization": group_norm,
    "Hardmax": hardmax,
    "InstanceNormalization": direct(epsilon=EPSILON),
    "LayerNormalization": layer_norm,
    "LogSoftmax": softmax,
    "LpNormalization": lp_norm,
    "RMSNormalization": layer_norm,
    "ReduceL1": sum_of("Abs"),
    "ReduceL2": euclidean_norm,
    "ReduceLogSum": sum_of("", "Log"),
    "ReduceLogSumExp": log_sum_exp,
    "ReduceMax": reduction,
    "ReduceMean": reduction,
    "ReduceMin": reduction,
    "ReduceProd": reduction,
    "ReduceSum": reduction,
    "ReduceSumSquare": sum_of("Mul"),
    "Softmax": softmax,
}
