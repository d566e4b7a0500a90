"""Join products and convolutions with the ops after them: bias, normalisation, sum, activation.

linear, conv    a product or convolution, with its bias, normalisation and activation
epilogues       a product with its bias, and ReLU or GELU by tanh: what a GPU's library computes in one call
residual        a product, and the tensor that is added to its result, as around the layers of a transformer
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from pipeline.ir.graph import Attr, Graph, Op
from pipeline.lowering.fusion.op_patterns import (
    FLOATS,
    Convolution2d,
    MatrixProduct,
    Norm,
    match_activation,
    match_convolution,
    match_norm,
    match_product,
    match_sum,
)
from pipeline.lowering.fusion.rewrite import Rewrite, is_constant, only_user
from pipeline.ops.fused import PLAIN, Activation


def fuse_products(graph: Graph) -> Graph:
    """`linear`: a product with a constant matrix, the bias that is added to it, and the activation of the sum.

    A product alone is left as it is: its kernel takes a packed weight too.
    """
    rewrite = Rewrite(graph)
    for op in graph.ops:
        if is_float32(graph, op) and (found := _find_product(graph, op)) is not None:
            _put_product(rewrite, op, found)
    return rewrite.build()


def fuse_epilogues(graph: Graph) -> Graph:
    """`epilogues`: what cuBLASLt adds to a product in one call, a bias with or without ReLU or GELU by tanh."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        found = _find_product(graph, op)
        if found is not None and found.bias is not None and graph.values[found.x].spec.dtype in FLOATS:
            is_epilogue = found.activation in EPILOGUES
            _put_product(rewrite, op, found if is_epilogue else replace(found, last=found.sum, activation=PLAIN))
    return rewrite.build()


EPILOGUES = (Activation("relu"), Activation("gelu_tanh"))


@dataclass(frozen=True, slots=True)
class ActivatedProduct:
    """A product with a constant matrix, and the ops after it that one call computes."""

    x: int
    weight: int
    trans: bool
    bias: int | None
    activation: Activation
    sum: Op
    """The op that makes the product with its bias."""
    last: Op
    """The op that makes the result."""


def _find_product(graph: Graph, op: Op) -> ActivatedProduct | None:
    product = match_product(graph, op)
    if product is None or not is_constant(graph, product.weight):
        return None
    total, bias = op, product.bias
    if bias is None:
        total, bias = _add_of_bias(graph, op, product) or (op, None)
    last, activation = _activation_after(graph, total)
    return ActivatedProduct(product.x, product.weight, product.trans, bias, activation, total, last)


def _put_product(rewrite: Rewrite, op: Op, found: ActivatedProduct) -> None:
    """Replace the ops of `found`, of which `op` is the product; a product alone stays as it is."""
    if found.last is op:
        return
    attrs: dict[str, Attr] = {
        "trans": found.trans,
        "add": False,
        "bias": found.bias is not None,
        **of_activation(found.activation),
    }
    ins = [found.x, found.weight, *([] if found.bias is None else [found.bias])]
    rewrite.replace(found.last, "LinearPointwise", ins, found.last.outputs, attrs)


def match_stored_product(graph: Graph, op: Op) -> MatrixProduct | None:
    """A product with a constant matrix, alone or with the bias and the activation that `linear` joined to it."""
    if not is_float32(graph, op):
        return None
    if op.kind == "LinearPointwise" and not op.attrs["add"]:
        bias = op.inputs[2] if op.attrs["bias"] else None
        return MatrixProduct(op.inputs[0], op.inputs[1], bool(op.attrs["trans"]), bias)
    product = match_product(graph, op)
    return None if product is None or not is_constant(graph, product.weight) else product


def _add_of_bias(graph: Graph, op: Op, product: MatrixProduct) -> tuple[Op, int] | None:
    after = only_user(graph, op.outputs[0])
    both = match_sum(after) if after is not None else None
    if after is None or both is None:
        return None
    bias = both[1] if both[0] == op.outputs[0] else both[0]
    columns = graph.values[op.outputs[0]].spec.shape[-1:]
    fits = graph.values[bias].spec.shape == columns and _keeps_spec(graph, op, after)
    return (after, bias) if fits and is_constant(graph, bias) else None


def fuse_convolutions(graph: Graph) -> Graph:
    """`conv`: a convolution, the batch normalisation of its result, a tensor that is added, and the activation."""
    rewrite = Rewrite(graph)
    taken: set[int] = set()
    for op in graph.ops:
        found = match_convolution(graph, op)
        if found is None or not is_float32(graph, op) or not is_constant(graph, found.weight):
            continue
        last, norm = _norm_after(graph, op)
        if (both := _find_sum(graph, last, taken)) is not None:
            last = both.op
            taken.add(last.oid)
        last, activation = _activation_after(graph, last)
        _put_convolution(rewrite, last, found, norm, both and both.other, activation)
    return rewrite.build()


