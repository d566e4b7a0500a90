"""Reductions, scans, normalisations and softmaxes as calls of torch. Axes are explicit and count from the front."""

from __future__ import annotations

import math

import numpy as np

from pipeline.importers.from_onnx.definitions import aten, constant, give, term, where
from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.importers.from_onnx.shape import emit_expand, emit_reshape, expand, move, reshape, with_constant
from pipeline.ir.graph import Attr, TensorSpec, TorchConst


def reduction(
    operator: str, before: str = "", after: str = "", alone: str = "", *, in_floats: bool = False, **given: Attr
) -> Importer:
    """An importer for `after`(`operator`(`before`(x))) along axes; "" is no op, and `SQUARE` multiplies x by itself.

    Args:
        alone: what is done to each element where nothing is reduced.
        in_floats: the operator takes no integers, which pass through float64.
        given: further arguments of the operator.
    """

    def importer(node: Node) -> None:
        axes, vid, spec, out = node.integers(1, "axes"), node.operand(0), node.spec(0), node.output()
        nothing = reduces_nothing(node, axes)
        if not nothing and operator in EXTREMES and 0 in spec.sizes:
            extreme_of_nothing(node, operator)
            return
        is_wide = in_floats and bool(after or not nothing) and "float" not in spec.dtype
        if is_wide:
            vid, out = node.convert(vid, "float64"), TensorSpec(out.shape, "float64")
        reduces = (alone, spec, {}) if nothing else (operator, out, {**given, **along(node, operator, axes, out.dtype)})
        calls = [call for call in ((before, spec, {}), reduces, (after, out, {})) if call[0]]
        for place, (kind, made, arguments) in enumerate(calls, 1):
            operands = [vid, vid] if kind == SQUARE else [vid]
            if place == len(calls) and not is_wide:
                node.emit(kind, operands, arguments)
                return
            vid = node.step(kind, operands, made, arguments)
        node.emit_conversion(vid) if is_wide else node.alias(vid)

    return importer


def extreme_of_nothing(node: Node, operator: str) -> None:
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
    vid = node.constant_operand(least if operator == "aten.amax.default" else most)
    node.settle_inputs(0)
    emit_expand(node, vid)


def reduces_nothing(node: Node, axes: tuple[int, ...] | None) -> bool:
    """Whether each element is reduced alone: no axes mean none here, and else all."""
    nothing = node.attributes.flag("noop_with_empty_axes") and not axes
    if nothing:
        node.attributes.settle("keepdims")
    return nothing


def product(node: Node) -> None:
    """Torch multiplies along one axis at a time."""
    axes = node.integers(1, "axes")
    vid, spec = node.operand(0), node.spec(0)
    if reduces_nothing(node, axes) or not spec.rank:
        node.attributes.settle("keepdims")
        node.alias(vid)
        return
    every = every_axis(node, axes)
    node.attributes.settle("keepdims")  # the shape of the output is known
    sizes = list(spec.sizes)
    for axis in every:
        sizes[axis] = 1
        call: dict[str, Attr] = {"dim": axis, "keepdim": True, "dtype": TorchConst("dtype", spec.dtype)}
        vid = node.step("aten.prod.dim_int", [vid], TensorSpec(tuple(sizes), spec.dtype), call)
    emit_reshape(node, vid)


def log_sum_exp(node: Node) -> None:
    if "float" not in node.spec(0).dtype:
        raise node.refusal(f"it is of {node.spec(0).dtype}, expected floating point")
    reduction("aten.logsumexp.default")(node)


def along(node: Node, operator: str, axes: tuple[int, ...] | None, dtype: str) -> dict[str, Attr]:
    """The axes of a reduction, and whether they stay, as arguments of torch, which sums small integers in int64."""
    call: dict[str, Attr] = {"dim": every_axis(node, axes), "keepdim": node.attributes.flag("keepdims", True)}
    return {**call, "dtype": TorchConst("dtype", dtype)} if operator == SUM and "float" not in dtype else call


def every_axis(node: Node, axes: tuple[int, ...] | None) -> tuple[int, ...]:
    """The axes counted from the front, ascending; all where none are given."""
    rank = node.spec(0).rank
    return tuple(sorted(axis % rank for axis in axes)) if axes else tuple(range(rank))


