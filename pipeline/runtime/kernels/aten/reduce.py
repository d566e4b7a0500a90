"""Quick ways of reductions."""

from __future__ import annotations

import torch

from pipeline.runtime.kernels.aten.call import Quick, into

__all__ = ["QUICK"]

QUICK: dict[str, Quick] = {
    "aten.sum.dim_IntList": into(torch.sum),
    "aten.mean.dim": into(torch.mean),
    "aten.amax.default": into(torch.amax),
    "aten.amin.default": into(torch.amin),
    "aten.argmax.default": into(torch.argmax),
    "aten.cumsum.default": into(torch.cumsum),
}
