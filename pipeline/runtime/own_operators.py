"""The operators of the namespace `onnxline`: what ONNX means and torch cannot say in a few calls.

Each is registered once, with the function that computes it, a fake (shape and dtype of the result), and a gradient
where it has one. So torch runs, traces and differentiates these operators like its own, and a plan calls them by their
row in `pipeline.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from torch import library

from pipeline.runtime import own_layers
from pipeline.runtime.own_quantize import dequantize, quantize
from pipeline.runtime.own_random import DRAWS
from pipeline.runtime.tensors import NOT_IN_NUMPY, torch_dtype


@library.custom_op("onnxline::unsigned", mutates_args=())
def unsigned(self: torch.Tensor, other: torch.Tensor, function: str) -> torch.Tensor:
    """Arithmetic of unsigned integers of 16 bits and more, which torch's CPU lacks; numpy computes it.

    `function` is a key of `UNSIGNED_FUNCTIONS`. Numbers wrap around, and a quotient is rounded down.
    """
    out = torch.empty_like(fake_unsigned(self, other, function))
    compute_unsigned(function, self, other, out)
    return out


@unsigned.register_fake
def fake_unsigned(self: torch.Tensor, other: torch.Tensor, function: str) -> torch.Tensor:
    dtype = torch.bool if function in COMPARISONS else self.dtype
    return self.new_empty(torch.broadcast_shapes(self.shape, other.shape), dtype=dtype)


def compute_unsigned(function: str, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """`unsigned`, written into `out`."""
    with np.errstate(all="ignore"):  # the standard does not define a quotient by 0
        UNSIGNED_FUNCTIONS[function](left.numpy(), right.numpy(), out=out.numpy())


COMPARISONS: Mapping[str, Callable[..., Any]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}

UNSIGNED_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "div": np.floor_divide,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "remainder": np.remainder,
    **COMPARISONS,
}
"""The functions of `onnxline::unsigned`, by torch's names; what torch computes itself is not among them."""


@library.custom_op("onnxline::cast_float8", mutates_args=())
def cast_float8(self: torch.Tensor, to: str, saturate: bool = True) -> torch.Tensor:
    """A conversion of floats to a float8 type, as ONNX's table for `saturate` has it.

    Saturated, a number that is too large becomes the largest one. Otherwise it becomes NaN or infinity, whichever the
    type has; torch 2.13 saturates in one type, so ml_dtypes rounds.
    """
    dtype = torch_dtype(to)
    if saturate:
        limit = torch.finfo(dtype).max
        return self.float().clamp(-limit, limit).to(dtype)
    x = self.float() if self.dtype in NOT_IN_NUMPY else self
    with np.errstate(all="ignore"):
        narrow = x.numpy().astype(np.dtype(getattr(ml_dtypes, to)))
    return torch.from_numpy(narrow.view(np.uint8)).view(dtype)


@cast_float8.register_fake
def fake_cast_float8(self: torch.Tensor, to: str, saturate: bool = True) -> torch.Tensor:
    return torch.empty_like(self, dtype=torch_dtype(to))


def save_dtype(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def cast_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return gradient.to(ctx.dtype), None, None


cast_float8.register_autograd(cast_back, setup_context=save_dtype)


COMPOSED = (own_layers.recurrent, own_layers.roi_align, own_layers.top_k, quantize, dequantize)
"""Functions of torch's own operators: torch sees through them, so they need no fake and no gradient."""

LIBRARY: Final = library.Library("onnxline", "FRAGMENT")
"""It has to live as long as its operators."""

for function in COMPOSED:
    LIBRARY.define(function.__name__ + library.infer_schema(function, mutates_args=()))
    LIBRARY.impl(function.__name__, function, "CompositeImplicitAutograd")

for schema, draw in DRAWS.items():
    LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,))
    LIBRARY.impl(draw.__name__, draw, "CompositeImplicitAutograd")
