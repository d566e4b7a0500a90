"""The function that is recorded: from the tensors that a step reads to loss, norm, gradients and buffers.

The function replaces a module's parameters and buffers by the tensors of the step, wherever the module holds them.
torch's `functional_call` goes by names: where a tensor has several names (a module under two names, a weight that is an
attribute of its parent too), it restores the last name wrongly (torch 2.13). Here a tensor is found by its identity, in
every submodule, as an attribute and in lists, tuples and dicts that are attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from passes.suggest import describe_argument
from pipeline.errors import Unsupported, UsageError
from pipeline.importers.from_torch.modules import named_tensors
from pipeline.runtime.tensors import dtype_name
from pipeline.training.attributes import ModuleAttributes
from pipeline.training.batch import BatchLayout, LossFunction

Clipping = Literal["none", "norm", "value"]
"""The quantity of gradients that has a limit: the norm of all gradients, or the size of each element."""


@dataclass(frozen=True, slots=True)
class StepFunction:
    """Takes parameters that are trained, other parameters, buffers, the batch, and the limit of gradients, if any."""

    module: nn.Module
    loss: LossFunction
    layout: BatchLayout
    names: tuple[str, ...]
    """The names of parameters and buffers."""
    trained: int
    """How many parameters are trained."""
    clips: Clipping = "none"
    checks_gradients: bool = False
    until_loss: bool = False
    """Whether only the loss is computed, and no gradient."""
    exported: nn.Module | None = None
    """The callable in place of the module: the module as a graph of torch.export."""

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor | None]:
        given = dict(zip(self.names, tensors, strict=False))
        stored = dict(given)
        first = len(self.names)
        call = self.exported or self.module
        own = {} if self.exported is None else dict(stored)
        with ExitStack() as stack:
            # For the backward pass too, where a checkpoint calls the module again, and for a loss that reads weights.
            if self.exported is not None:
                stack.enter_context(swapped_tensors(self.exported, own, original=self.module))
            stack.enter_context(swapped_tensors(self.module, stored))
            stack.enter_context(_cumulative_averages(self.module))
            stack.enter_context(_unchanged_memory(stored))
            stack.enter_context(torch.enable_grad())
            value = self.layout.loss(call, self.loss, tensors[first : first + len(self.layout.names)])
            _refuse_other_losses(value)
            value = value.reshape(())
            found = value.detach()  # before the backward operators, so that updates may stand among these
            if self.until_loss:
                return [found]
            one = torch.ones((), dtype=value.dtype)  # a constant, unlike the ones_like that autograd would call
            gradients = list(torch.autograd.grad(value, tensors[: self.trained], one, allow_unused=True))
        stored |= {name: tensor for name, tensor in own.items() if tensor is not given[name]}
        _refuse_sparse(self.names, gradients)
        after = [
            _state_after(name, before, stored[name]) if place >= self.trained else stored[name]
            for place, (name, before) in enumerate(zip(self.names, tensors, strict=False))
        ]
        norm = _norm(gradients) if self.checks_gradients or self.clips == "norm" else None
        if self.clips == "norm" and norm is not None:
            factor = (tensors[-1] / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
            gradients = _change(gradients, lambda gradient: gradient * factor.to(gradient.dtype))
        elif self.clips == "value":
            limit = tensors[-1]
            gradients = _change(gradients, lambda gradient: gradient.clamp(-limit, limit).to(gradient.dtype))
        return [found, norm, *gradients, *after]

    def compute_loss(self, stored: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]) -> None:
        """Compute the loss by plain torch on copies of parameters and buffers, for the error that torch may raise."""
        copies = {name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in stored.items()}
        attributes = ModuleAttributes(self.module)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), swapped_tensors(self.module, copies):
            try:
                self.layout.loss(self.module, self.loss, batch)
            finally:
                attributes.put_back()


def _state_after(name: str, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The value `after` the forward pass of a buffer or a frozen parameter that was `before`.

    Raises:
        Unsupported: it has another shape or dtype.
    """
    forms = [f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in (before, after)]
    if forms[0] != forms[1]:
        raise Unsupported(
            f"the forward pass makes {forms[1]} of {name!r}, which is {forms[0]}; expected the same shape and dtype "
            "after each step"
        )
    return after


def _change(
    gradients: Sequence[torch.Tensor | None], change: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor | None]:
    return [None if gradient is None else change(gradient) for gradient in gradients]


def _norm(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients if gradient is not None]
    return torch.linalg.vector_norm(torch.stack(norms))


