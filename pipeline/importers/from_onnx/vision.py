"""Operators on regions of pictures."""

from __future__ import annotations

from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.ir.graph import Attr


def roi_align(node: Node) -> None:
    """Before opset 16 places were not moved by half a pixel."""
    read = node.attributes
    mode = read.text("mode", "avg")
    coordinates = read.text("coordinate_transformation_mode", "half_pixel" if node.opset >= 16 else "output_half_pixel")
    if mode not in ("avg", "max") or coordinates not in ("half_pixel", "output_half_pixel"):
        raise node.refusal(f"found mode {mode!r} and coordinates {coordinates!r}, which it does not have")
    read.settle("output_height", "output_width")  # of the output's shape
    attrs: dict[str, Attr] = {
        "output_size": node.output().sizes[2:],
        "mode": mode,
        "half_pixel": coordinates == "half_pixel",
        "sampling_ratio": read.integer("sampling_ratio"),
        "spatial_scale": read.number("spatial_scale", 1.0),
    }
    node.emit("onnxline.roi_align.default", node.operands(), attrs)


IMPORTERS: dict[str, Importer] = {"RoiAlign": roi_align}
