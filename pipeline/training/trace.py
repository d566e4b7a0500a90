"""Forward, loss and backward of a module as one graph of torch operators that write to nothing.

torch's `make_fx` records what a function calls on fake tensors; autograd runs inside of it, so the backward operators
are recorded behind the forward ones. Functionalizing it makes values of all writes: a BatchNorm's running statistics
are results of the graph. Nothing of the module is run with real numbers, and no random number is drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from pipeline.errors import Unsupported, UsageError
from pipeline.training.batch import Batch, BatchLayout, LossFunction

__all__ = ["TracedStep", "trace_step"]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The recorded graph.

    Its placeholders are parameters that ask for a gradient, other parameters, buffers, the tensors of the batch, and
    the greatest norm of all gradients where they are clipped.

    Parameters have their names in the module; one with several names has the first.
    """

    module: GraphModule
    params: tuple[str, ...]
    """Parameters that get a gradient."""
    placeholders: Mapping[str, Node]
    """Parameters and buffers by name."""
    buffers: frozenset[str]
    batch: tuple[Node, ...]
    layout: BatchLayout
    loss: Node
    gradients: tuple[Node, ...]
    """Of `params`, in their order."""
    updates: Mapping[str, Node]
    """{buffer that the forward pass writes to: its value afterwards}."""
    norm: Node | None = None
    """The norm of all gradients, where they are clipped."""
    max_norm: Node | None = None


def trace_step(module: nn.Module, loss: LossFunction, batch: Batch, *, clips: bool = False) -> TracedStep:
    """Record the loss of `module` on a batch like `batch`, and its gradients, clipped by their norm if `clips`.

    Raises:
        UsageError: the batch has no form that is known, the loss is no single number, or does not depend on any
            parameter by operators that can be differentiated.
        Unsupported: torch cannot record the module or differentiate one of its operators.
    """
    layout = BatchLayout.of(module, batch)
    asked = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    if not asked:
        raise UsageError("the module has no parameter with requires_grad; there is nothing to train")
    rest = {name: tensor for name, tensor in module.named_parameters() if not tensor.requires_grad}
    buffers, given = dict(module.named_buffers()), layout.tensors(batch)
    stored = {**asked, **rest, **buffers}
    flat = [*stored.values(), *(given[name].detach() for name in layout.names), *([torch.ones(())] if clips else [])]
    recorded = _record(_StepFunction(module, loss, layout, tuple(stored), len(asked), clips), flat)
    placeholders = [node for node in recorded.graph.nodes if node.op == "placeholder"]
    value, norm, *others = _results(recorded)
    if value is None:
        raise Unsupported("torch recorded a loss that follows from no input; expected one that depends on the batch")
    gradients, after = dict(zip(asked, others, strict=False)), dict(zip(buffers, others[len(asked) :], strict=True))
    by_name = dict(zip(stored, placeholders, strict=False))
    reached = {name: node for name, node in gradients.items() if node is not None}
    return TracedStep(
        recorded,
        tuple(reached),
        by_name,
        frozenset(buffers),
        tuple(placeholders[len(stored) : len(stored) + len(layout.names)]),
        layout,
        value,
        tuple(reached.values()),
        {name: node for name, node in after.items() if node is not None and node is not by_name[name]},
        norm,
        placeholders[-1] if clips else None,
    )


@dataclass(frozen=True, slots=True)
class _StepFunction:
    """The function that is recorded: loss, norm, gradients and buffers of tensors in the order of the placeholders."""

    module: nn.Module
    loss: LossFunction
    layout: BatchLayout
    names: tuple[str, ...]
    trained: int
    clips: bool

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor | None]:
        stored = dict(zip(self.names, tensors, strict=False))

        def call(*args: torch.Tensor, **kwargs: torch.Tensor) -> object:
            return functional_call(self.module, stored, args, kwargs, tie_weights=True)

        first = len(self.names)
        with torch.enable_grad():
            value = self.layout.loss(call, self.loss, tensors[first : first + len(self.layout.names)])
            _refuse_other_losses(value)
            value = value.reshape(())
            found = value.detach()  # in front of the backward operators, so that updates may stand among these
            one = torch.ones((), dtype=value.dtype)  # a constant, unlike the ones_like that autograd would call
            gradients = list(torch.autograd.grad(value, tensors[: self.trained], one, allow_unused=True))
        norm = None
        if self.clips:
            norm, gradients = _clip(gradients, tensors[-1])
        return [found, norm, *gradients, *(stored[name] for name, _ in self.module.named_buffers())]


def _clip(
    gradients: Sequence[torch.Tensor | None], max_norm: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """As `torch.nn.utils.clip_grad_norm_` does with its defaults."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients if gradient is not None]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm, [None if gradient is None else gradient * factor for gradient in gradients]


def _record(step: _StepFunction, flat: Sequence[torch.Tensor]) -> GraphModule:
    try:
        with enable_python_dispatcher(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = dispatch_functionalize(step, FunctionalTensorMode())
            recorded = make_fx(function, tracing_mode="fake", record_stack_traces=True)(*flat)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise Unsupported(f"torch cannot record the train step: {_first_sentence(error)}") from error
    recorded.graph.eliminate_dead_code()
    recorded.recompile()
    return recorded


def _refuse_other_losses(value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise UsageError(f"the loss is {found}; expected a single number: take its mean or its sum")
    if not value.is_floating_point():
        raise UsageError(f"the loss is {value.dtype}; expected floating point")
    if not value.requires_grad:
        raise UsageError(
            "the loss does not depend on any parameter by operators that can be differentiated: look for detach(), "
            "argmax, rounding or no_grad on the way from the parameters to the loss"
        )


def _results(recorded: GraphModule) -> list[Node | None]:
    """What the graph gives back; None stands for a gradient or a norm that there is not."""
    (results,) = recorded.graph.output_node().args
    return [node if isinstance(node, Node) else None for node in results]  # type: ignore[union-attr]


def _first_sentence(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
