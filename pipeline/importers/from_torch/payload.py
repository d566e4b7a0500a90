"""The bytes of a torch tensor as a payload of the Graph."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch._subclasses import FakeTensor

__all__ = ["TensorPayload", "holds_values"]


def holds_values(tensor: torch.Tensor) -> bool:
    """Whether there are numbers in it: on meta there are none, and a FakeTensor has none on any device."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


@dataclass(frozen=True, slots=True)
class TensorPayload:
    """`tensor` of any dtype, device and strides; nothing is copied until numpy asks."""

    tensor: torch.Tensor

    def numpy(self) -> np.ndarray:
        """C order on the CPU; dtypes that numpy has not come as ml_dtypes'."""
        tensor = self.tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        foreign = getattr(ml_dtypes, name, None)
        if foreign is None:
            return tensor.numpy()
        return tensor.reshape(-1).view(torch.uint8).numpy().view(foreign).reshape(tuple(tensor.shape))
