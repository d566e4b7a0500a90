"""ONNX's QuantizeLinear and DequantizeLinear in torch's operators, with gradients.

Rounding has no gradient, so it takes that of a straight line (Bengio et al. 2013); a number that is rounded beyond the
ends of the format has none. With that, the gradient of a scale that quantize and dequantize share is that of LSQ
(Esser et al. 2020, "Learned step size quantization", equation 3), by the rules of calculus alone:

    q = clamp(round(x / s) + z)      y = (q - z) · s      dy/ds = round(x/s) - x/s  within,  q - z  beyond
"""

from __future__ import annotations

import torch

from pipeline.runtime.tensors import torch_dtype


def quantize(
    self: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    *,
    to: str,
    axis: int = 1,
    block_size: int = 0,
    low: int | None = None,
    high: int | None = None,
    saturate: bool = True,
    as_floats: bool = False,
) -> torch.Tensor:
    """round(self / scale) + zero_point, within the range of the dtype `to`; ties go to even. ONNX's QuantizeLinear.

    self: floats of any shape. 16-bit floats are divided in float32, as a quotient in 16 bits would round twice.
    scale, zero_point: of one element for the whole tensor, of one for each index of `axis`, or, with `block_size`, of
        one for each block of so many indices of `axis`. A float8 is rounded by its cast, and its zero point is 0.
    to: the name of an integer or float8 dtype. low, high: a narrower range of integers.
    saturate: a number that a float8 cannot hold becomes the largest one.
    as_floats: the result has a float dtype and integral values, since integers have no gradient.

    Returns a tensor of the shape of `self`, of the dtype `to`.
    """
    wide = torch.float64 if torch.float64 in (self.dtype, scale.dtype) else torch.float32
    numbers = self.to(wide) / spread(scale.to(wide), self, axis, block_size)
    zero = None if zero_point is None else spread(zero_point.to(wide), self, axis, block_size)
    if to.startswith("float8"):
        numbers = numbers if zero is None else numbers + zero
        return torch.ops.onnxline.cast_float8(numbers, to, saturate)
    numbers = numbers + (numbers.round() - numbers).detach() if as_floats else numbers.round()
    numbers = numbers if zero is None else numbers + zero
    limits = torch.iinfo(torch_dtype(to))
    numbers = numbers.clamp(limits.min if low is None else low, limits.max if high is None else high)
    return numbers if as_floats else numbers.to(torch_dtype(to))


def dequantize(
    self: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    *,
    to: str,
    axis: int = 1,
    block_size: int = 0,
) -> torch.Tensor:
    """(self - zero_point) · scale, of the float dtype `to`. ONNX's DequantizeLinear.

    self: integers or float8 of any shape. The difference is taken in float32, which holds integers of up to 24 bits
        exactly, and in float64 for integers of 32 bits.
    scale, zero_point, axis, block_size: as in `quantize`.
    """
    large = self.dtype in (torch.int32, torch.uint32)
    wide = torch.float64 if to == "float64" or large else torch.float32
    numbers = self.to(wide)
    if zero_point is not None:
        numbers = numbers - spread(zero_point.to(wide), self, axis, block_size)
    return (numbers * spread(scale.to(wide), self, axis, block_size)).to(torch_dtype(to))


def spread(parameters: torch.Tensor, x: torch.Tensor, axis: int, block_size: int) -> torch.Tensor:
    """Scales or zero points so that they broadcast to `x`: one for all, for each index of an axis, or each block."""
    if parameters.numel() == 1:
        return parameters.reshape(())
    if block_size:
        return parameters.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    return parameters.view([-1 if own == axis % x.dim() else 1 for own in range(x.dim())])
