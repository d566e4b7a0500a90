"""What kernels ask of weights that are packed for them, whoever packed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pipeline.runtime.kernels.base import Launch
from pipeline.runtime.kernels.post_ops import PLAIN, PostOp

__all__ = ["Convolution", "ConvolutionWeight", "ProductWeight"]


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution over two dimensions, with the same pad on both sides."""

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int


class ProductWeight(Protocol):
    """A stored matrix in a form of its own."""

    @property
    def nbytes(self) -> int:
        """Memory that the weight itself does not share."""
        ...

    def launch_product(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, after: PostOp = PLAIN
    ) -> Launch | None:
        """The product of the rows of `x` with the matrix; None where strides cannot show rows."""
        ...


class ConvolutionWeight(Protocol):
    """Stored kernels of a convolution in a form of their own, and a bias that goes with them."""

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def nbytes(self) -> int:
        """Memory that the weight itself does not share."""
        ...

    def launch_convolution(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        other: torch.Tensor | None,
        out: torch.Tensor,
        after: PostOp,
    ) -> Launch | None:
        """`after` of the convolution plus `other`, which may be the memory of `out`; None where strides forbid it."""
        ...