def arg_reduction(operator: str) -> Importer:
    """An importer for the index of an extreme. select_last_index: flip the axis, take the first extreme, and mirror its
    index."""

    def importer(node: Node, *, keepdims: bool = True, select_last_index: bool = False) -> None:
        axis, spec = node.axis(0), node.spec(0)
        call: dict[str, Attr] = {"dim": axis, "keepdim": keepdims}
        if not select_last_index:
            node.emit(operator, node.operands(0), call)
            return
        flipped = node.step("aten.flip.default", node.operands(0), spec, {"dims": (axis,)})
        place = node.step(operator, [flipped], node.output(), call)
        node.emit("aten.sub.Tensor", [node.constant_operand(np.array(spec.sizes[axis] - 1)), place])

    return importer


def hardmax(node: Node) -> None:
    """1 at the first largest element, and 0 elsewhere; before opset 13 `axis` and all later axes are one."""
    spec, axis = node.spec(0), node.axis(-1 if node.opset >= 13 else 1)
    flat, operand = spec, node.operand(0)
    if node.opset < 13:
        flat = TensorSpec((math.prod(spec.sizes[:axis]), math.prod(spec.sizes[axis:])), spec.dtype)
        operand, axis = reshape(node, operand, flat.sizes), 1
    row = TensorSpec((*flat.sizes[:axis], 1, *flat.sizes[axis + 1 :]), "int64")
    place = node.step("aten.argmax.default", [operand], row, {"dim": axis, "keepdim": True})
    places = np.arange(flat.sizes[axis]).reshape([-1 if at == axis else 1 for at in range(flat.rank)])
    chosen = node.step("aten.eq.Tensor", [place, node.constant_operand(places)], TensorSpec(flat.shape, "bool"))
    if node.opset >= 13:
        node.emit_conversion(chosen)
        return
    emit_reshape(node, node.convert(chosen, spec.dtype))


def cumulate(operator: str, first: int) -> Importer:
    """An importer for a running sum or product, which begins with `first` where the element itself is left out."""

    def importer(node: Node, *, exclusive: bool = False, reverse: bool = False) -> None:
        """`exclusive` leaves the element itself out; `reverse` begins at the end."""
        spec, vid = node.spec(0), node.operand(0)
        axis = int(node.need_constant(1, "the axis").item()) % spec.rank
        flip = {"dims": (axis,)}
        if reverse:
            vid = node.step("aten.flip.default", [vid], spec, flip)
        if exclusive and spec.sizes[axis]:
            pads = [0] * (2 * spec.rank)
            pads[axis], pads[spec.rank + axis] = 1, -1
            filler = float(first) if "float" in spec.dtype else first
            vid = move(node, vid, with_constant(spec.sizes, pads, filler))
        call: dict[str, Attr] = {"dim": axis, "dtype": TorchConst("dtype", spec.dtype)}
        if not reverse:
            node.emit(operator, [vid], call)
            return
        node.emit("aten.flip.default", [node.step(operator, [vid], spec, call)], flip)

    return importer


def layer_norm(node: Node, *, epsilon: float = 1e-5) -> None:
    """LayerNormalization and RMSNormalization: over `axis` and all later axes."""
    x, *weights = node.operands()
    over = node.spec(0).sizes[node.axis(-1) :]
    for at, vid in enumerate(weights):
        if node.vid_spec(vid).shape != over:
            weights[at] = expand(node, vid, over)
    operator = "aten.layer_norm.default" if node.kind == "LayerNormalization" else "aten.rms_norm.default"
    node.emit_first(operator, [x, *weights], {"normalized_shape": over, "eps": epsilon})


def batch_norm(node: Node, *, epsilon: float = 1e-5, training_mode: bool = False, spatial: bool = True) -> None:
    """The inference form: mean and variance are inputs."""
    if training_mode:
        raise node.refusal("it is in training mode; export the model after model.eval()")
    if not spatial:
        raise node.refusal("it has spatial = 0, a mean for each element of a sample; expected one for each channel")
    node.attributes.settle("momentum")  # of training alone
    stored: dict[str, Attr] = {"training": False, "momentum": 0.0, "eps": epsilon, "cudnn_enabled": False}
    node.emit_first("aten.batch_norm.default", node.operands(), stored)


