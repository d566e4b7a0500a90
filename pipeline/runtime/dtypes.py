"""dtype names ↔ torch dtypes, and numpy arrays as tensors over the same bytes."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.errors import UsageError
from pipeline.ir.spec import DTYPE_BITS

__all__ = ["as_tensor", "dtype_name", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name` (a key of `DTYPE_BITS`)."""
    return getattr(torch, name)


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


class _Unlocked:
    """The same bytes without numpy's read-only flag, which torch cannot express and warns about.

    A mapped model file is read-only, and a write through the tensor would be a segmentation fault. None is made: the
    plan checker refuses every plan that writes to a weight or an input.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array  # numpy keeps this object, and so the bytes, as the base of what it makes
        pointer, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}
