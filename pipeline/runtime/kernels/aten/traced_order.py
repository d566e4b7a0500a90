"""Operands of an operator of torch with the strides that they had in the trace.

A plan lays most values out as in the trace, but not all: a copy that changes no element is a view, an image of a train
step lies with its channels last. An operator that reads any strides does not mind; any other one gets a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from pipeline.ir.graph import Value
from pipeline.ops.layout import Layout
from pipeline.runtime.kernels.base import Ins, Launch
from pipeline.runtime.tensors import empty_strided

Strides = tuple[int, ...]


def strides_in_trace(value: Value) -> Strides:
    """The strides of `value` in the trace, in elements; contiguous ones where the trace has others for no element.

    An expanded value has several elements in one place, which a copy cannot have.
    """
    rows = Layout.contiguous(value.spec.sizes)
    strides = tuple(stride for stride in value.strides or () if isinstance(stride, int))
    traced = Layout(rows.sizes, strides) if len(strides) == len(rows.sizes) else rows
    return traced.strides if traced.is_distinct else rows.strides


def bring_in_order(ins: Ins, traced: Sequence[Strides | None]) -> tuple[list[torch.Tensor], list[Launch]]:
    """`ins` with the strides `traced` (None for any), and the launches that copy the operands which lie otherwise."""
    brought, copies = list(ins), list[Launch]()
    for at, (operand, strides) in enumerate(zip(ins, traced, strict=True)):
        if strides is None or operand.stride() == strides or not operand.numel():
            continue
        axes = zip(operand.shape, operand.stride(), strides, strict=True)
        if all(size == 1 or own == wanted for size, own, wanted in axes):
            brought[at] = operand.as_strided(operand.shape, strides, operand.storage_offset())
            continue
        brought[at] = empty_strided(operand.shape, strides, operand.dtype)
        copies.append(partial(brought[at].copy_, operand))
    return brought, copies
