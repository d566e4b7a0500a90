"""What is no operator of torch."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["execute_getitem"]


def execute_getitem(inputs: list[torch.Tensor], attrs: dict[str, Any]) -> list[torch.Tensor]:
    return [inputs[attrs["index"]]]
