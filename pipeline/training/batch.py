"""What a batch is: the tensors that change from step to step, their names, and how module and loss read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from pipeline.errors import UsageError

Batch: TypeAlias = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""`(*inputs, target)`, or tensors by name."""

Arguments: TypeAlias = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]
"""Of a call, by order and by name."""

LossFunction: TypeAlias = Callable[..., torch.Tensor]
"""`loss(output, target)` for a batch that is a sequence; `loss(output, batch)` for one that is a mapping."""

SEQUENCES = (tuple, list)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The tensors of a batch in the order of the graph's inputs. `by_name` is False for `(*inputs, target)`."""

    names: tuple[str, ...]
    by_name: bool
    to_module: tuple[str, ...]
    """Those that the module is called with; the others are for the loss alone."""

    @classmethod
    def of(cls, module: nn.Module, batch: Batch) -> BatchLayout:
        """The layout of `batch`.

        A mapping may hold more than the module's `forward` names: what it does not name is for the loss.

        Raises:
            UsageError: it is neither a sequence of two or more tensors nor a mapping of names to tensors.
        """
        if isinstance(batch, Mapping):
            _refuse_other_things(batch)
            taken = _parameters_of(module)
            names = tuple(batch)
            return cls(names, True, names if taken is None else tuple(name for name in names if name in taken))
        if not isinstance(batch, SEQUENCES) or len(batch) < 2:
            raise UsageError(
                f"the batch is a {type(batch).__name__}; expected `(*inputs, target)`, or a mapping of names to tensors"
            )
        inputs = ("input",) if len(batch) == 2 else tuple(f"input_{index}" for index in range(len(batch) - 1))
        names = (*inputs, "target")
        _refuse_other_things(dict(zip(names, batch, strict=True)))
        return cls(names, False, inputs)

    def tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The tensors of `batch` by the names of the graph's inputs; a mapping may hold further tensors.

        Raises:
            UsageError: the batch has another form than the example, or a tensor is missing.
        """
        if self.by_name:
            if isinstance(batch, Mapping):
                return dict(batch)
        elif isinstance(batch, SEQUENCES) and len(batch) == len(self.names):
            return dict(zip(self.names, batch, strict=True))
        form = "a mapping of names to tensors" if self.by_name else f"{len(self.names)} tensors, the target last"
        raise UsageError(f"the batch is not like the example batch, which is {form} ({', '.join(self.names)})")

    def arguments(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """What the module is called with, by order and by name."""
        own = {name: tensors[name] for name in self.to_module}
        return ((), own) if self.by_name else (tuple(own.values()), {})

    def loss(self, call: Callable[..., Any], loss: LossFunction, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of the tensors, in the order of `names`; `call` stands for the module."""
        given = dict(zip(self.names, tensors, strict=True))
        args, kwargs = self.arguments(given)
        return loss(call(*args, **kwargs), given if self.by_name else given["target"])


def _parameters_of(module: nn.Module) -> frozenset[str] | None:
    """The names that `forward` takes; None where it takes any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _refuse_other_things(tensors: Mapping[str, object]) -> None:
    for name, item in tensors.items():
        if not isinstance(item, torch.Tensor):
            raise UsageError(
                f"{name!r} of the batch is a {type(item).__name__}; expected a tensor: "
                "what does not change from step to step belongs into the module or the loss"
            )
