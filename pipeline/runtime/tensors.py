"""Conversions of tensors: dtypes by name, numpy arrays (bfloat16 and float8 by ml_dtypes), strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from pipeline.errors import UsageError
from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir.graph import DTYPE_BITS


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name` (a key of `DTYPE_BITS`).

    Raises:
        UsageError: torch has no dtype of this name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"there is no dtype {name!r}; expected one of {', '.join(DTYPE_BITS)}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A CPU tensor of the array's shape and dtype; ml_dtypes become torch's bfloat16 and float8.

    The bytes are shared, and the array is kept alive. Bytes are copied only where torch cannot point at them: strides
    that are not C order, foreign byte order, or an address that is not a multiple of the item size.

    Raises:
        UsageError: a dtype that torch does not have.
    """
    name = str(array.dtype.newbyteorder("="))
    if name not in DTYPE_BITS:
        raise UsageError(f"numpy dtype {name} has no torch dtype; expected one of {', '.join(DTYPE_BITS)}")
    if not (array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    if not array.size:
        return torch.empty(array.shape, dtype=torch_dtype(name))
    # As a vector of bytes first: numpy views no 0-d array as another dtype, and torch knows no ml_dtypes.
    raw = np.asarray(_Unlocked(array.reshape(-1).view(np.uint8)))
    return torch.from_numpy(raw).view(torch_dtype(name)).view(array.shape)


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The array as a tensor that owns its memory."""
    return as_tensor(np.array(array, order="C"))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as an array that owns its memory."""
    return TensorPayload(tensor).numpy().copy()


TORCH: Any = torch
"""With names that its type stubs lack."""


def is_functional(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is one of torch.func.functionalize: its memory is empty, and to read it is no error."""
    return TORCH._is_functional_tensor(tensor)


def why_unreadable(tensor: torch.Tensor) -> str:
    """Why a plan cannot read the memory of `tensor`, as the end of a sentence; empty where it can."""
    if is_lazy(tensor):
        return "is a parameter of a lazy module, which has no values before its first forward"
    if isinstance(tensor, FakeTensor):
        return "is a fake tensor, which has no values"
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"of the layout {tensor.layout}"
        return f"is {kind}; expected a dense one, as `to_dense()` or `torch.stack` makes"
    if TORCH._C._functorch.is_functorch_wrapped_tensor(tensor) or is_functional(tensor):
        return "is inside of torch.vmap, torch.func.grad or the like, which see no plan; call it outside of them"
    return ""


def with_strides(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """`tensor` with exactly these strides, in elements, or contiguous (None); copied only where they differ.

    Axes of size 1 get the strides too: a convolution looks at all of them to tell channels_last.
    """
    tensor = resolve_views(tensor)
    if strides is None:
        return tensor.contiguous()
    if tensor.stride() == tuple(strides):
        return tensor
    if has_strides(tensor, strides):
        return tensor.as_strided(tensor.shape, strides)
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def resolve_views(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without lazy conjugation or negation: `x.conj()` only sets a flag, and kernels read memory."""
    return tensor.resolve_conj().resolve_neg()


def has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether the elements have these strides; those of an axis of size 1 and of an empty tensor may be any."""
    axes = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return not tensor.numel() or all(size == 1 or own == wanted for size, own, wanted in axes)


def is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same memory, or the same bytes."""
    first_place, second_place = (
        (storage_id(tensor), tensor.storage_offset(), tensor.stride()) for tensor in (first, second)
    )
    if first_place == second_place:
        return True
    return torch.equal(*(raw_bytes(materialize_on_cpu(tensor)) for tensor in (first, second)))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in C order as a vector of bytes."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def materialize_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, with lazy conjugation and negation applied."""
    return resolve_views(tensor.detach()).cpu()


class _Unlocked:
    """The same bytes without numpy's read-only flag, which torch cannot express and warns about.

    A mapped model file is read-only, and a write through the tensor would be a segmentation fault. None happens: the
    plan checker refuses every plan that writes to a weight or an input.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array  # numpy keeps this object, and so the bytes, as the base of what it makes
        pointer, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}


def storage_id(tensor: torch.Tensor) -> int:
    """A number for the storage of `tensor`, the same for all its views."""
    return tensor.untyped_storage()._cdata
