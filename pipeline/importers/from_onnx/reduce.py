"""Reductions and scans. Axes are explicit, ascending, and count from the front."""

from __future__ import annotations

from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.ir.graph import Attr

__all__ = ["IMPORTERS"]


def reduction(node: Node) -> None:
    axes = node.integers(1, "axes")
    if not axes and node.attributes.flag("noop_with_empty_axes"):
        node.alias(node.operand(0))
        return
    node.emit(node.kind, node.operands(0), reduced(node, axes))


def sum_of_squares(node: Node) -> None:
    x = node.operand(0)
    square = node.step("Mul", [x, x], node.spec(0))
    node.emit("ReduceSum", [square], reduced(node, node.integers(1, "axes")))


def reduced(node: Node, axes: tuple[int, ...] | None) -> dict[str, Attr]:
    rank = node.spec(0).rank
    every = tuple(sorted(axis % rank for axis in axes)) if axes else tuple(range(rank))
    return {"axes": every, "keepdims": node.attributes.flag("keepdims", True)}


def arg_reduction(node: Node) -> None:
    if node.attributes.flag("select_last_index"):
        raise node.refusal("it selects the last of equal elements, expected the first")
    node.emit(node.kind, node.operands(0), {"axis": node.axis(0), "keepdims": node.attributes.flag("keepdims", True)})


def cumulative_sum(node: Node) -> None:
    axis = int(node.need_constant(1, "the axis").item()) % node.spec(0).rank
    read = node.attributes
    attrs: dict[str, Attr] = {"axis": axis, "exclusive": read.flag("exclusive"), "reverse": read.flag("reverse")}
    node.emit("CumSum", node.operands(0), attrs)


IMPORTERS: dict[str, Importer] = {
    "ArgMax": arg_reduction,
    "ArgMin": arg_reduction,
    "CumSum": cumulative_sum,
    "ReduceL2": reduction,
    "ReduceMax": reduction,
    "ReduceMean": reduction,
    "ReduceMin": reduction,
    "ReduceProd": reduction,
    "ReduceSum": reduction,
    "ReduceSumSquare": sum_of_squares,
}
