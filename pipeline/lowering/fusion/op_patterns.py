"""Pattern matchers of single ops: sum, activation, matrix product, convolution, batch normalisation, attention.

A matcher takes an op of the IR and returns its operands (value ids) and attributes. It returns None if the op computes
something else, or has an argument that a fused kind cannot hold. A graph is read here; only `select_constant_indices`
rewrites one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pipeline.ir.graph import Attr, Graph, InputRef, Op, Role
from pipeline.lowering.fusion.rewrite import Rewrite
from pipeline.ops.fused import Activation

FLOATS: Final = frozenset({"float32", "float16", "bfloat16"})
"""The dtypes of kernels for a GPU: row programs, attention, products with an epilogue."""


def constant_number(graph: Graph, vid: int) -> float | int | None:
    """The value of a constant with one element; None for other values."""
    value = graph.values[vid]
    if value.role is not Role.CONST or vid not in graph.payloads or value.spec.numel != 1:
        return None
    return graph.payloads[vid].numpy().reshape(-1)[0].item()


def select_constant_indices(graph: Graph) -> Graph:
    """The pass `select`: `x[..., i, ...]` with a constant i becomes aten.select, a view, which copies nothing."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        selected = _constant_index(graph, op)
        if selected is not None:
            axis, index = selected
            rewrite.replace(op, "aten.select.int", op.inputs[:1], op.outputs, {"dim": axis, "index": index})
    return rewrite.build()


def _constant_index(graph: Graph, op: Op) -> tuple[int, int] | None:
    """(axis, index counted from 0) of an aten.index whose only index is a constant scalar; None for other ops."""
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
class Convolution2d:
    """A convolution over two spatial dimensions."""

    x: int
    weight: int
    bias: int | None
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    """For each spatial dimension the padding of both sides."""
    dilations: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True)
class Norm:
    """A batch normalisation with stored statistics."""

    x: int
    operands: tuple[int, int, int, int]
    """Scale, bias, mean, variance."""
    epsilon: float


@dataclass(frozen=True, slots=True)
class Attention:
    """Torch's scaled dot product attention without dropout, with a head of key and value for each of the query.

    `scale`: None stands for torch's default, 1 / sqrt(size of the last axis of the query).
    """

    query: int
    key: int
    value: int
    mask: int | None
    causal: bool
    scale: float | None

    def scale_of(self, graph: Graph) -> float:
        """The factor of the scores."""
        return graph.values[self.query].spec.sizes[-1] ** -0.5 if self.scale is None else self.scale


def match_attention(op: Op) -> Attention | None:
    if op.kind != "aten.scaled_dot_product_attention.default":
        return None
    attrs = op.attrs
    if attrs.get("dropout_p") or attrs.get("enable_gqa"):
        return None
    query, key, value, mask = (
        op.inputs[ref.index] if isinstance(ref, InputRef) else None
        for ref in (attrs["query"], attrs["key"], attrs["value"], attrs.get("attn_mask"))
    )
    assert query is not None and key is not None and value is not None
    scale = attrs.get("scale")
    number = float(scale) if isinstance(scale, int | float) else None
    return Attention(query, key, value, mask, bool(attrs.get("is_causal")), number)


def match_sum(op: Op) -> tuple[int, int] | None:
    """Both operands of an addition of two tensors without a factor `alpha`."""
    if op.kind == "aten.add.Tensor" and len(op.inputs) == 2 and op.attrs.get("alpha", 1) == 1:
        return op.inputs[0], op.inputs[1]
    return None


def match_activation(op: Op) -> Activation | None:
    name = UNARY_ACTIVATIONS.get(op.kind)
    if name is not None:
        return Activation(name)
    attrs = op.attrs
    match op.kind:
        case "aten.gelu.default":
            return Activation("gelu_tanh" if attrs.get("approximate") == "tanh" else "gelu")
        case "aten.leaky_relu.default":
            return Activation("leaky_relu", floats(attrs.get("negative_slope", 0.01)))
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
        return Activation("clip", floats(low, high))
    return None


def floats(*values: Attr) -> tuple[float, ...]:
    """`values` as floats; values that are no numbers are left out."""
    return tuple(float(value) for value in values if isinstance(value, int | float))


UNARY_ACTIVATIONS = {f"aten.{name}.default": name for name in ("relu", "silu", "sigmoid", "tanh", "hardswish")}


def match_product(graph: Graph, op: Op) -> MatrixProduct | None:
    """A product whose right operand is a matrix, with a bias of one value per column or none."""
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


def match_convolution(graph: Graph, op: Op) -> Convolution2d | None:
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
    return Convolution2d(op.inputs[0], op.inputs[1], bias, strides, pads, dilations, groups)


def pair(value: Attr) -> tuple[int, ...] | None:
    """One int for each of two dimensions; torch may give a single int for both."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value) and len(value) in (1, 2):
        return (*value, *value)[-2:]  # type: ignore[return-value]
    return None


def match_norm(op: Op) -> Norm | None:
    if op.kind == "aten.batch_norm.default" and len(op.inputs) == 5 and op.attrs.get("training") is False:
        return Norm(op.inputs[0], op.inputs[1:5], float(op.attrs["eps"]))  # type: ignore[arg-type]
    return None