def instance_norm(node: Node, *, epsilon: float = 1e-5) -> None:
    """One group for each channel; torch's own instance_norm refuses a single element in space."""
    channels = node.spec(0).sizes[1]
    node.emit("aten.group_norm.default", node.operands(), {"num_groups": channels, "eps": epsilon})


def group_norm(node: Node, *, epsilon: float = 1e-5, num_groups: int = 1) -> None:
    """Before opset 21 scale and bias are given for each group; they are expanded to its channels."""
    x, *weights = node.operands()
    if node.opset < 21:
        weights = [per_channel(node, vid, num_groups) for vid in weights]
    node.emit("aten.group_norm.default", [x, *weights], {"num_groups": num_groups, "eps": epsilon})


def per_channel(node: Node, vid: int, groups: int) -> int:
    channels = node.spec(0).sizes[1]
    table = expand(node, reshape(node, vid, (groups, 1)), (groups, channels // groups))
    return reshape(node, table, (channels,))


def softmax(operator: str) -> Importer:
    """An importer of a softmax. Before opset 13 `axis`, which is 1 by default, and all later axes are one axis."""

    def importer(node: Node) -> None:
        if node.opset >= 13:
            node.emit(operator, node.operands(0), {"dim": node.axis(-1)})
            return
        spec, axis = node.spec(0), node.axis(1)
        if axis == spec.rank - 1:
            node.emit(operator, node.operands(0), {"dim": axis})
            return
        flat = TensorSpec((math.prod(spec.sizes[:axis]), math.prod(spec.sizes[axis:])), spec.dtype)
        vid = node.step(operator, [reshape(node, node.operand(0), flat.sizes)], flat, {"dim": 1})
        emit_reshape(node, vid)

    return importer


def lp_norm(node: Node, *, p: int = 2) -> None:
    """Divide by the norm along one axis; where the norm is 0, the elements are 0 and stay 0."""
    axis, spec = node.axis(-1), node.spec(0)
    if p not in (1, 2):
        raise node.refusal(f"found p {p}, expected 1 or 2")
    reduced = TensorSpec(tuple(1 if at == axis else size for at, size in enumerate(spec.sizes)), spec.dtype)
    call: dict[str, Attr] = {"ord": p, "dim": (axis,), "keepdim": True}
    length = term(node, node.step(NORM, node.operands(0), reduced, call))
    zero, unit = (constant(node, number, length) for number in (0, 1))
    give(node, term(node, node.operand(0)) / where(aten("eq.Tensor", length, zero), unit, length))


SQUARE, SUM, NORM = "aten.mul.Tensor", "aten.sum.dim_IntList", "aten.linalg_vector_norm.default"

EXTREMES = ("aten.amax.default", "aten.amin.default")

IMPORTERS: dict[str, Importer] = {
    "ArgMax": arg_reduction("aten.argmax.default"),
    "ArgMin": arg_reduction("aten.argmin.default"),
    "BatchNormalization": batch_norm,
    "CumProd": cumulate("aten.cumprod.default", 1),
    "CumSum": cumulate("aten.cumsum.default", 0),
    "GroupNormalization": group_norm,
    "Hardmax": hardmax,
    "InstanceNormalization": instance_norm,
    "LayerNormalization": layer_norm,
    "LogSoftmax": softmax("aten.log_softmax.int"),
    "LpNormalization": lp_norm,
    "RMSNormalization": layer_norm,
    "ReduceL1": reduction(SUM, before="aten.abs.default"),
    "ReduceL2": reduction(NORM, alone="aten.abs.default", in_floats=True, ord=2),
    "ReduceLogSum": reduction(SUM, after="aten.log.default", in_floats=True),
    "ReduceLogSumExp": log_sum_exp,
    "ReduceMax": reduction("aten.amax.default"),
    "ReduceMean": reduction("aten.mean.dim", in_floats=True),
    "ReduceMin": reduction("aten.amin.default"),
    "ReduceProd": product,
    "ReduceSum": reduction(SUM),
    "ReduceSumSquare": reduction(SUM, before=SQUARE),
    "Softmax": softmax("aten.softmax.int"),
}
