"""What an op computes: sums, activations, products, convolutions, and the values of small constants.

A reader returns None for an op that computes something else, or that has an argument which a fused kind cannot hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.ir.graph import Attr, Graph, InputRef, Op, Role
from pipeline.lowering.fusion.rewrite import Rewrite
from pipeline.ops.fused import Activation


def constant_number(graph: Graph, vid: int) -> float | int | None:
    """The value of a constant with one element; None for other values."""
    value = graph.values[vid]
    if value.role is not Role.CONST or vid not in graph.payloads or vid in graph.updates or value.spec.numel != 1:
        return None
    return graph.payloads[vid].numpy().reshape(-1)[0].item()


def take_constant_places(graph: Graph) -> Graph:
    """`select`: an index at one constant position becomes a select, which is a view."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        place = _place(graph, op)
        if place is not None:
            axis, index = place
            rewrite.replace(op, "aten.select.int", op.inputs[:1], op.outputs, {"dim": axis, "index": index})
    return rewrite.build()


def _place(graph: Graph, op: Op) -> tuple[int, int] | None:
    if op.kind != "aten.index.Tensor" or len(op.inputs) != 2 or graph.values[op.inputs[1]].spec.rank:
        return None
    index, spec = constant_number(graph, op.inputs[1]), graph.values[op.inputs[0]].spec
    indices = op.attrs["indices"]
    if type(index) is not int or not isinstance(indices, tuple) or not spec.is_static:
        return None
    axis = indices.index(InputRef(1))
    size = spec.sizes[axis]
    return (axis, index % size) if -size <= index < size else None


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """`x @ weight`, or with `trans` `x @ weight.T`, and a bias for each column."""

    x: int
    weight: int
    trans: bool
    bias: int | None = None


@dataclass(frozen=True, slots=True)
class Convolved:
    """A convolution over two dimensions."""

    x: int
    weight: int
    bias: int | None
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    """One for both sides of a dimension."""
    dilations: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True)
class Norm:
    """A batch normalisation with stored statistics: scale, bias, mean, variance."""

    x: int
    operands: tuple[int, int, int, int]
    epsilon: float


@dataclass(frozen=True, slots=True)
class Attention:
    """Torch's scaled dot product attention without mask and dropout; without a scale, it is one over the root of the
    width."""

    query: int
    key: int
    value: int
    scale: float | None


def read_attention(op: Op) -> Attention | None:
    if op.kind != "aten.scaled_dot_product_attention.default" or len(op.inputs) > 3:
        return None
    attrs = op.attrs
    if attrs.get("dropout_p") or attrs.get("is_causal") or attrs.get("enable_gqa"):
        return None
    refs = [attrs[name] for name in ("query", "key", "value")]
    query, key, value = (op.inputs[ref.index] for ref in refs if isinstance(ref, InputRef))
    scale = attrs.get("scale")
    return Attention(query, key, value, float(scale) if isinstance(scale, int | float) else None)


def read_sum(op: Op) -> tuple[int, int] | None:
    """Both operands of a sum."""
    if op.kind == "aten.add.Tensor" and len(op.inputs) == 2 and op.attrs.get("alpha", 1) == 1:
        return op.inputs[0], op.inputs[1]
    return None


def read_activation(op: Op) -> Activation | None:
    name = WORDS.get(op.kind)
    if name is not None:
        return Activation(name)
    attrs = op.attrs
    match op.kind:
        case "aten.gelu.default":
            return Activation("gelu_tanh" if attrs.get("approximate") == "tanh" else "gelu")
        case "aten.leaky_relu.default":
            return Activation("leaky_relu", numbers(attrs.get("negative_slope", 0.01)))
        case "aten.hardtanh.default":
            return clip(attrs.get("min_val", -1.0), attrs.get("max_val", 1.0))
        case "aten.clamp.default":
            return clip(attrs.get("min"), attrs.get("max"))
        case "aten.relu6.default":
            return clip(0.0, 6.0)
    return None


def clip(low: Attr, high: Attr) -> Activation | None:
    """The activation that limits values to [low, high]; a limit that is left out is infinite."""
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    if isinstance(low, int | float) and isinstance(high, int | float):
        return Activation("clip", numbers(low, high))
    return None


def numbers(*values: Attr) -> tuple[float, ...]:
    return tuple(float(value) for value in values if isinstance(value, int | float))


WORDS = {f"aten.{name}.default": name for name in ("relu", "silu", "sigmoid", "tanh", "hardswish")}


def read_product(graph: Graph, op: Op) -> MatrixProduct | None:
    """A product whose right side is a matrix."""
    product = _product(op)
    if product is None or graph.values[product.weight].spec.rank != 2 or graph.values[product.x].spec.rank < 2:
        return None
    columns = graph.values[product.weight].spec.shape[0 if product.trans else 1]
    if product.bias is not None and graph.values[product.bias].spec.shape != (columns,):
        return None
    return product


def _product(op: Op) -> MatrixProduct | None:
    attrs, ins = op.attrs, op.inputs
    match op.kind:
        case "aten.linear.default":
            return MatrixProduct(ins[0], ins[1], trans=True, bias=ins[2] if len(ins) == 3 else None)
        case "aten.mm.default" | "aten.matmul.default":
            return MatrixProduct(ins[0], ins[1], trans=False)
        case "aten.addmm.default" if attrs.get("alpha", 1) == 1 and attrs.get("beta", 1) == 1:
            return MatrixProduct(ins[1], ins[2], trans=False, bias=ins[0])
    return None


def read_convolution(graph: Graph, op: Op) -> Convolved | None:
    if op.kind not in ("aten.conv2d.default", "aten.convolution.default"):
        return None
    attrs = op.attrs
    if graph.values[op.inputs[0]].spec.rank != 4 or attrs.get("transposed"):
        return None
    bias = op.inputs[2] if isinstance(attrs.get("bias"), InputRef) else None
    strides, pads, dilations = (
        pair(attrs.get(name, usual)) for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    groups = attrs.get("groups", 1)
    if strides is None or pads is None or dilations is None or not isinstance(groups, int):
        return None
    return Convolved(op.inputs[0], op.inputs[1], bias, strides, pads, dilations, groups)


def pair(value: Attr) -> tuple[int, ...] | None:
    """One int for each of two dimensions; torch may give a single int for both."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value) and len(value) in (1, 2):
        return (*value, *value)[-2:]  # type: ignore[return-value]
    return None


def read_norm(op: Op) -> Norm | None:
    if op.kind == "aten.batch_norm.default" and len(op.inputs) == 5 and op.attrs.get("training") is False:
        return Norm(op.inputs[0], op.inputs[1:5], float(op.attrs["eps"]))  # type: ignore[arg-type]
    return None
