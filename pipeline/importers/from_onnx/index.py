"""Ops that read or write at computed places. Axes count from the front."""

from __future__ import annotations

from pipeline.importers.from_onnx.node import Importer, Node, direct, read_axis, read_integer, read_text
from pipeline.ir.graph import Attr, TensorSpec

__all__ = ["IMPORTERS"]


def one_hot(node: Node) -> None:
    """Inputs are the indices and the two values (off, on); the depth is an attribute."""
    axis = node.attributes.integer("axis", -1) % node.output().rank
    depth = int(node.need_constant(1, "the depth").item())
    node.emit("OneHot", node.operands(0, 2), {"axis": axis, "depth": depth})


def grid_sample(node: Node) -> None:
    """Since opset 20 modes have other names."""
    read = node.attributes
    mode = read.text("mode", "linear" if node.opset >= 20 else "bilinear")
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    dims = node.spec(0).rank - 2
    if dims not in (2, 3) or mode not in ("linear", "nearest", "cubic") or (mode == "cubic" and dims == 3):
        raise node.refusal(
            f"found mode {mode!r} over {dims} dims; expected linear or nearest over 2 or 3, cubic over 2"
        )
    attrs: dict[str, Attr] = {
        "mode": mode,
        "padding": read.text("padding_mode", "zeros"),
        "align_corners": read.flag("align_corners"),
    }
    node.emit("GridSample", node.operands(), attrs)


def top_k(node: Node) -> None:
    """Values and indices are both outputs, whichever is read. ONNX allows any order if unsorted, so it is sorted."""
    node.attributes.settle("sorted")
    count = int(node.need_constant(1, "k").item()) if node.has(1) else node.attributes.integer("k")
    axis = node.axis(-1)
    shape = tuple(count if place == axis else size for place, size in enumerate(node.spec(0).sizes))
    specs = (TensorSpec(shape, node.spec(0).dtype), TensorSpec(shape, "int64"))
    names = [name or node.fresh(f"topk.{place}") for place, name in enumerate((*node.output_names, "")[:2])]
    attrs: dict[str, Attr] = {"axis": axis, "largest": node.attributes.flag("largest", True), "k": count}
    node.make("TopK", node.operands(0), list(zip(names, specs, strict=True)), attrs)


IMPORTERS: dict[str, Importer] = {
    "Gather": direct(axis=read_axis(0)),
    "GatherElements": direct(axis=read_axis(0)),
    "GatherND": direct(batch_dims=read_integer("batch_dims")),
    "GridSample": grid_sample,
    "OneHot": one_hot,
    "ScatterElements": direct(axis=read_axis(0), reduction=read_text("reduction", "none")),
    "ScatterND": direct(reduction=read_text("reduction", "none")),
    "TopK": top_k,
}
