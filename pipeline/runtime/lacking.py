"""What torch's CPU cannot do, and meta traces all the same: models choose their operators by device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

__all__ = ["ON_THE_CPU"]


def histc(self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Counts of whole numbers, as torch has it elsewhere (Mixtral's experts, by `transformers`)."""
    if self.is_floating_point():
        return torch.histc(self, bins, min, max)
    return torch.histc(self.double(), bins, min, max).to(self.dtype)


ON_THE_CPU: Mapping[str, Callable[..., torch.Tensor]] = {"aten.histc.default": histc}
"""By kind, functions with the operator's own arguments."""