def _refuse_other_losses(value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else describe_argument(value)
        raise UsageError(f"the loss is {found}; expected a single number: take its mean or its sum")
    if not value.is_floating_point():
        raise UsageError(f"the loss is {value.dtype}; expected floating point")
    if not value.requires_grad:
        raise UsageError(
            "the loss does not depend on any parameter by operators that can be differentiated: look for detach(), "
            "argmax, rounding or no_grad on the way from the parameters to the loss, and for torch.utils.checkpoint "
            "with use_reentrant=True, which hides the way from a recording; use_reentrant=False does not"
        )


def _refuse_sparse(names: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
    for name, gradient in zip(names, gradients, strict=False):
        if gradient is not None and gradient.layout is not torch.strided:
            raise Unsupported(
                f"the gradient of {name!r} is sparse ({str(gradient.layout).removeprefix('torch.')}); expected a dense "
                "one: make the embedding with sparse=False"
            )


@contextmanager
def _cumulative_averages(module: nn.Module) -> Iterator[None]:
    """Let a BatchNorm with `momentum=None` compute its factor as a tensor: torch makes a Python number of a counter."""
    changed = [
        part
        for part in module.modules()
        if isinstance(part, _BatchNorm)
        and type(part).forward is _BatchNorm.forward
        and part.momentum is None
        and part.num_batches_tracked is not None
        and part.training
    ]
    for part in changed:
        vars(part)["forward"] = partial(_normalize_by_cumulative_average, part)
    try:
        yield
    finally:
        for part in changed:
            del vars(part)["forward"]


def _normalize_by_cumulative_average(part: Any, x: torch.Tensor) -> torch.Tensor:
    """What `_BatchNorm.forward` does in training: its statistics are the means of those of all batches."""
    part._check_input_dim(x)
    part.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(part.running_mean), torch.zeros_like(part.running_var)
    result = functional.batch_norm(x, mean, var, part.weight, part.bias, True, 1.0, part.eps)
    for running, found in ((part.running_mean, mean), (part.running_var, var)):
        running.add_((found - running) / part.num_batches_tracked)
    return result


@contextmanager
def _unchanged_memory(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Look for an assignment to `.data`, which gives a tensor other memory: no operator that could be recorded.

    Raises:
        Unsupported: there is one.
    """
    before = {name: (tensor, tensor.untyped_storage()) for name, tensor in tensors.items()}
    yield
    for name, (tensor, storage) in before.items():
        if tensor.untyped_storage()._cdata != storage._cdata:
            raise Unsupported(
                f"the forward pass or the loss assigns to .data of {name!r}, which no step would repeat: compute a "
                "value from a trained parameter in place of writing to it, and write to a buffer or a frozen parameter "
                "by copy_, under torch.no_grad()"
            )


Place = tuple[Any, Any, Any]
"""(a dict or a list, the key or index in it, what the module holds there: a tensor, or a tuple that has some)."""


@contextmanager
def swapped_tensors(
    module: nn.Module, tensors: dict[str, torch.Tensor], *, original: nn.Module | None = None
) -> Iterator[None]:
    """Let `module` hold `tensors` (by name, parameters and buffers) in the place of its own until the block ends.

    Where the block assigns to a parameter or a buffer (`self.count = self.count + 1`), `tensors` gets what it assigned.
    `original`: the module that has the names, where `module` is another one with the same tensors.
    """
    named = named_tensors(original or module) | named_tensors(module)
    new = {id(named[name]): tensor for name, tensor in tensors.items() if name in named}
    places = [place for part in module.modules() for place in _places(vars(part), new)]
    for container, key, held in places:
        container[key] = _swap(held, new)
    try:
        yield
    finally:
        assigned: dict[int, torch.Tensor] = {}
        for container, key, held in places:
            now = container.get(key) if isinstance(container, dict) else None
            if isinstance(held, torch.Tensor) and isinstance(now, torch.Tensor) and now is not new[id(held)]:
                assigned[id(held)] = now
            container[key] = held
        for name in tensors:
            if name in named and id(named[name]) in assigned:
                tensors[name] = assigned[id(named[name])]


def _places(attributes: Mapping[str, Any], wanted: Mapping[int, object]) -> list[Place]:
    """Where the tensors with the ids `wanted` are, in the attributes of a module and in containers among these."""
    found: list[Place] = []
    todo: list[Any] = [attributes]
    seen: set[int] = set()
    while todo:
        container = todo.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        for key, held in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if (isinstance(held, torch.Tensor) and id(held) in wanted) or (
                type(held) is tuple and _swap(held, wanted) is not held
            ):
                found.append((container, key, held))
            elif type(held) in (dict, list) and key != "_modules":
                todo.append(held)
    return found


def _swap(held: Any, new: Mapping[int, Any]) -> Any:
    """The replacement of a tensor; of a tuple, a tuple with replaced tensors, or the same tuple if it holds none."""
    if not isinstance(held, tuple):
        return new.get(id(held), held)
    parts = tuple(_swap(part, new) if isinstance(part, torch.Tensor | tuple) else part for part in held)
    return held if all(part is old for part, old in zip(parts, held, strict=True)) else parts
