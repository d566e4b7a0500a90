"""Products and convolutions with what follows them: bias, normalisation, a sum, an activation."""

from __future__ import annotations

from pipeline.ir.graph import Attr, Graph, Op
from pipeline.lowering.fusion.readers import (
    Activation,
    Convolved,
    MatrixProduct,
    Norm,
    read_activation,
    read_convolution,
    read_norm,
    read_product,
    read_sum,
)
from pipeline.lowering.fusion.rewrite import Rewrite, is_constant, only_user

NONE: Activation = ("none", ())


def fuse_products(graph: Graph) -> Graph:
    """`linear`: a product with a constant matrix, the bias that is added to it, and the activation of that.

    A product alone is left as it is: its kernel takes a packed weight too.
    """
    rewrite = Rewrite(graph)
    for op in graph.ops:
        product = read_product(graph, op)
        if product is None or not is_float32(graph, op) or not is_constant(graph, product.weight):
            continue
        last, bias = op, product.bias
        if bias is None:
            last, bias = _add_of_bias(graph, op, product) or (op, None)
        last, activation = _activation_after(graph, last)
        if last is op:
            continue
        attrs: dict[str, Attr] = {
            "trans": product.trans,
            "add": False,
            "bias": bias is not None,
            **of_activation(activation),
        }
        ins = [product.x, product.weight, *([] if bias is None else [bias])]
        rewrite.replace(last, "LinearPointwise", ins, last.outputs, attrs)
    return rewrite.build()


def read_stored_product(graph: Graph, op: Op) -> MatrixProduct | None:
    """A product with a constant matrix, alone or with the bias and the activation that `linear` joined to it."""
    if not is_float32(graph, op):
        return None
    if op.kind == "LinearPointwise" and not op.attrs["add"]:
        bias = op.inputs[2] if op.attrs["bias"] else None
        return MatrixProduct(op.inputs[0], op.inputs[1], bool(op.attrs["trans"]), bias)
    product = read_product(graph, op)
    return None if product is None or not is_constant(graph, product.weight) else product


def _add_of_bias(graph: Graph, op: Op, product: MatrixProduct) -> tuple[Op, int] | None:
    after = only_user(graph, op.outputs[0])
    both = read_sum(after) if after is not None else None
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
        found = read_convolution(graph, op)
        if found is None or not is_float32(graph, op) or not is_constant(graph, found.weight):
            continue
        last, norm = _norm_after(graph, op)
        last, other = _sum_after(graph, last, taken)
        last, activation = _activation_after(graph, last)
        taken.add(last.oid)
        _put_convolution(rewrite, last, found, norm, other, activation)
    return rewrite.build()


def _put_convolution(
    rewrite: Rewrite, last: Op, found: Convolved, norm: Norm | None, other: int | None, activation: Activation
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
    norm = read_norm(after) if after is not None else None
    if after is None or norm is None or norm.x != op.outputs[0] or not _keeps_spec(graph, op, after):
        return op, None
    if not all(is_constant(graph, vid) and graph.values[vid].spec.dtype == "float32" for vid in norm.operands):
        return op, None
    return after, norm


def _sum_after(graph: Graph, op: Op, taken: set[int]) -> tuple[Op, int | None]:
    """A sum with a tensor of the same spec; a sum of two convolutions belongs to the first of them."""
    after = only_user(graph, op.outputs[0])
    both = read_sum(after) if after is not None else None
    if after is None or both is None or not _keeps_spec(graph, op, after):
        return op, None
    other = both[1] if both[0] == op.outputs[0] else both[0]
    last, _ = _activation_after(graph, after)
    if last.oid in taken or graph.values[other].spec != graph.values[op.outputs[0]].spec:
        return op, None
    return after, other


def _activation_after(graph: Graph, op: Op) -> tuple[Op, Activation]:
    after = only_user(graph, op.outputs[0])
    activation = read_activation(after) if after is not None else None
    if after is None or activation is None or not _keeps_spec(graph, op, after):
        return op, NONE
    return after, activation


def _keeps_spec(graph: Graph, op: Op, after: Op) -> bool:
    return graph.values[op.outputs[0]].spec == graph.values[after.outputs[0]].spec


def of_activation(activation: Activation) -> dict[str, Attr]:
    name, numbers = activation
    return {"activation": name, "numbers": numbers}


def is_float32(graph: Graph, op: Op) -> bool:
    return all(graph.values[vid].spec.dtype == "float32" for vid in (*op.inputs, *op.outputs))
