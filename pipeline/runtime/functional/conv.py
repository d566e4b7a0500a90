"""Convolution, pooling and resizing. Pads are in ONNX order: every begin, then every end.

Everything is padded first, so that torch's operators run without pads: sides that differ need no further case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.functional.base import Attrs, Form, Ins, Specs
from pipeline.runtime.tensors import torch_dtype

MAX_POOL = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
AVERAGE_POOL = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


def convolve(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    begins, ends = _halves(attrs["pads"])
    x, pads = ins[0], begins
    if begins != ends:
        x, pads = _pad(x, begins, ends, 0.0), [0] * len(begins)
    bias = ins[2] if len(ins) == 3 else None
    none = [0] * len(begins)
    return torch.convolution(x, ins[1], bias, attrs["strides"], pads, attrs["dilations"], False, none, attrs["group"])


def transpose_convolve(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    """Pads take rows away from the result, at both sides."""
    begins, _ = _halves(attrs["pads"])
    none = [0] * len(begins)
    bias = ins[2] if len(ins) == 3 else None
    strides, dilations, extra = attrs["strides"], attrs["dilations"], attrs["output_padding"]
    full = torch.convolution(ins[0], ins[1], bias, strides, none, dilations, True, extra, attrs["group"])
    for axis, begin in enumerate(begins, start=2):
        full = full.narrow(axis, begin, outs[0].sizes[axis])
    return full


def max_pool(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    """Integers are pooled in float64, which holds every one that ONNX pools."""
    x, kernel, dilations = ins[0], attrs["kernel"], attrs["dilations"]
    x = x if x.is_floating_point() else x.double()
    begins, _ = _halves(attrs["pads"])
    x = _pad(x, begins, _ends(x, outs, attrs, dilations), float("-inf"))
    pooled = MAX_POOL[len(kernel) - 1](x, kernel, attrs["strides"], 0, dilations)
    return pooled.to(torch_dtype(outs[0].dtype))


def average_pool(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    """The mean over a window and its pads, divided by the share of the elements that count."""
    x, kernel, strides = ins[0], attrs["kernel"], attrs["strides"]
    pool, dims = AVERAGE_POOL[len(kernel) - 1], len(kernel)
    begins, declared = _halves(attrs["pads"])
    ends = _ends(x, outs, attrs, [1] * dims)
    mean = pool(_pad(x, begins, ends, 0.0), kernel, strides)
    counted = x.new_ones((1, 1, *x.shape[2:]))
    inner = [min(end, own) for end, own in zip(ends, declared, strict=True)]
    rest = [end - own for end, own in zip(ends, inner, strict=True)]
    counted = _pad(counted, begins, inner, 1.0 if attrs["count_include_pad"] else 0.0)
    return mean / pool(_pad(counted, [0] * dims, rest, 0.0), kernel, strides)


def global_mean(ins: Ins, _: Attrs, __: Specs) -> torch.Tensor:
    return ins[0].mean(tuple(range(2, ins[0].dim())), keepdim=True)


def global_max(ins: Ins, _: Attrs, __: Specs) -> torch.Tensor:
    return ins[0].amax(tuple(range(2, ins[0].dim())), keepdim=True)


def resize(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    """Each new element of an axis reads one old element, or two with shares that sum up to one."""
    x = ins[0]
    for axis, (scale, size) in enumerate(zip(attrs["scales"], outs[0].sizes, strict=True)):
        old = x.shape[axis]
        if scale == 1 and size == old:
            continue
        at = _positions(old, size, scale, attrs["coordinates"])
        if attrs["mode"] == "nearest":
            x = x.index_select(axis, _nearest(at, attrs["nearest"]).clamp(0, old - 1))
            continue
        at = at.clamp(0, old - 1)
        below = at.floor().long()
        share = (at - below).to(x.dtype).view([-1 if own == axis else 1 for own in range(x.dim())])
        above = (below + 1).clamp(max=old - 1)
        x = x.index_select(axis, below) * (1 - share) + x.index_select(axis, above) * share
    return x if x is not ins[0] else x.clone()


def _positions(old: int, new: int, scale: float, coordinates: str) -> torch.Tensor:
    """The place of each new element among the old ones; the names are those of ONNX's Resize."""
    at = torch.arange(new, dtype=torch.float64)
    match coordinates:
        case "asymmetric":
            return at / scale
        case "align_corners":
            return at * ((old - 1) / (new - 1)) if new > 1 else at * 0
        case "pytorch_half_pixel" if new == 1:
            return at
        case "half_pixel_symmetric":
            shift = old / 2 * (1 - new / (scale * old))
            return shift + (at + 0.5) / scale - 0.5
    return (at + 0.5) / scale - 0.5


def _nearest(at: torch.Tensor, rule: str) -> torch.Tensor:
    if rule == "floor" or rule == "ceil":
        return (at.floor() if rule == "floor" else at.ceil()).long()
    return ((at - 0.5).ceil() if rule == "round_prefer_floor" else (at + 0.5).floor()).long()


def _halves(pads: Sequence[int]) -> tuple[list[int], list[int]]:
    return list(pads[: len(pads) // 2]), list(pads[len(pads) // 2 :])


def _ends(x: torch.Tensor, outs: Specs, attrs: Attrs, dilations: Sequence[int]) -> list[int]:
    """End pads with which the windows of the declared output end exactly at the border; negative ones crop."""
    begins, _ = _halves(attrs["pads"])
    ends = []
    for axis, begin in enumerate(begins):
        last = (outs[0].sizes[axis + 2] - 1) * attrs["strides"][axis]
        window = (attrs["kernel"][axis] - 1) * dilations[axis] + 1
        ends.append(last + window - x.shape[axis + 2] - begin)
    return ends


def _pad(x: torch.Tensor, begins: Sequence[int], ends: Sequence[int], value: float) -> torch.Tensor:
    """Torch wants pairs of pads, the last axis first."""
    pairs = [pad for pair in reversed(list(zip(begins, ends, strict=True))) for pad in pair]
    return functional.pad(x, pairs, value=value) if any(pairs) else x


FORMS: dict[Kind, Form] = {
    Kind.Conv: convolve,
    Kind.ConvTranspose: transpose_convolve,
    Kind.MaxPool: max_pool,
    Kind.AveragePool: average_pool,
    Kind.GlobalAveragePool: global_mean,
    Kind.GlobalMaxPool: global_max,
    Kind.Resize: resize,
}
