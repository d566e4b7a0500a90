"""Reductions and scans. Axes are explicit, ascending, and count from the front."""

from __future__ import annotations

from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.ir.graph import Attr

__all__ = ["IMPORTERS"]


def reduction(node: Node) -> None:
    axes = node.integers(1, "axes")
    if node.attributes.flag("noop_with_empty_axes") and not axes:
        node.alias(node.operand(0))
        return
    node.emit(node.kind, node.operands(0), reduced(node, axes))


def sum_of(kind: str, after: str = "") -> Importer:
    """A sum of what `kind` makes of each element, and `after` of that; "Mul" is by itself, "" nothing."""

    def importer(node: Node) -> None:
        axes = all_axes(node)
        vid = node.operand(0)
        if kind:
            vid = node.step(kind, [vid, vid] if kind == "Mul" else [vid], node.spec(0))
        attrs = reduced(node, axes)
        if after:
            node.emit(after, [node.step("ReduceSum", [vid], node.output(), attrs)])
        else:
            node.emit("ReduceSum", [vid], attrs)

    return importer


def norm(node: Node) -> None:
    node.emit(node.kind, node.operands(0), reduced(node, all_axes(node)))


def log_sum_exp(node: Node) -> None:
    if "float" not in node.spec(0).dtype:
        raise node.refusal(f"it is of {node.spec(0).dtype}, expected floating point")
    norm(node)


def all_axes(node: Node) -> tuple[int, ...] | None:
    """The axes; none are all of them. Where none are none, opsets differ in what is left to do."""
    axes = node.integers(1, "axes")
    if node.attributes.flag("noop_with_empty_axes") and not axes:
        raise node.refusal("it has no axes and noop_with_empty_axes, expected axes")
    return axes


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
    "ReduceL1": sum_of("Abs"),
    "ReduceL2": norm,
    "ReduceLogSum": sum_of("", "Log"),
    "ReduceLogSumExp": log_sum_exp,
    "ReduceMax": reduction,
    "ReduceMean": reduction,
    "ReduceMin": reduction,
    "ReduceProd": reduction,
    "ReduceSum": reduction,
    "ReduceSumSquare": sum_of("Mul"),
}
