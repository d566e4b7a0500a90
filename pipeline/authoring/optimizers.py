"""Optimizers as data. The update itself is an op of the train step, whose settings are those of `torch.optim`.

One of `torch.optim` over the parameters of a model says more than one set of settings: it has groups of parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn, optim

from pipeline.authoring.tensors import typed
from pipeline.errors import UsageError
from pipeline.training.optimizer import refuse_optimizer_hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Settings of an optimizer of torch.optim, by torch's names: `lr`, `momentum`, `betas`, `eps`, `weight_decay`,
    `nesterov` and `amsgrad`. The defaults are torch's."""

    def make(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        """The optimizer of torch with these settings, which schedulers and state dicts know.

        Args:
            parameters: the parameters to train.

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
    """Stochastic gradient descent, as in torch."""

    lr: float = 1e-3
    """The learning rate."""
    momentum: float = 0.0
    """The share of the last update that the next one keeps; 0 for none."""
    weight_decay: float = 0.0
    """The factor of the weight that is added to its gradient."""
    nesterov: bool = False
    """Whether the momentum is Nesterov's."""

    def _make(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        return optim.SGD(
            parameters, self.lr, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=self.nesterov
        )


@typed
@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(OptimizerSpec):
    """Adam, as in torch: the weight decay is part of the gradient."""

    lr: float = 1e-3
    """The learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """The decay of the mean gradient and of the mean squared gradient, each from 0 to below 1."""
    eps: float = 1e-8
    """What is added to the root of the mean squared gradient before the division."""
    weight_decay: float = 0.0
    """The factor of the weight that is added to its gradient."""
    amsgrad: bool = False
    """Whether the divisor uses the largest mean squared gradient so far."""

    def _make(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        return optim.Adam(parameters, self.lr, self.betas, self.eps, self.weight_decay, self.amsgrad)


@typed
@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(OptimizerSpec):
    """Adam with a weight decay that is separate from the gradient."""

    lr: float = 1e-3
    """The learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """As for `Adam`."""
    eps: float = 1e-8
    """As for `Adam`."""
    weight_decay: float = 1e-2
    """The share of the weight, times the learning rate, that each step takes away."""
    amsgrad: bool = False
    """As for `Adam`."""

    def _make(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        return optim.AdamW(parameters, self.lr, self.betas, self.eps, self.weight_decay, self.amsgrad)


def copy_optimizer(
    optimizer: optim.Optimizer, own: Mapping[str, nn.Parameter], others: Mapping[str, nn.Parameter]
) -> optim.Optimizer:
    """A copy of `optimizer` with its groups and its state, over parameters of the same names.

    Args:
        own: the parameters that it may have, by name. others: those that take their places.

    Raises:
        UsageError: it has a parameter that is not among `own`, or a scheduler, which would change the copy no more.
        Unsupported: it has hooks.
    """
    refuse_optimizer_hooks(optimizer)
    names = {id(tensor): name for name, tensor in own.items()}
    for group in optimizer.param_groups:
        if strange := [tensor for tensor in group["params"] if id(tensor) not in names]:
            raise UsageError(
                f"the optimizer has a parameter of shape {list(strange[0].shape)} that the model has not; make its "
                "groups of the parameters of the model's layers"
            )
        if "initial_lr" in group:
            raise UsageError("the optimizer has a scheduler, which does not see the train step; give it as schedule=")
    taking = {key: others[name] for key, name in names.items() if name in others}
    return copy.deepcopy(optimizer, dict(taking))
