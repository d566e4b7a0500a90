"""Quick ways of normalisations and softmaxes."""

from __future__ import annotations

import torch

from pipeline.runtime.kernels.aten.call import Quick, into
from pipeline.runtime.kernels.aten.written import made

__all__ = ["QUICK"]

QUICK: dict[str, Quick] = {
    "aten.layer_norm.default": made(torch.layer_norm),
    "aten.group_norm.default": made(torch.group_norm),
    "aten.rms_norm.default": made(torch.rms_norm),
    "aten.batch_norm.default": made(torch.batch_norm),
    "aten.softmax.int": into(torch.softmax),
    "aten.log_softmax.int": into(torch.log_softmax),
}
