"""Facts about torch tensors: the IR's spec of a traced tensor, the bytes of a stored one, and shared memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch._C._functorch import is_batchedtensor
from torch._subclasses import FakeTensor

from pipeline.errors import Unsupported
from pipeline.ir import DTYPE_BITS, Dim, Role, SymExpr, TensorSpec
from pipeline.ir.builder import ValueDecl
from pipeline.ops import Layout

SYMBOL = re.compile(r"[A-Za-z_]\w*")
"""A symbol in torch's text of a size, such as `s77` in `2*s77 + 1`."""

Described = tuple[TensorSpec, tuple[Dim, ...] | None]
"""Spec, and strides where they are not those of a contiguous tensor."""


class Tensors:
    """Declares the IR's values for fake tensors.

    A value on the meta device gets the device `cpu`, where it would be run.

    Args:
        dims: torch's symbol → name of the dim: {"s77": "batch"}.
    """

    def __init__(self, dims: Mapping[str, str]) -> None:
        self._dims = dims
        self._seen: dict[tuple[object, ...], Described] = {}

    def declare(self, name: str, tensor: torch.Tensor, role: Role) -> ValueDecl:
        """The value `name` with the shape, dtype, device and strides of `tensor`.

        Raises:
            Unsupported: the tensor is not strided, its dtype is unknown to the IR, or a size depends on elements.
        """
        dense = tensor.layout is torch.strided  # a sparse tensor may have no strides
        key = (
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if dense and has_fixed_sizes(tensor.shape)
            else (id(tensor),)
        )
        described = self._seen.get(key)
        if described is None:
            described = self._seen[key] = self._describe(name, tensor)
        return ValueDecl(name, described[0], role, described[1])

    def size(self, number: torch.SymInt | torch.SymFloat | torch.SymBool) -> SymExpr | int:
        """`number` as an int, or as an expression of named dims.

        Raises:
            Unsupported: the number depends on the elements of a tensor.
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
                f"the size {text} depends on the values in a tensor, and a static IR needs sizes that depend on the "
                "sizes of the inputs alone: give that number as a plain argument, or use a mask"
            )
        return SYMBOL.sub(lambda found: self._dims.get(found[0], found[0]), text)


def has_fixed_sizes(sizes: Sequence[torch.SymInt | int]) -> bool:
    """Whether no size is a symbol."""
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
"""torch's names of unbacked symbols, whose values are known only when the model runs."""


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


def memory_of(item: object) -> int | None:
    """Identify the storage of a tensor, also on meta, where all addresses are 0.

    Returns:
        A number that tensors on the same storage share; None if `item` is not a dense tensor.
    """
    if not isinstance(item, torch.Tensor) or item.layout is not torch.strided or item.is_nested:
        return None
    if is_batchedtensor(item):  # made by vmap; it has no storage of its own
        return None
    return item.untyped_storage()._cdata


def layout_text(tensor: torch.Tensor) -> tuple[str, str]:
    """Sizes and strides as text, to compare: a comparison of symbols would add guards to the trace."""
    return str(tuple(tensor.shape)), str(tensor.stride())


def copy_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a dense tensor with the same strides, gaps between its elements included."""
    tensor = tensor.detach()
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    span = extent(tensor) // tensor.element_size()
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a dense tensor to the end of its last element; 0 if it has no element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements leave no gap and none shares memory, as in a permutation of a contiguous tensor."""
    layout = Layout(tuple(tensor.shape), tensor.stride())
    return not tensor.numel() or (extent(tensor) == tensor.numel() * tensor.element_size() and layout.is_distinct)


def overlap(first: torch.Tensor, second: torch.Tensor, distance: int) -> bool:
    """Whether two dense tensors share a byte, if `second` begins `distance` bytes after `first`.

    Exact for all strides: the even columns of a matrix share no byte with its odd columns.
    """
    if not -extent(second) < distance < extent(first):
        return False
    bounds = {1: [1 - second.element_size(), first.element_size() - 1]}
    for size, stride in _axes(first):
        bounds.setdefault(stride, [0, 0])[1] += size - 1
    for size, stride in _axes(second):
        bounds.setdefault(stride, [0, 0])[0] -= size - 1
    return _can_reach(distance, [(stride, low, high) for stride, (low, high) in sorted(bounds.items(), reverse=True)])


def _axes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride in bytes) of each axis whose stride is not 0."""
    width = tensor.element_size()
    return [(size, stride * width) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]


Step = tuple[int, int, int]
"""A step in memory: its length in bytes, and the least and the greatest count of such steps."""


def _can_reach(distance: int, steps: Sequence[Step]) -> bool:
    """Whether steps in allowed counts add up to `distance` bytes.

    Args:
        distance: in bytes; may be negative.
        steps: the longest first, so that few counts are left to try.
    """
    if not steps:
        return distance == 0
    (stride, low, high), *rest = steps
    least, most = (sum(step[0] * step[end] for step in rest) for end in (1, 2))
    first, last = max(low, -((most - distance) // stride)), min(high, (distance - least) // stride)
    return any(_can_reach(distance - count * stride, rest) for count in range(first, last + 1))
