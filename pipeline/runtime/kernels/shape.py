"""Kernels of views whose results have memory of their own, and of copies and conversions.

A view runs only where its result is none: as a graph output, or where no strides of the input say it. The table of
operators knows the layout of each view, so one kernel copies from that layout.
"""

from __future__ import annotations

from functools import partial

from pipeline.ir.graph import TensorSpec
from pipeline.ops import Kind, Layout
from pipeline.ops.layout import ViewRule
from pipeline.ops.shape import KINDS as ROWS
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs, in_turn
from pipeline.runtime.tensors import dtype_name


def copy(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    return partial(outs[0].copy_, ins[0])


def copy_view(view: ViewRule, ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """Copy the elements of each view of the input; a Reshape that no strides say fills its result in order."""
    x, specs = ins[0], [TensorSpec(tuple(out.shape), dtype_name(out.dtype)) for out in outs]
    layouts = view(attrs, Layout(tuple(x.shape), x.stride(), int(x.storage_offset())), specs)
    if layouts is None:
        return partial(outs[0].view(x.shape).copy_, x)
    views = [x.as_strided(layout.sizes, layout.strides, layout.offset) for layout in layouts]
    return in_turn(*(partial(out.copy_, part) for out, part in zip(outs, views, strict=True)))


KERNELS: dict[Kind, Kernel] = {row.kind: partial(copy_view, row.view) if row.view else copy for row in ROWS}