def _put_convolution(
    rewrite: Rewrite, last: Op, found: Convolution2d, norm: Norm | None, other: int | None, activation: Activation
) -> None:
    flags = {"add": other is not None, "bias": found.bias is not None, "norm": norm is not None}
    attrs: dict[str, Attr] = {
        "strides": found.strides,
        "pads": found.pads,
        "dilations": found.dilations,
        "group": found.group,
        **flags,
        "epsilon": 0.0 if norm is None else norm.epsilon,
        "channels_last": False,
        **of_activation(activation),
    }
    optional = [vid for vid in (other, found.bias) if vid is not None]
    ins = [found.x, found.weight, *optional, *(norm.operands if norm else ())]
    rewrite.replace(last, "ConvPointwise", ins, last.outputs, attrs)


def _norm_after(graph: Graph, op: Op) -> tuple[Op, Norm | None]:
    after = only_user(graph, op.outputs[0])
    norm = match_norm(after) if after is not None else None
    if after is None or norm is None or norm.x != op.outputs[0] or not _keeps_spec(graph, op, after):
        return op, None
    if not all(is_constant(graph, vid) and graph.values[vid].spec.dtype == "float32" for vid in norm.operands):
        return op, None
    return after, norm


@dataclass(frozen=True, slots=True)
class SumOfResult:
    """A sum, and the tensor that the sum adds to the result of another op."""

    op: Op
    other: int


def _find_sum(graph: Graph, op: Op, taken: Container[int], *, after_views: bool = False) -> SumOfResult | None:
    """The sum of the result of `op` with a tensor of the same spec, unless it is `taken`: a sum of two results belongs
    to the first of them.

    after_views: between result and sum there may be views that leave the elements in their order.
    """
    vid = op.outputs[0]
    after = only_user(graph, vid)
    while after_views and after is not None and _keeps_order(graph, after):
        vid = after.outputs[0]
        after = only_user(graph, vid)
    both = match_sum(after) if after is not None else None
    if after is None or both is None or after.oid in taken:
        return None
    other = both[1] if both[0] == vid else both[0]
    specs = {graph.values[value].spec for value in (other, vid, after.outputs[0])}
    return SumOfResult(after, other) if len(specs) == 1 else None


def _activation_after(graph: Graph, op: Op) -> tuple[Op, Activation]:
    after = only_user(graph, op.outputs[0])
    activation = match_activation(after) if after is not None else None
    if after is None or activation is None:
        return op, PLAIN
    return after, activation


def _keeps_spec(graph: Graph, op: Op, after: Op) -> bool:
    return graph.values[op.outputs[0]].spec == graph.values[after.outputs[0]].spec


def of_activation(activation: Activation) -> dict[str, Attr]:
    return {"activation": activation.name, "numbers": activation.numbers}


def is_float32(graph: Graph, op: Op) -> bool:
    return all(graph.values[vid].spec.dtype == "float32" for vid in (*op.inputs, *op.outputs))


def add_in_products(graph: Graph) -> Graph:
    """`residual`: a product with a constant matrix, what `linear` joined to it, and the tensor that is added then.

    Between product and sum there may be views that leave the elements in their order.
    """
    rewrite = Rewrite(graph)
    taken: set[int] = set()
    for op in graph.ops:
        product = match_stored_product(graph, op)
        found = _find_sum(graph, op, taken, after_views=True) if product is not None else None
        if product is not None and found is not None and graph.values[found.other].spec.is_static:
            taken.add(found.op.oid)
            _put_sum(rewrite, op, product, found)
    return rewrite.build()


def _keeps_order(graph: Graph, op: Op) -> bool:
    """Whether `op` is a view with the same elements in the same order: its transpose moves axes of one element."""
    if op.kind in RESHAPES:
        return True
    perm, spec = op.attrs.get(PERMUTES.get(op.kind, "")), graph.values[op.inputs[0]].spec
    if not isinstance(perm, tuple) or not spec.is_static:
        return False
    moved = [axis % spec.rank for axis in perm if isinstance(axis, int)]
    moved = [axis for axis in moved if spec.sizes[axis] != 1]
    return moved == sorted(moved)


RESHAPES = frozenset({"aten.view.default", "aten.reshape.default", "aten.unsqueeze.default"})
PERMUTES = {"Transpose": "perm", "aten.permute.default": "dims"}
"""Kind → the attribute that holds the order of the axes."""


def _put_sum(rewrite: Rewrite, op: Op, product: MatrixProduct, found: SumOfResult) -> None:
    rows, last = rewrite.spec(op.outputs[0]), found.op
    flags: dict[str, Attr] = {"trans": product.trans, "add": True, "bias": product.bias is not None}
    of_op = {name: op.attrs[name] for name in ("activation", "numbers")} if op.kind == "LinearPointwise" else None
    attrs = {**flags, **(of_op or of_activation(PLAIN))}
    optional = [] if product.bias is None else [product.bias]
    if rewrite.spec(found.other) == rows:
        ins = [product.x, product.weight, found.other, *optional]
        rewrite.replace(last, "LinearPointwise", ins, last.outputs, attrs)
        return
    name = rewrite.graph.values[last.outputs[0]].name
    other, result = (rewrite.declare(f"{name} {of}", rows) for of in ("other by rows", "by rows"))
    rewrite.replace(last, "aten.reshape.default", [found.other], [other], {"shape": rows.shape})
    ins = [product.x, product.weight, other, *optional]
    rewrite.replace(last, "LinearPointwise", ins, [result], attrs)
    rewrite.replace(
        last, "aten.reshape.default", [result], last.outputs, {"shape": rewrite.spec(last.outputs[0]).shape}
    )
