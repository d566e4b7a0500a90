"""torch tensors ↔ numpy arrays, bfloat16 included (numpy has it from ml_dtypes)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

__all__ = ["dtype_name", "to_numpy", "to_torch"]


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as an array that owns its memory."""
    tensor = tensor.detach().cpu().contiguous()
    view = VIEWS.get(tensor.dtype)
    if view is None:
        return tensor.numpy().copy()
    carrier, dtype = view
    return tensor.view(carrier).numpy().view(dtype).copy()


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The array as a tensor that owns its memory."""
    array = np.array(array, order="C")
    for dtype, (carrier, view) in VIEWS.items():
        if array.dtype == view:
            bits = np.dtype(str(carrier).removeprefix("torch."))
            return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32`, `int64`, …"""
    return str(tensor.dtype).removeprefix("torch.")


# Dtypes that numpy lacks: torch dtype → (an integer of the same width, ml_dtypes' dtype).
VIEWS = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e4m3fnuz: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fnuz)),
    torch.float8_e5m2: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
    torch.float8_e5m2fnuz: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2fnuz)),
}
