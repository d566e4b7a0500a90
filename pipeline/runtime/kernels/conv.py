"""Convolution, pooling and resizing, 1 to 3 spatial dimensions. Pads are in ONNX order: every begin, then every end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from pipeline.ir.graph import TensorSpec
from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs, each_time
from pipeline.runtime.kernels.launches import in_turn
from pipeline.runtime.kernels.max_pool import PoolWindow, launch_max_pool
from pipeline.runtime.kernels.packing import PackedWeight, Packer, Stored, launch_convolution, pack_convolution
from pipeline.runtime.kernels.weight_forms import Convolution

NEAREST = {
    "round_prefer_floor": lambda places: torch.ceil(places - 0.5),
    "round_prefer_ceil": lambda places: torch.floor(places + 0.5),
    "floor": torch.floor,
    "ceil": torch.ceil,
}
MAX_POOL = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
AVERAGE_POOL: dict[int, Any] = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}


def conv(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    packed, bias = attrs.get("packed"), ins[2] if len(ins) == 3 else None
    if packed is None:
        return partial(_convolve, outs[0], ins[0], ins[1], bias, attrs)
    return launch_convolution(packed, ins[0], bias, outs[0], _convolution(attrs))


def _convolve(out: torch.Tensor, x: torch.Tensor, weight: Any, bias: Any, attrs: Attrs) -> None:
    x, pads = pad_sides(x, attrs["pads"])
    zeros, group = [0] * len(pads), attrs["group"]
    out.copy_(torch.convolution(x, weight, bias, attrs["strides"], pads, attrs["dilations"], False, zeros, group))


def pad_sides(x: torch.Tensor, pads: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """`x`, and the pads that are left for the convolution: torch has one number for both sides of an axis."""
    begins, ends = _sides(pads)
    return (x, begins) if begins == ends else (_pad(x, begins, ends, 0), [0] * len(begins))


def pack_conv(attrs: Attrs, specs: Sequence[TensorSpec], stored: Stored) -> PackedWeight | None:
    """Where both sides of each axis have the same pad."""
    begins, ends = _sides(attrs["pads"])
    return pack_convolution(specs[0], stored.get(1), _convolution(attrs)) if begins == ends else None


def _convolution(attrs: Attrs) -> Convolution:
    return Convolution(attrs["strides"], tuple(_sides(attrs["pads"])[0]), attrs["dilations"], attrs["group"])


def conv_transpose(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """Unpadded, then cropped: a pad takes away rows of a transposed convolution, and the sides may differ."""
    begins, _ = _sides(attrs["pads"])
    bias = ins[2] if len(ins) == 3 else None
    strides, dilations, extra = attrs["strides"], attrs["dilations"], attrs["output_padding"]
    result = torch.convolution(ins[0], ins[1], bias, strides, [0] * len(begins), dilations, True, extra, attrs["group"])
    for axis, begin in enumerate(begins, start=2):
        result = result.narrow(axis, begin, outs[0].shape[axis])
    outs[0].copy_(result)


def max_pool(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    if not outs[0].numel():  # no window fits into the image, which torch refuses
        return in_turn()
    window = PoolWindow(attrs["kernel"], attrs["strides"], _sides(attrs["pads"])[0], attrs["dilations"])
    return launch_max_pool(ins[0], outs[0], window) or partial(_pool_large_windows, ins, outs, attrs)


def _pool_large_windows(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    x, out = ins[0], outs[0]
    kernel, strides, dilations = attrs["kernel"], attrs["strides"], attrs["dilations"]
    if not x.is_floating_point():
        x = x.double()  # torch pools no int8; every integer that ONNX pools is exact in double
    lowest = float("-inf")
    begins, ends = _window_pads(x, out, attrs["pads"], kernel, strides, dilations)
    pads = [0] * len(begins)
    if begins == ends and all(2 * begin <= size for begin, size in zip(begins, kernel, strict=True)):
        pads = begins
    else:
        x = _pad(x, begins, ends, lowest)
    out.copy_(MAX_POOL[len(kernel)](x, kernel, strides, pads, dilations))


def average_pool(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """The sum of a window over the number of elements that count: the real ones, and with `count_include_pad` the
    declared pads too. The overhang of `ceil_mode` never counts."""
    if not outs[0].numel():  # as for `max_pool`
        return
    x, kernel, strides = ins[0], attrs["kernel"], attrs["strides"]
    pool, none = AVERAGE_POOL[len(kernel)], [0] * len(kernel)
    begins, ends = _window_pads(x, outs[0], attrs["pads"], kernel, strides, [1] * len(kernel))
    declared = _sides(attrs["pads"])[1] if attrs["count_include_pad"] else none
    overhang = [end - own for end, own in zip(ends, declared, strict=True)]
    average = pool(_pad(x, begins, ends, 0), kernel, strides)
    if max(overhang) <= 0 and (attrs["count_include_pad"] or not any(begins)):
        outs[0].copy_(average)
        return
    counted = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype)
    counted = _pad(counted, begins, declared, 1 if attrs["count_include_pad"] else 0)
    share = pool(_pad(counted, none, overhang, 0), kernel, strides)
    # Both are averages over whole windows, so the size of the window cancels.
    torch.div(average, share, out=outs[0])


def global_average_pool(ins: Ins, outs: Outs, _: Attrs) -> None:
    torch.mean(ins[0], dim=list(range(2, ins[0].dim())), keepdim=True, out=outs[0])


def global_max_pool(ins: Ins, outs: Outs, _: Attrs) -> None:
    torch.amax(ins[0], dim=list(range(2, ins[0].dim())), keepdim=True, out=outs[0])


def resize(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """One axis after the other: nearest picks an element, linear interpolates between two."""
    x, out = ins[0], outs[0]
    for axis, scale in enumerate(attrs["scales"]):
        size = x.shape[axis]
        if scale == 1 and size == out.shape[axis]:
            continue
        places = _places(size, out.shape[axis], scale, attrs["coordinates"])
        if attrs["mode"] == "nearest":
            x = x.index_select(axis, NEAREST[attrs["nearest"]](places).long().clamp(0, size - 1))
            continue
        places = places.clamp(0, size - 1)
        low = places.long()
        share = (places - low).to(x.dtype).reshape([-1 if at == axis else 1 for at in range(x.dim())])
        x = torch.lerp(x.index_select(axis, low), x.index_select(axis, (low + 1).clamp(max=size - 1)), share)
    out.copy_(x)


def _places(size: int, new_size: int, scale: float, coordinates: str) -> torch.Tensor:
    """The position of each new element among the old ones, by the formulas of ONNX's Resize."""
    at = torch.arange(new_size, dtype=torch.float64)
    if coordinates == "asymmetric":
        return at / scale
    if coordinates == "align_corners":
        return at * ((size - 1) / max(new_size - 1, 1))
    if coordinates == "pytorch_half_pixel" and new_size == 1:
        return at
    places = (at + 0.5) / scale - 0.5
    if coordinates == "half_pixel_symmetric":
        places += size / 2 * (1 - new_size / (scale * size))
    return places


