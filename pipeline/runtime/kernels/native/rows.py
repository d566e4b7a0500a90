"""Normalisation, softmax and attention: what is computed row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs
from pipeline.runtime.kernels.native.kernel_library import (
    NativeKernel,
    NativeLibrary,
    are_floats,
    as_rows,
    is_dense_like,
    is_for_one_thread,
)


def launch_norm(
    library: NativeLibrary, x: torch.Tensor, weights: Sequence[torch.Tensor], over: Sequence[int], eps: float,
    out: torch.Tensor, *, is_centered: bool,
) -> Launch | None:  # fmt: skip
    """Over the last axes, of the sizes `over`; not centered, it divides by the root of the mean square."""
    columns, sizes = math.prod(over), torch.Size(over)
    if not are_floats(x, *weights, out) or any(item.shape != sizes or not item.is_contiguous() for item in weights):
        return None
    if not weights or not is_dense_like(out, x) or not is_for_one_thread(out):
        return None
    rows = as_rows(x.flatten(x.dim() - len(over))) if x.is_contiguous() else as_rows(x)
    if rows is None or rows.shape[1] != columns:
        return None
    settings = (len(rows), columns, rows.stride(0), int(len(weights) == 2), int(is_centered), float(eps))
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
    if not attrs["scale"] >= 0 or not is_for_one_thread(outs[0]):
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


KERNELS: dict[Kind, NativeKernel] = {
    Kind.SmallAttention: small_attention,
    Kind.ScaledDotProductAttention: attention,
}
