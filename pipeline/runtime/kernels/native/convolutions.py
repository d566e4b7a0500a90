"""Convolutions over images with channels last: of one pixel as products, and of 3 × 3 pixels by Winograd's tiles.

Winograd's F(2 × 2, 3 × 3) takes 16 multiplications where the sums of the definition take 36. Its roundings are about as
large as theirs; but each result is computed from 4 × 4 pixels, so that an infinite number, or NaN, makes NaN of all
results of its tiles, also of those one pixel further away than the kernel reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from pipeline.ir.graph import TensorSpec
from pipeline.runtime.kernels.base import Launch
from pipeline.runtime.kernels.native.activations import settings_of
from pipeline.runtime.kernels.native.library import NativeLibrary, are_floats, as_rows
from pipeline.runtime.kernels.native.products import NativeWeight, is_for_one_thread, pack_panels
from pipeline.runtime.kernels.packed_memory import PackedMemory
from pipeline.runtime.kernels.post_ops import PostOp
from pipeline.runtime.kernels.weight_forms import Convolution, ConvolutionWeight

__all__ = ["pack_native_convolution"]

CHANNELS_LAST = (0, 2, 3, 1)

TRANSFORM = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
"""Three numbers of a kernel become four, by which those of a tile are multiplied."""

PLACES, SIDE = 16, 2
"""Numbers of a tile of 4 × 4, and results on each of its sides."""

SHARE_OF_POINTS, SHARE_OF_TILES, FIXED = 1.05, 0.6, 2**20
"""oneDNN is slower up to so many multiplications of ours for each one of the definition (ours are also those of panels
and vectors that are not full), and as slow as so many by its call alone. benchmarks/RESULTS.md has the measurement."""


def pack_native_convolution(
    library: NativeLibrary, x: TensorSpec, weight: torch.Tensor, shape: Convolution, bias: torch.Tensor | None
) -> ConvolutionWeight | None:
    """Pack the kernels `weight` (columns, channels, height, width) for images of the sizes of `x` (channels first).

    `bias`: one that goes with the weight. None where oneDNN computes such a convolution, or is faster.
    """
    if weight.dim() != 4 or weight.dtype is not torch.float32 or not weight.numel() or shape.groups != 1:
        return None
    if not is_for_one_thread(x.numel // x.sizes[1] * weight.numel()):
        return None
    size = tuple(weight.shape[2:])
    if size == (1, 1) and not any(shape.pads) and _is_faster_by_points(library, x, weight, shape):
        matrix = pack_panels(library, 1, weight.flatten(1))
        return matrix and PointWeight(matrix, shape.strides, bias)
    plain = shape.strides == shape.dilations == (1, 1)
    if size == (3, 3) and plain and _is_faster_by_tiles(library, x, weight, shape):
        return TileWeight(library, _pack_tiles(library, weight), shape.pads, bias)
    return None


def _is_faster_by_points(library: NativeLibrary, x: TensorSpec, weight: torch.Tensor, shape: Convolution) -> bool:
    pixels = x.sizes[0] * math.prod(-(-size // step) for size, step in zip(x.sizes[2:], shape.strides, strict=True))
    ours = pixels * _round_up(weight.shape[0], library.panel) * weight.shape[1]
    return ours <= SHARE_OF_POINTS * pixels * weight.numel() + FIXED


def _is_faster_by_tiles(library: NativeLibrary, x: TensorSpec, weight: torch.Tensor, shape: Convolution) -> bool:
    sides = [size + 2 * pad - 2 for size, pad in zip(x.sizes[2:], shape.pads, strict=True)]
    columns, channels = _round_up(weight.shape[0], library.panel), _round_up(weight.shape[1], library.panel // 2)
    ours = math.prod(-(-side // SIDE) for side in sides) * PLACES * columns * channels
    return x.sizes[0] * ours <= SHARE_OF_TILES * x.sizes[0] * math.prod(sides) * weight.numel() + FIXED


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _pack_tiles(library: NativeLibrary, weight: torch.Tensor) -> torch.Tensor:
    """(panels, 16 places, channels, columns of a panel)"""
    transform = torch.tensor(TRANSFORM, dtype=torch.float64)
    tiles = torch.einsum("ih,jw,ochw->ijco", transform, transform, weight.double()).flatten(0, 1).float()
    padded = functional.pad(tiles, (0, -weight.shape[0] % library.panel))
    return padded.unflatten(2, (-1, library.panel)).permute(2, 0, 1, 3).contiguous()


@dataclass(frozen=True, slots=True)
class ImageOperands:
    """What a convolution reads and writes, with channels last and side by side."""

    x: torch.Tensor
    bias: torch.Tensor | None
    other: torch.Tensor | None
    out: torch.Tensor

    @classmethod
    def find(
        cls, x: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None, out: torch.Tensor
    ) -> ImageOperands | None:
        """For tensors with channels first; None where the kernels do not take them."""
        given = [tensor for tensor in (x, out, other, bias) if tensor is not None]
        other = None if other is None else other.expand(out.shape).permute(CHANNELS_LAST)
        x, out = x.permute(CHANNELS_LAST), out.permute(CHANNELS_LAST)
        if not are_floats(*given) or not out.is_contiguous() or (bias is not None and not bias.is_contiguous()):
            return None
        dense = all(images is None or images.stride(3) == 1 or images.shape[3] == 1 for images in (x, other))
        return cls(x, bias, other, out) if dense else None

    @property
    def added(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in (self.bias, self.other) if tensor is not None)

    @property
    def has(self) -> tuple[int, int]:
        return int(self.bias is not None), int(self.other is not None)


@dataclass(frozen=True, slots=True)
class PointWeight:
    """Kernels of one pixel: a matrix."""

    matrix: NativeWeight
    strides: tuple[int, ...]
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def in_memory(self, memory: PackedMemory) -> PointWeight:
        """See `ConvolutionWeight`."""
        return replace(self, matrix=self.matrix.in_memory(memory))

    def launch_convolution(
        self, x: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None, out: torch.Tensor, after: PostOp
    ) -> Launch | None:
        """See `ConvolutionWeight`."""
        operands = ImageOperands.find(x, bias, other, out)
        if operands is None:
            return None
        added = operands.out if operands.other is None else operands.other
        rows = as_rows(added)
        if rows is None:
            return None
        settings = (*self._settings_of_pixels(operands.x), *operands.has, rows.stride(0), *settings_of(after))
        return self.matrix.library.launch(
            "convolve_points", [operands.out], [operands.x, self.matrix.panels, *operands.added], settings
        )

    def _settings_of_pixels(self, x: torch.Tensor) -> tuple[int, ...]:
        """All pixels as rows of one matrix, or else those of one image after the other, in lines."""
        down, across = self.strides
        pixels = x[:, ::down, ::across]
        sizes = (self.matrix.columns, self.matrix.inner)
        rows = as_rows(pixels)
        if rows is not None:
            return (1, 0, len(rows), *sizes, rows.stride(0), 0, 0)
        images, lines, width = pixels.shape[:3]
        return (images, pixels.stride(0), lines * width, *sizes, pixels.stride(2), width, pixels.stride(1))


@dataclass(frozen=True, slots=True)
class TileWeight:
    """Kernels of 3 × 3 pixels, each as the 16 numbers by which those of a tile are multiplied."""

    library: NativeLibrary
    panels: torch.Tensor
    pads: tuple[int, ...]
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def in_memory(self, memory: PackedMemory) -> TileWeight:
        """See `ConvolutionWeight`."""
        return replace(self, panels=memory.share(self.panels))

    def launch_convolution(
        self, x: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None, out: torch.Tensor, after: PostOp
    ) -> Launch | None:
        """See `ConvolutionWeight`."""
        operands = ImageOperands.find(x, bias, other, out)
        if operands is None:
            return None
        images, height, width, channels = operands.x.shape
        _, out_height, out_width, columns = operands.out.shape
        added = operands.out if operands.other is None else operands.other
        strides = [stride for tensor in (operands.x, operands.out, added) for stride in tensor.stride()[:3]]
        sizes = (images, height, width, channels, columns, *self.pads, out_height, out_width)
        return self.library.launch(
            "convolve_tiles",
            [operands.out],
            [operands.x, self.panels, *operands.added],
            (*sizes, *strides, *operands.has, *settings_of(after)),
        )
