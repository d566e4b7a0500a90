"""The loss of a classifier with its gradient, gradients of activations, and sums over rows."""

from __future__ import annotations

import torch

from pipeline.runtime.kernels.base import Launch, Outs
from pipeline.runtime.kernels.native.kernel_library import (
    NativeLibrary,
    are_floats,
    as_rows,
    is_dense_like,
    is_for_one_thread,
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
    """How many numbers a loss has: one, or without a reduction one for each row."""
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
    turned = [tensor.permute(order) for tensor in (first, *others)]
    return turned if all(tensor.is_contiguous() and tensor.shape == turned[0].shape for tensor in turned) else None


def launch_row_sum(library: NativeLibrary, x: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> Launch | None:
    """The rows of `x`, each times its factor, in one sum."""
    if not are_floats(x, factors, out) or (x.stride(1) != 1 and x.shape[1] != 1) or factors.stride(0) != 1:
        return None
    if (*factors.shape, *out.shape) != x.shape or not out.is_contiguous() or not is_for_one_thread(x):
        return None
    return library.launch("weigh_rows", [out], [x, factors], (*x.shape, x.stride(0)))
