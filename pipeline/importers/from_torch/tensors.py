"""Tensors of the traced program: their spec, strides, named sizes and bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch._subclasses import FakeTensor

from pipeline.errors import Unsupported
from pipeline.ir import DTYPE_BITS, Dim, Role, SymExpr, TensorSpec
from pipeline.ir.builder import ValueDecl

__all__ = ["TensorPayload", "Tensors", "holds_values", "is_contiguous"]

SYMBOL = re.compile(r"[A-Za-z_]\w*")

Described = tuple[TensorSpec, tuple[Dim, ...] | None]
"""Spec, and strides where they are not those of a contiguous tensor."""


class Tensors:
    """Reads fake tensors. `dims` renames torch's symbols: {"s77": "batch"}.

    A value on the meta device gets the device `cpu`, where it would be run.
    """

    def __init__(self, dims: Mapping[str, str]) -> None:
        self._dims = dims
        self._seen: dict[tuple[object, ...], Described] = {}

    def stub(self, name: str, tensor: torch.Tensor, role: Role) -> ValueDecl:
        """The value `name`, as `tensor` describes it.

        Raises:
            Unsupported: a dtype that the IR has not, or a tensor that is not strided.
        """
        key = (
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if has_fixed_sizes(tensor.shape)
            else (id(tensor),)
        )
        described = self._seen.get(key)
        if described is None:
            described = self._seen[key] = self._describe(name, tensor)
        return ValueDecl(name, described[0], role, described[1])

    def size(self, number: torch.SymInt | torch.SymFloat | torch.SymBool) -> SymExpr | int:
        """A number, or how it follows from named dims.

        Raises:
            Unsupported: it follows from the numbers in a tensor.
        """
        dim = self._dim(number)
        return SymExpr(dim) if isinstance(dim, str) else dim

    def _describe(self, name: str, tensor: torch.Tensor) -> Described:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout is not torch.strided or dtype not in DTYPE_BITS:
            raise Unsupported(
                f"value {name!r} is {tensor.dtype} and {tensor.layout}; the IR holds strided tensors of "
                f"{', '.join(DTYPE_BITS)}: convert it before it reaches the model"
            )
        shape = tuple(map(self._dim, tensor.shape))
        strides = tuple(map(self._dim, tensor.stride()))
        device = "cpu" if tensor.device.type == "meta" else str(tensor.device)
        return TensorSpec(shape, dtype, device), None if is_contiguous(tensor) else strides

    def _dim(self, number: torch.SymInt | torch.SymFloat | torch.SymBool | int) -> Dim:
        if type(number) is int:
            return number
        text = str(number)
        if text.lstrip("-").isdigit():
            return int(text)
        if any(UNBACKED.fullmatch(symbol) for symbol in SYMBOL.findall(text)):
            raise Unsupported(
                f"the size {text} follows from the numbers in a tensor, and a static IR needs sizes that follow from "
                "those of the inputs: give that number as a plain argument, or use masks in its place"
            )
        return SYMBOL.sub(lambda found: self._dims.get(found[0], found[0]), text)


def has_fixed_sizes(sizes: Sequence[torch.SymInt | int]) -> bool:
    return all(type(size) is int for size in sizes)


def is_contiguous(tensor: torch.Tensor) -> bool:
    if not has_fixed_sizes(tensor.shape):
        return tensor.is_contiguous()
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


UNBACKED = re.compile(r"u\d+|zuf\d+")
"""torch's names of unbacked symbols: numbers that are not known before the run."""


def holds_values(tensor: torch.Tensor) -> bool:
    """Whether the tensor has data: a tensor on meta and a FakeTensor have none."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


@dataclass(frozen=True, slots=True)
class TensorPayload:
    """A payload that wraps `tensor`, of any dtype, device and strides; nothing is copied before `numpy()`."""

    tensor: torch.Tensor

    def numpy(self) -> np.ndarray:
        """The data in C order on the CPU; dtypes that numpy lacks are those of ml_dtypes."""
        tensor = self.tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        foreign = getattr(ml_dtypes, name, None)
        if foreign is None:
            return tensor.numpy()
        return tensor.reshape(-1).view(torch.uint8).numpy().view(foreign).reshape(tuple(tensor.shape))
