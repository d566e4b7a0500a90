"""Launches of kernels in C++ that work row by row (norms, softmax, attention, losses, sums over rows) or element by
element (activations and their gradients).

Each function returns None where its kernel does not take the operands; torch computes them then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pipeline.ops import Kind
from pipeline.ops.fused import Activation
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs
from pipeline.runtime.kernels.native.kernel_library import (
    NativeKernel,
    NativeLibrary,
    are_floats,
    as_rows,
    is_dense_like,
    is_for_one_thread,
)

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "hardswish", "clip", "leaky_relu")
"""By the code that the kernels know."""


def settings_of(after: Activation) -> tuple[float, ...]:
    """The code of an activation, and its parameters."""
    return (ACTIVATIONS.index(after.name), *map(float, after.numbers))


def launch_activation(library: NativeLibrary, x: torch.Tensor, out: torch.Tensor, after: Activation) -> Launch | None:
    if not are_floats(x, out) or not x.is_contiguous() or not is_dense_like(out, x) or not is_for_one_thread(out):
        return None
    return library.launch("activate_all", [out], [x], (x.numel(), *settings_of(after)))


def launch_norm(
    library: NativeLibrary, x: torch.Tensor, weights: Sequence[torch.Tensor], over: Sequence[int], eps: float,
    out: torch.Tensor, *, is_centered: bool,
) -> Launch | None:  # fmt: skip
    """Over the last axes, of the sizes `over`; not centered, it divides by the root of the mean square. `weights` are
    none, the scale, or scale and bias."""
    columns, sizes = math.prod(over), torch.Size(over)
    if not are_floats(x, *weights, out) or any(item.shape != sizes or not item.is_contiguous() for item in weights):
        return None
    if not is_dense_like(out, x) or not is_for_one_thread(out):
        return None
    rows = as_rows(x.flatten(x.dim() - len(over))) if x.is_contiguous() else as_rows(x)
    if rows is None or rows.shape[1] != columns:
        return None
    settings = (len(rows), columns, rows.stride(0), len(weights), int(is_centered), float(eps))
    return library.launch("normalize_rows", [out], [rows, *weights], settings)


def launch_softmax(library: NativeLibrary, x: torch.Tensor, axis: int, out: torch.Tensor) -> Launch | None:
    rows = as_rows(x) if axis in (-1, x.dim() - 1) and are_floats(x, out) else None
    if rows is None or not is_dense_like(out, x) or not is_for_one_thread(out):
        return None
    return library.launch("softmax_rows", [out], [rows], (*rows.shape, rows.stride(0)))


def small_attention(library: NativeLibrary, ins: Ins, outs: Outs, attrs: Attrs) -> Launch | None:
    """The result is (batch, tokens, heads, width), the operands (batch, heads, tokens, width)."""
    query, key, value = ins
    out = outs[0].permute(0, 2, 1, 3)
    if not are_floats(*ins, *outs) or not _fit(query, key, value, out) or not attrs["scale"] >= 0:
        return None
    if outs[1].shape != (*query.shape[:3], key.shape[2]) or not outs[1].is_contiguous():
        return None
    sizes = (*query.shape[:3], key.shape[2], query.shape[3], value.shape[3])
    strides = [stride for item in (query, key, value, out) for stride in item.stride()[:3]]
    return library.launch("attend", outs, ins, (*sizes, *strides, float(attrs["scale"])))


def attention(library: NativeLibrary, ins: Ins, outs: Outs, attrs: Attrs) -> Launch | None:
    """As `small_attention`, and the scores are no value of the plan. A mask is read row by row, without copies."""
    query, key, value = ins[:3]
    out = outs[0].permute(0, 2, 1, 3)
    if not are_floats(*ins, *outs) or not _fit(query, key, value, out) or value.shape[3] != key.shape[3]:
        return None
    if not attrs["scale"] >= 0 or attrs["causal"] or not is_for_one_thread(outs[0]):
        return None
    mask = ins[3].expand(*query.shape[:3], key.shape[2]) if attrs["mask"] else None
    if mask is not None and mask.stride(3) != 1 and mask.shape[3] > 1:
        return None  # one number for all keys
    sizes = (*query.shape[:3], *key.shape[2:])
    strides = [stride for item in (query, key, value, out) for stride in item.stride()[:3]]
    of_mask = (0, 0, 0) if mask is None else mask.stride()[:3]
    settings = (*sizes, *strides, float(attrs["scale"]), int(mask is not None), *of_mask)
    return library.launch("attend_all", outs, ins, settings)


def _fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the sizes are those of one call, one key and value for each head of the query, and rows lie dense."""
    sizes, keys = query.shape[:3], key.shape[2]
    if (key.shape, value.shape[:3]) != ((*sizes[:2], keys, query.shape[3]), (*sizes[:2], keys)):
        return False
    return out.shape == (*sizes, value.shape[3]) and all(
        item.stride(3) == 1 or item.shape[3] == 1 for item in (query, key, value, out)
    )


