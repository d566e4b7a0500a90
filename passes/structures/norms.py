"""Batch norm, layer norm and RMS norm: one op each, and the latter two also spelled out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from passes.structures.moments import normals
from passes.structures.sketch import Sketch
from passes.structures.view import GraphView

__all__ = ["batch_norms", "layer_norms", "rms_norms"]


def batch_norms(view: GraphView) -> Iterator[Sketch]:
    yield from _single(view, BATCH_NORM_OPS)


def layer_norms(view: GraphView) -> Iterator[Sketch]:
    yield from _single(view, LAYER_NORM_OPS)
    yield from _spelled_out(view, centred=True)


def rms_norms(view: GraphView) -> Iterator[Sketch]:
    yield from _single(view, RMS_NORM_OPS)
    yield from _spelled_out(view, centred=False)


def _single(view: GraphView, ops: tuple[str, ...]) -> Iterator[Sketch]:
    for op in ops:
        for node in view.by_op.get(op, ()):
            yield Sketch(node, (node,), (node.input[0], node.output[0]))


def _spelled_out(view: GraphView, *, centred: bool) -> Iterator[Sketch]:
    for normal in normals(view):
        if normal.centred == centred:
            yield Sketch(normal.last, normal.nodes, (normal.quotient, normal.last.output[0]))


BATCH_NORM_OPS: Final = ("BatchNormalization",)
LAYER_NORM_OPS: Final = ("LayerNormalization", "com.microsoft.SkipLayerNormalization")
RMS_NORM_OPS: Final = (
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "com.microsoft.SkipSimplifiedLayerNormalization",
)
"""onnxruntime's SimplifiedLayerNormalization is an RMS norm, and stands in the default domain."""
