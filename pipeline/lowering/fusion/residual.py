"""The sum of a product and another tensor, as around the layers of a transformer."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from pipeline.ir.graph import Attr, Graph, Op
from pipeline.lowering.fusion.pointwise import NONE, of_activation, read_stored_product
from pipeline.lowering.fusion.readers import MatrixProduct, read_sum
from pipeline.lowering.fusion.rewrite import Rewrite, only_user


@dataclass(frozen=True, slots=True)
class SumOfProduct:
    """The sum, and the tensor that it adds to the product."""

    op: Op
    other: int


def add_in_products(graph: Graph) -> Graph:
    """`residual`: a product with a constant matrix, what `linear` joined to it, and the tensor that is added then.

    Between product and sum there may be views that leave the elements in their order.
    """
    rewrite = Rewrite(graph)
    taken: set[int] = set()
    for op in graph.ops:
        product = read_stored_product(graph, op)
        found = _sum_after(graph, op, taken) if product is not None else None
        if product is not None and found is not None:
            taken.add(found.op.oid)
            _put_sum(rewrite, op, product, found)
    return rewrite.build()


def _sum_after(graph: Graph, op: Op, taken: Container[int]) -> SumOfProduct | None:
    """A sum with a tensor of the same spec; a sum of two products belongs to the first of them."""
    vid = op.outputs[0]
    after = only_user(graph, vid)
    while after is not None and _keeps_order(graph, after):
        vid = after.outputs[0]
        after = only_user(graph, vid)
    both = read_sum(after) if after is not None else None
    if after is None or both is None or after.oid in taken:
        return None
    other = both[1] if both[0] == vid else both[0]
    specs = {graph.values[each].spec for each in (other, vid, after.outputs[0])}
    return SumOfProduct(after, other) if len(specs) == 1 and all(spec.is_static for spec in specs) else None


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
"""Kind → the attribute that has the order of the axes."""


def _put_sum(rewrite: Rewrite, op: Op, product: MatrixProduct, found: SumOfProduct) -> None:
    rows, last = rewrite.spec(op.outputs[0]), found.op
    flags: dict[str, Attr] = {"trans": product.trans, "add": True, "bias": product.bias is not None}
    of_op = {name: op.attrs[name] for name in ("activation", "numbers")} if op.kind == "LinearPointwise" else None
    attrs = {**flags, **(of_op or of_activation(NONE))}
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
