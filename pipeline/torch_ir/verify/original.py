"""Run the model itself, on copies: its result, and what it has written to."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipeline.export.caches import register_caches
from pipeline.importers.from_torch.tensors import copy_with_strides, memory_of
from pipeline.torch_ir.document.nodes import key_of
from pipeline.torch_ir.errors import ExecutionError
from pipeline.torch_ir.execute import IRExecutor
from pipeline.torch_ir.execute.arguments import feed
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.verify.comparison import Pair


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model returned, and after the run: its buffers and parameters by name, its arguments and kwargs.

    `arguments` nest as they did before it, also where the model has put other tensors into a dict or a cache.
    """

    result: Any
    stored: dict[str, torch.Tensor]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


def answer_of(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
    """Run a deep copy of `model`, in the mode that it is in, on copies of the arguments.

    Raises:
        ExecutionError: the model cannot be copied, or does not take the arguments itself.
    """
    register_caches(model)
    own = copied_model(model)
    leaves, spec = pytree.tree_flatten(copy_arguments((tuple(inputs), dict(kwargs))))
    args, named = pytree.tree_unflatten(leaves, spec)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), same_randomness():
            result = own(*args, **named)
    except Exception as error:  # of whatever the model does
        raise ExecutionError(
            f"{type(model).__name__} itself does not run on these inputs, so there is nothing to compare with: "
            f"{type(error).__name__}: {error}"
        ) from error
    return Answer(result, stored_in(own), pytree.tree_unflatten(leaves, spec))


def stored_in(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all of their names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named}


def copied_model(model: nn.Module) -> nn.Module:
    """A deep copy of `model`, with buffers, parameters and plain attributes, but without gradients.

    Raises:
        ExecutionError: something in it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers(), *_with_history(model)):
        fresh = _copy(tensor)
        memo[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception as error:  # of whatever the model holds
        raise ExecutionError(
            f"{type(model).__name__} cannot be copied, and verification runs nothing but a copy: "
            f"{_culprit(model, memo) or error}; take it out of the model for the time of the verification"
        ) from error


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with equal strides, since a model may read the memory between the elements of a slice."""
    return tensor.detach().clone() if memory_of(tensor) is None else copy_with_strides(tensor)


def _with_history(model: nn.Module) -> Iterator[torch.Tensor]:
    """Attributes with a gradient history, as weight_norm leaves them: torch does not deep-copy them."""
    for module in model.modules():
        yield from (held for held in vars(module).values() if isinstance(held, torch.Tensor) and not held.is_leaf)


def _culprit(model: nn.Module, memo: dict[int, Any]) -> str:
    """The first attribute that cannot be copied by itself, by its path."""
    for path, module in model.named_modules():
        for name, held in vars(module).items():
            if name == "_modules":
                continue
            try:
                copy.deepcopy(held, dict(memo))
            except Exception as error:  # of whatever it is
                return f"its attribute {f'{path}.{name}' if path else name!r}, a {type(held).__name__} ({error})"
    return ""


def copy_arguments(arguments: Any) -> Any:
    """The same tree with copied tensors, since a model may write to them; one in two places stays one.

    Caches are copied too, since a model writes into them.
    """
    made: dict[int, torch.Tensor] = {}

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = _copy(leaf)
        return made[id(leaf)]

    return pytree.tree_map(copy_leaf, arguments)


@contextmanager
def same_randomness() -> Iterator[None]:
    """Every run inside draws the same numbers; the caller's generator is as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def pair_writes(
    ir: IR,
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    answer: Answer,
    executor: IRExecutor,
) -> Iterator[Pair]:
    """Pair the values, after the run, of everything that either side writes to.

    `model`, `inputs` and `kwargs` are as they were before the run.
    """
    yield from _pair_updated(ir, answer, executor)
    yield from _pair_left_out(ir, model, answer, executor)
    if not executor.writes:  # ops that write do so to copies, which nobody keeps
        yield from _pair_inputs(ir, feed(ir, inputs, kwargs).tensors, feed(ir, *answer.arguments).tensors, executor)


def _pair_updated(ir: IR, answer: Answer, executor: IRExecutor) -> Iterator[Pair]:
    """Buffers that the IR writes to."""
    graph = ir.graph
    for vid in graph.updates:
        value = graph.values[vid]
        expected = answer.stored.get(key_of(graph, value)) if vid in graph.sources else None
        if expected is not None:
            yield Pair(f"buffer {key_of(graph, value)}", expected, executor.updates[value.name])


def _pair_left_out(ir: IR, model: nn.Module, answer: Answer, executor: IRExecutor) -> Iterator[Pair]:
    """Buffers and parameters that the model writes to and the IR does not update."""
    graph, updates = ir.graph, executor.updates
    names = {key: graph.values[vid].name for vid, keys in graph.sources.items() for key in keys}
    updated = {key for vid in graph.updates for key in graph.sources.get(vid, ())}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for key, before in stored_in(model).items():
        after = answer.stored.get(key)
        if after is not None and key not in updated and not _same_bits(before, after):
            kind = "parameter" if key in parameters else "buffer"
            yield Pair(f"{kind} {key}", after, updates.get(names.get(key, ""), before))


def _pair_inputs(ir: IR, before: Mapping[str, Any], after: Mapping[str, Any], executor: IRExecutor) -> Iterator[Pair]:
    updates = executor.updates
    for vid in ir.graph.inputs:
        name = ir.graph.values[vid].name
        if name in updates or not _same_bits(before[name], after[name]):
            yield Pair(f"input {name}", after[name], updates.get(name, before[name]))


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit: cheaper than comparing numbers, and a NaN equals itself.

    Tensors without plain bits (sparse, quantized, meta, of a subclass) are taken to be equal.
    """
    if type(left) not in PLAIN or left.layout is not torch.strided or left.is_quantized or left.is_meta:
        return True
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


PLAIN = (torch.Tensor, nn.Parameter)
