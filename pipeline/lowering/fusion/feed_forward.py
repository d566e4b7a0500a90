"""Two products with constant matrices, one after the other, as the layers of a transformer have them."""

from __future__ import annotations

from collections.abc import Container

from pipeline.ir.graph import Attr, Graph, Op, TensorSpec
from pipeline.lowering.fusion.pointwise import read_stored_product
from pipeline.lowering.fusion.readers import MatrixProduct, read_sum
from pipeline.lowering.fusion.rewrite import Rewrite, only_user

LEAST = 2**27
"""Multiplications of each product from which one call is faster: below, products in blocks need no copies either."""


def join_products(graph: Graph) -> Graph:
    """`feed-forward`: two large products with the activation between them, and the tensor that is added to the second.

    The numbers between them are a value of the plan, which a kernel that has them elsewhere leaves unwritten.
    """
    rewrite = Rewrite(graph)
    taken: set[int] = set()
    for op in graph.ops:
        first = read_stored_product(graph, op) if op.oid not in taken else None
        after = only_user(graph, op.outputs[0]) if first is not None and op.kind == "LinearPointwise" else None
        second = read_stored_product(graph, after) if after is not None else None
        if first is None or after is None or second is None or after.attrs.get("activation", "none") != "none":
            continue
        if second.x == op.outputs[0] and _is_large(graph, first) and _is_large(graph, second):
            last, other = _sum_after(graph, after, taken)
            taken |= {after.oid, last.oid}
            _put_both(rewrite, op, first, second, last, other)
    return rewrite.build()


def _is_large(graph: Graph, product: MatrixProduct) -> bool:
    x, weight = graph.values[product.x].spec, graph.values[product.weight].spec
    return x.rank > 1 and x.is_static and weight.is_static and x.numel // max(x.sizes[-1], 1) * weight.numel >= LEAST


def _put_both(
    rewrite: Rewrite, op: Op, first: MatrixProduct, second: MatrixProduct, last: Op, other: int | None
) -> None:
    between = rewrite.graph.values[op.outputs[0]]
    hidden = rewrite.declare(f"{between.name} hidden", TensorSpec(between.spec.shape, between.spec.dtype))
    attrs: dict[str, Attr] = {
        "trans_first": first.trans,
        "trans_second": second.trans,
        "add": other is not None,
        "bias_first": first.bias is not None,
        "bias_second": second.bias is not None,
        "activation": op.attrs["activation"],
        "numbers": op.attrs["numbers"],
    }
    optional = [vid for vid in (other, first.bias, second.bias) if vid is not None]
    ins = [first.x, first.weight, second.weight, *optional]
    rewrite.replace(last, "FeedForward", ins, [last.outputs[0], hidden], attrs)


def _sum_after(graph: Graph, op: Op, taken: Container[int]) -> tuple[Op, int | None]:
    """A sum with a tensor of the same spec; a sum of two pairs belongs to the first of them."""
    after = only_user(graph, op.outputs[0])
    both = read_sum(after) if after is not None else None
    if after is None or both is None or after.oid in taken:
        return op, None
    other = both[1] if both[0] == op.outputs[0] else both[0]
    specs = {graph.values[vid].spec for vid in (other, op.outputs[0], after.outputs[0])}
    return (after, other) if len(specs) == 1 else (op, None)
