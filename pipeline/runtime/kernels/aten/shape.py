"""Quick ways of operators that put tensors together."""

from __future__ import annotations

import torch

from pipeline.runtime.kernels.aten.call import Quick, into

__all__ = ["QUICK"]

QUICK: dict[str, Quick] = {
    "aten.cat.default": into(torch.cat),
    "aten.stack.default": into(torch.stack),
}
