"""Convolutions over images with channels last: of one pixel as products, of 3 × 3 pixels by Winograd's tiles, and of
any size over few channels as products with stretches of lines.

Winograd's F(2 × 2, 3 × 3) takes 16 multiplications where the sums of the definition take 36. Its roundings are about as
large as theirs; but each result is computed from 4 × 4 pixels, so that an infinite number, or NaN, makes NaN of all
results of its tiles, also of those one pixel further away than the kernel reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch.nn import functional

from pipeline.ir.graph import TensorSpec
from pipeline.runtime.kernels.base import Launch, in_turn
from pipeline.runtime.kernels.native.kernel_library import NativeLibrary, are_floats, as_rows
from pipeline.runtime.kernels.native.products import NativeWeight, is_faster_alone, pack_panels
from pipeline.runtime.kernels.native.rows import settings_of
from pipeline.runtime.kernels.weight_forms import Convolution, ConvolutionWeight, FusedOperands, PackedMemory

CHANNELS_LAST = (0, 2, 3, 1)

TRANSFORM = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
"""Three elements of a kernel become four, by which those of a tile are multiplied."""

PLACES, SIDE = 16, 2
"""Elements of a tile of 4 × 4, and results on each of its sides."""

SHARE_OF_PRODUCTS, SHARE_OF_TILES, FIXED = 1.05, 0.6, 2**20
"""oneDNN is slower than our kernels while these do at most this many multiplications for each multiplication of the
definition (they fill up panels and vectors); a call of oneDNN alone costs `FIXED` of them. benchmarks/RESULTS.md has
the measurement."""


def pack_native_convolution(
    library: NativeLibrary, x: TensorSpec, weight: torch.Tensor, shape: Convolution, bias: torch.Tensor | None
) -> ConvolutionWeight | None:
    """Pack the kernels `weight` (columns, channels, height, width) for images of the sizes of `x` (channels first).

    `bias`: one that goes with the weight. None where oneDNN computes such a convolution, or is faster.
    """
    if weight.dim() != 4 or weight.dtype is not torch.float32 or not weight.numel() or shape.groups != 1:
        return None
    if not is_faster_alone(x.numel // x.sizes[1] * weight.numel()):
        return None
    kernels, (down, across) = Kernels(tuple(weight.shape), shape), weight.shape[2:]
    if (down, across) == (1, 1) and not any(shape.pads):
        matrix = _pack_matrix(library, x, weight, shape)
        return matrix and PointWeight(matrix, kernels, bias)
    if shape.dilations != (1, 1):
        return None
    if (down, across) == (3, 3) and shape.strides == (1, 1) and _is_faster_by_tiles(library, x, weight, shape):
        return TileWeight(library, _pack_tiles(library, weight), kernels, bias)
    matrix = _pack_matrix(library, x, weight, shape) if weight.shape[1] < library.lanes else None
    return matrix and LineWeight(matrix, kernels, bias)


def _pack_matrix(
    library: NativeLibrary, x: TensorSpec, weight: torch.Tensor, shape: Convolution
) -> NativeWeight | None:
    """The kernels as rows of a matrix; None where too many columns of its panels are empty."""
    pixels = x.sizes[0] * math.prod(Kernels(tuple(weight.shape), shape).sides_of_result(x.sizes[2:]))
    ours = pixels * _round_up(weight.shape[0], library.panel) * weight[0].numel()
    if ours > SHARE_OF_PRODUCTS * pixels * weight.numel() + FIXED:
        return None
    return pack_panels(library, 1, weight.permute(CHANNELS_LAST).flatten(1))


def _is_faster_by_tiles(library: NativeLibrary, x: TensorSpec, weight: torch.Tensor, shape: Convolution) -> bool:
    sides = Kernels(tuple(weight.shape), shape).sides_of_result(x.sizes[2:])
    tiles = x.sizes[0] * math.prod(_round_up(side, SIDE) // SIDE for side in sides)
    ours = tiles * PLACES * _round_up(weight.shape[0], library.panel) * _round_up(weight.shape[1], library.lanes)
    return ours <= SHARE_OF_TILES * x.sizes[0] * math.prod(sides) * weight.numel() + FIXED


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _pack_tiles(library: NativeLibrary, weight: torch.Tensor) -> torch.Tensor:
    """(panels, 16 places, channels, columns of a panel)"""
    transform = torch.tensor(TRANSFORM, dtype=torch.float64)
    tiles = torch.einsum("ih,jw,ochw->ijco", transform, transform, weight.double()).flatten(0, 1).float()
    padded = functional.pad(tiles, (0, -weight.shape[0] % library.panel))
    return padded.unflatten(2, (-1, library.panel)).permute(2, 0, 1, 3).contiguous()


@dataclass(frozen=True, slots=True)
class Kernels:
    """The sizes of kernels (columns, channels, height, width), and how they are moved over images."""

    sizes: tuple[int, ...]
    shape: Convolution

    def sides_of_result(self, sides: Sequence[int]) -> list[int]:
        axes = zip(sides, self.sizes[2:], self.shape.pads, self.shape.strides, strict=True)
        return [(size + 2 * pad - kernel) // stride + 1 for size, kernel, pad, stride in axes]

    def fit(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> bool:
        """Whether tensors with channels first have the sizes of one call."""
        wanted = (x.shape[0], self.sizes[0], *self.sides_of_result(x.shape[2:]))
        return x.shape[1] == self.sizes[1] and out.shape == wanted and (bias is None or bias.shape == wanted[1:2])


@dataclass(frozen=True, slots=True)
class ImageOperands:
    """What a convolution reads and writes, with channels last."""

    x: torch.Tensor
    bias: torch.Tensor | None
    other: torch.Tensor | None
    out: torch.Tensor

    @classmethod
    def find(cls, kernels: Kernels, of: FusedOperands) -> ImageOperands | None:
        """For tensors with channels first; None where our kernels do not take them."""
        x, out, bias, other, _ = of
        if not kernels.fit(x, bias, out):
            return None
        given = [tensor for tensor in (x, out, other, bias) if tensor is not None]
        other = None if other is None else other.expand(out.shape).permute(CHANNELS_LAST)
        x, out = x.permute(CHANNELS_LAST), out.permute(CHANNELS_LAST)
        if not are_floats(*given) or not out.is_contiguous() or (bias is not None and not bias.is_contiguous()):
            return None
        return cls(x, bias, other, out) if other is None or _is_side_by_side(other) else None

    @property
    def added(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in (self.bias, self.other) if tensor is not None)

    @property
    def has(self) -> tuple[int, int]:
        return int(self.bias is not None), int(self.other is not None)

    def launch_dense(self, bind: Callable[[torch.Tensor], Launch]) -> Launch:
        """`bind(x)`, after a copy where the channels of `x` do not lie side by side."""
        if _is_side_by_side(self.x):
            return bind(self.x)
        dense = torch.empty(self.x.shape)
        return in_turn(partial(dense.copy_, self.x), bind(dense))


def _is_side_by_side(images: torch.Tensor) -> bool:
    return images.stride(3) == 1 or images.shape[3] == 1


@dataclass(frozen=True, slots=True)
class MatrixKernels:
    """Kernels of a convolution as a matrix, by which pixels or stretches of lines are multiplied."""

    matrix: NativeWeight
    kernels: Kernels
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def in_memory(self, memory: PackedMemory) -> Self:
        """See `ConvolutionWeight`."""
        return replace(self, matrix=self.matrix.in_memory(memory))


@dataclass(frozen=True, slots=True)
class PointWeight(MatrixKernels):
    """Kernels of one pixel: a matrix."""

    def launch(self, of: FusedOperands) -> Launch | None:
        """See `ConvolutionWeight`."""
        operands = ImageOperands.find(self.kernels, of)
        if operands is None:
            return None
        added = operands.out if operands.other is None else operands.other
        rows = as_rows(added)
        if rows is None:
            return None
        rest = (*operands.has, rows.stride(0), *settings_of(of.after))
        return operands.launch_dense(
            lambda x: self.matrix.native.launch(
                "convolve_points",
                [operands.out],
                [x, self.matrix.panels, *operands.added],
                (*self._settings_of_pixels(x), *rest),
            )
        )

    def _settings_of_pixels(self, x: torch.Tensor) -> tuple[int, ...]:
        """All pixels as rows of one matrix, or else the pixels of each image in turn, in lines."""
        down, across = self.kernels.shape.strides
        pixels = x[:, ::down, ::across]
        sizes = (self.matrix.columns, self.matrix.inner)
        rows = as_rows(pixels)
        if rows is not None:
            return (1, 0, len(rows), *sizes, rows.stride(0), 0, 0)
        images, lines, width = pixels.shape[:3]
        return (images, pixels.stride(0), lines * width, *sizes, pixels.stride(2), width, pixels.stride(1))


@dataclass(frozen=True, slots=True)
class TileWeight:
    """Kernels of 3 × 3 pixels, each as the 16 factors by which those of a tile are multiplied."""

    native: NativeLibrary
    panels: torch.Tensor
    kernels: Kernels
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def in_memory(self, memory: PackedMemory) -> TileWeight:
        """See `ConvolutionWeight`."""
        return replace(self, panels=memory.share(self.panels))

    def launch(self, of: FusedOperands) -> Launch | None:
        """See `ConvolutionWeight`."""
        operands = ImageOperands.find(self.kernels, of)
        if operands is None:
            return None
        out, added = operands.out, operands.out if operands.other is None else operands.other
        sizes = (*operands.x.shape, out.shape[3], *self.kernels.shape.pads, *out.shape[1:3])
        rest = (*out.stride()[:3], *added.stride()[:3], *operands.has, *settings_of(of.after))
        return operands.launch_dense(
            lambda x: self.native.launch(
                "convolve_tiles", [out], [x, self.panels, *operands.added], (*sizes, *x.stride()[:3], *rest)
            )
        )


@dataclass(frozen=True, slots=True)
class LineWeight(MatrixKernels):
    """Kernels of any size over few channels: a matrix, of which each line of a kernel reads one stretch of an image."""

    def launch(self, of: FusedOperands) -> Launch | None:
        """See `ConvolutionWeight`."""
        operands = ImageOperands.find(self.kernels, of)
        if operands is None:
            return None
        rows = as_rows(operands.out if operands.other is None else operands.other)
        if rows is None:
            return None
        kernels, shape = self.kernels.sizes, self.kernels.shape
        sizes = (*operands.x.shape, kernels[0], *kernels[2:], *shape.strides, *shape.pads)
        settings = (*sizes, *operands.out.shape[1:3], *operands.x.stride(), *operands.has, rows.stride(0))
        return self.matrix.native.launch(
            "convolve_lines",
            [operands.out],
            [operands.x, self.matrix.panels, *operands.added],
            (*settings, *settings_of(of.after)),
        )
