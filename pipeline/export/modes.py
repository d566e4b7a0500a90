"""Modules that compute something else in train mode than in eval mode."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["minding_mode"]


def minding_mode(module: nn.Module) -> list[str]:
    """Paths of the modules in train mode, of torch's own classes, that eval mode would change; the root's is its class.

    Code that asks `self.training` by itself is not seen.
    """
    return [path or type(one).__name__ for path, one in module.named_modules() if one.training and _minds(one)]


def _minds(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, _NormBase):  # without statistics of earlier batches, those of this batch count in both
        return module.track_running_stats
    return isinstance(module, nn.RReLU)
