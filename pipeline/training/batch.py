"""The batch of a step: how module and loss read it; and checks of batch, module and optimizer before a recording.

A batch is the tensors that change from step to step. A bad batch, module or optimizer is refused in one sentence.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from passes.suggest import describe_argument
from pipeline.errors import Unsupported, UsageError

Batch: TypeAlias = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""`(*inputs, target)`, or tensors by name."""

Arguments: TypeAlias = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]
"""The arguments of a call, by order and by name."""

LossFunction: TypeAlias = Callable[..., torch.Tensor]
"""`loss(output, target)` for a batch that is a sequence; `loss(output, batch)` for one that is a mapping."""

SEQUENCES = (tuple, list)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The tensors of a batch in the order of the graph's inputs. `by_name` is False for `(*inputs, target)`."""

    names: tuple[str, ...]
    by_name: bool
    to_module: tuple[str, ...]
    """The names that the module is called with; the other tensors are for the loss alone."""

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
                f"the batch is {describe_argument(batch)}; expected `(*inputs, target)`, or a mapping of names to "
                "tensors"
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
        """The arguments of the module, by order and by name."""
        own = {name: tensors[name] for name in self.to_module}
        return ((), own) if self.by_name else (tuple(own.values()), {})

    def loss(self, call: Callable[..., Any], loss: LossFunction, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of the tensors, in the order of `names`; `call` stands for the module."""
        given = dict(zip(self.names, tensors, strict=True))
        args, kwargs = self.arguments(given)
        return loss(call(*args, **kwargs), given if self.by_name else given["target"])


def _parameters_of(module: nn.Module) -> frozenset[str] | None:
    """The names that `forward` takes; None if it takes any name."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _refuse_other_things(tensors: Mapping[str, object]) -> None:
    for name, item in tensors.items():
        if not isinstance(item, torch.Tensor):
            raise UsageError(
                f"{name!r} of the batch is {describe_argument(item)}; expected a tensor: "
                "what does not change from step to step belongs into the module or the loss"
            )


def check_limit(name: str, limit: object) -> float:
    """The limit of gradients, as a number; infinity clips nothing.

    Raises:
        UsageError: `limit` is no number, or a number below zero.
    """
    if not isinstance(limit, Real) or isinstance(limit, bool) or math.isnan(limit) or limit < 0:
        raise UsageError(f"found {name}={limit!r}, expected a number that is not below zero")
    return float(limit)


def refuse_classes(module: object, loss: object) -> None:
    """
    Raises:
        UsageError: the module is no nn.Module, or the module or the loss is a class that was not called.
    """
    for role, item in (("module", module), ("loss", loss)):
        if isinstance(item, type):
            raise UsageError(f"the {role} is the class {item.__name__}, which is not called: give {item.__name__}(…)")
    if not isinstance(module, nn.Module):
        raise UsageError(f"the module is {describe_argument(module)}; expected an nn.Module")
    if not callable(loss):
        raise UsageError(f"the loss is {describe_argument(loss)}; expected a function of output and target")


def refuse_module(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    """Check the tensors and modules that a recording reads.

    Raises:
        UsageError: a tensor has no data, or torch's inference mode is on.
        Unsupported: a wrapper around the module, another device than cpu and cuda, a hook that a step would not call,
            or a dropout that torch leaves out of recordings.
    """
    if torch.is_inference_mode_enabled():
        raise UsageError("torch.inference_mode() is on, in which torch has no gradients: record the step outside of it")
    inside = getattr(module, "_orig_mod", None)
    if isinstance(inside, nn.Module):
        raise Unsupported(f"the module comes in {describe_argument(module)}; give the module inside: module._orig_mod")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise Unsupported(f"the module comes in {describe_argument(module)}; give the module inside: module.module")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise Unsupported(
                f"{f'module {name!r}' if name else 'the module'} is one of torch.jit, which cannot be recorded; give "
                "the original nn.Module, from before torch.jit"
            )
        _refuse_dropout_between_layers(name, part)
    for name, tensor in module.named_parameters():
        _refuse_tensor(f"parameter {name!r}", tensor, "give it some first: module.to_empty(device='cpu'), then weights")
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise Unsupported(
                f"parameter {name!r} has a hook on its gradient, which a recorded step would not call: remove it, and "
                "put what it does into the loss or into max_norm"
            )
    for name, tensor in module.named_buffers():
        _refuse_tensor(f"buffer {name!r}", tensor, "give it some first: module.to_empty(device='cpu'), then weights")
    for name, tensor in batch.items():
        _refuse_tensor(f"{name!r} of the batch", tensor, "give an example with values")


def refuse_optimizer_hooks(optimizer: Optimizer) -> None:
    """
    Raises:
        Unsupported: the optimizer has a hook, which a recorded step would not call.
    """
    hooks = vars(optimizer)
    if hooks.get("_optimizer_step_pre_hooks") or hooks.get("_optimizer_step_post_hooks"):
        raise Unsupported(
            "the optimizer has a hook on its step, which a recorded step would not call: remove it, and do its work "
            "between the steps"
        )


def _refuse_dropout_between_layers(name: str, part: nn.Module) -> None:
    # torch 2.13's `_decomp.decompositions._rnn_helper` compares the layer's number the wrong way round.
    if isinstance(part, nn.RNNBase) and part.training and part.dropout > 0 and part.num_layers > 1:
        raise Unsupported(
            f"{f'module {name!r}' if name else 'the module'} ({type(part).__name__}) has {part.num_layers} layers "
            f"with dropout={part.dropout}, which torch leaves out of a recording: give it dropout=0, or make it of "
            "modules of one layer with nn.Dropout between them"
        )


def _refuse_tensor(name: str, tensor: torch.Tensor, advice: str) -> None:
    if is_lazy(tensor):
        raise UsageError(f"{name} of a lazy module has no shape yet: call the module once before the optimizer is made")
    if tensor.device.type == "meta":
        raise UsageError(f"{name} is on the device meta, which has no values; {advice}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"{name} is on {tensor.device}; recorded steps run on cpu and cuda: give module.cpu()")
    if tensor.layout is not torch.strided:
        raise Unsupported(f"{name} is {str(tensor.layout).removeprefix('torch.')}; expected a dense tensor")