def launch_log_softmax(library: NativeLibrary, x: torch.Tensor, axis: int, out: torch.Tensor) -> Launch | None:
    if not are_floats(x, out) or not is_dense_like(out, x) or not is_for_one_thread(out):
        return None
    rows = _rows_of_last_axis(x, axis)
    return None if rows is None else library.launch("log_softmax_rows", [out], [rows], (*rows.shape, rows.stride(0)))


def launch_log_softmax_gradient(
    library: NativeLibrary, gradient: torch.Tensor, output: torch.Tensor, axis: int, out: torch.Tensor
) -> Launch | None:
    """`output` is that of log_softmax."""
    if not are_floats(gradient, output, out) or not is_for_one_thread(out):
        return None
    if gradient.shape != output.shape or not is_dense_like(out, output):
        return None
    rows, outputs = _rows_of_last_axis(gradient, axis), _rows_of_last_axis(output, axis)
    if rows is None or outputs is None:
        return None
    settings = (*rows.shape, rows.stride(0), outputs.stride(0))
    return library.launch("log_softmax_gradient", [out], [rows, outputs], settings)


def _rows_of_last_axis(x: torch.Tensor, axis: int) -> torch.Tensor | None:
    return as_rows(x) if axis in (-1, x.dim() - 1) else None


def launch_class_loss(
    library: NativeLibrary, x: torch.Tensor, labels: torch.Tensor, reduction: int, ignored: int, outs: Outs
) -> Launch | None:
    """`x` has the logarithms of shares of classes. The launch raises IndexError for a label that is no class."""
    if not are_floats(x, *outs) or not _are_labels_of(labels, x) or outs[1].numel() != 1 or x.stride(1) != 1:
        return None
    if outs[0].numel() != _losses_of(x, reduction) or not outs[0].is_contiguous():
        return None
    return library.launch("class_loss", outs, [x, labels], (*x.shape, x.stride(0), ignored, reduction))


def launch_class_loss_gradient(
    library: NativeLibrary,
    gradient: torch.Tensor,
    labels: torch.Tensor,
    counted: torch.Tensor,
    reduction: int,
    ignored: int,
    out: torch.Tensor,
) -> Launch | None:
    """`counted` is the second result of the loss."""
    if not are_floats(gradient, counted, out) or not _are_labels_of(labels, out) or not out.is_contiguous():
        return None
    if gradient.numel() != _losses_of(out, reduction) or not gradient.is_contiguous() or counted.numel() != 1:
        return None
    return library.launch("class_loss_gradient", [out], [gradient, labels, counted], (*out.shape, ignored, reduction))


def _losses_of(x: torch.Tensor, reduction: int) -> int:
    """How many elements a loss has: one, or without a reduction one for each row."""
    return 1 if reduction else len(x)


def _are_labels_of(labels: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether there is one class for each row."""
    return x.dim() == 2 and labels.dtype is torch.int64 and labels.shape == x.shape[:1] and labels.is_contiguous()


def launch_threshold_gradient(
    library: NativeLibrary, gradient: torch.Tensor, x: torch.Tensor, threshold: float, out: torch.Tensor
) -> Launch | None:
    """All operands have the memory order of the first result."""
    rows = in_one_order(out, gradient, x)
    if rows is None or not are_floats(*rows) or not is_for_one_thread(out):
        return None
    return library.launch("pass_above", rows[:1], rows[1:], (out.numel(), float(threshold)))


def in_one_order(first: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors with axes in the order in which `first` lies without gaps; None where one does not lie so."""
    order = sorted(range(first.dim()), key=lambda axis: -first.stride(axis))
    views = [tensor.permute(order) for tensor in (first, *others)]
    return views if all(tensor.is_contiguous() and tensor.shape == views[0].shape for tensor in views) else None


def launch_row_sum(library: NativeLibrary, x: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> Launch | None:
    """The rows of `x`, each times its factor, in one sum."""
    if not are_floats(x, factors, out) or (x.stride(1) != 1 and x.shape[1] != 1) or factors.stride(0) != 1:
        return None
    if (*factors.shape, *out.shape) != x.shape or not out.is_contiguous() or not is_for_one_thread(x):
        return None
    return library.launch("weigh_rows", [out], [x, factors], (*x.shape, x.stride(0)))


KERNELS: dict[Kind, NativeKernel] = {Kind.SmallAttention: small_attention, Kind.ScaledDotProductAttention: attention}
