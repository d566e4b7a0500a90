"""Optimizers as data. The update itself is an op of the train step, whose settings are those of `torch.optim`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn, optim

from pipeline.authoring.tensors import typed
from pipeline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Settings of an optimizer, with the names and the defaults of torch's."""

    def make(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        """The optimizer of torch with these settings, which schedulers and state dicts know.

        Raises:
            UsageError: torch refuses a setting.
        """
        try:
            return self._make(parameters)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self}: {error}") from None

    def _make(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        raise UsageError(f"found {type(self).__name__}, expected SGD, Adam or AdamW")


@typed
@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(OptimizerSpec):
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def _make(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        return optim.SGD(
            parameters, self.lr, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=self.nesterov
        )


@typed
@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(OptimizerSpec):
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    def _make(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        return optim.Adam(parameters, self.lr, self.betas, self.eps, self.weight_decay, self.amsgrad)


@typed
@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(OptimizerSpec):
    """Adam with a weight decay that is separate from the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False

    def _make(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        return optim.AdamW(parameters, self.lr, self.betas, self.eps, self.weight_decay, self.amsgrad)