def _sides(pads: Sequence[int]) -> tuple[list[int], list[int]]:
    half = len(pads) // 2
    return list(pads[:half]), list(pads[half:])


def _pad(x: torch.Tensor, begins: Sequence[int], ends: Sequence[int], value: float) -> torch.Tensor:
    """`x` with its spatial dims padded; a negative pad crops. Torch wants pairs, the last dimension first."""
    pairs = [pad for begin, end in zip(reversed(begins), reversed(ends), strict=True) for pad in (begin, end)]
    return functional.pad(x, pairs, value=value) if any(pairs) else x


def _window_pads(
    x: torch.Tensor,
    out: torch.Tensor,
    pads: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[list[int], list[int]]:
    """(begins, ends) that make exactly the output's number of windows fit, whatever ceil_mode and the end pads say.

    ONNX and torch disagree on the last window of ceil_mode; the declared output shape has decided already.
    """
    begins, declared = _sides(pads)
    ends = []
    for axis, (begin, end) in enumerate(zip(begins, declared, strict=True)):
        size, windows = x.shape[axis + 2], out.shape[axis + 2]
        reach = (windows - 1) * strides[axis] + (kernel[axis] - 1) * dilations[axis] + 1
        # Rows past the last window do not matter, so the declared pad is kept where it adds no window.
        fits = (size + begin + end - reach) // strides[axis] == 0 and size + begin + end >= reach
        ends.append(end if fits else reach - size - begin)
    return begins, ends


KERNELS: dict[Kind, Kernel] = {
    Kind.Conv: conv,
    Kind.ConvTranspose: each_time(conv_transpose),
    Kind.MaxPool: max_pool,
    Kind.AveragePool: each_time(average_pool),
    Kind.GlobalAveragePool: each_time(global_average_pool),
    Kind.GlobalMaxPool: each_time(global_max_pool),
    Kind.Resize: each_time(resize),
}

PACKERS: dict[Kind, Packer] = {Kind.Conv: pack_conv}
