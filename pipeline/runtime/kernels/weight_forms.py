"""What a stored weight in a form of its own can do, whether numpy, oneDNN or kernels in C++ chose that form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pipeline.runtime.kernels.base import Launch, Outs
from pipeline.runtime.kernels.packed_memory import PackedMemory
from pipeline.runtime.kernels.post_ops import PLAIN, PostOp


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

    def in_memory(self, memory: PackedMemory) -> ProductWeight:
        """The same in the memory of an equal one, where there is one."""
        ...

    def launch_product(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        after: PostOp = PLAIN,
        other: torch.Tensor | None = None,
    ) -> Launch | None:
        """The product of the rows of `x` with the matrix, plus `other` after the activation.

        `other` has the shape of `out`, and memory of its own. None where strides cannot show rows.
        """
        ...


class PairWeight(Protocol):
    """The stored matrices of two products in a row."""

    @property
    def nbytes(self) -> int:
        """Memory that the weights themselves do not share."""
        ...

    def in_memory(self, memory: PackedMemory) -> PairWeight:
        """The same in the memory of an equal one, where there is one."""
        ...

    def launch_pair(
        self,
        x: torch.Tensor,
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        other: torch.Tensor | None,
        outs: Outs,
        after: PostOp,
    ) -> Launch | None:
        """Both products with `after` between them, plus `other`, which may be the memory of the result.

        The outputs are the result, and what is between the products, which may stay unwritten. None where strides
        cannot show rows.
        """
        ...


class ConvolutionWeight(Protocol):
    """Stored kernels of a convolution in a form of their own, and a bias that goes with them."""

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def nbytes(self) -> int:
        """Memory that the weight itself does not share."""
        ...

    def in_memory(self, memory: PackedMemory) -> ConvolutionWeight:
        """The same in the memory of an equal one, where there is one."""
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
