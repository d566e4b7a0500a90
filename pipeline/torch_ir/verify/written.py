"""What the model has written to its inputs, buffers and parameters, and what the IR says that it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipeline.torch_ir.execute import IRExecutor
from pipeline.torch_ir.execute.feed import feed
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.nodes import key_of
from pipeline.torch_ir.verify.original import Answer, stored_in
from pipeline.torch_ir.verify.trees import Pair

__all__ = ["written"]


def written(
    ir: IR,
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    answer: Answer,
    executor: IRExecutor,
) -> Iterator[Pair]:
    """What either side writes to, as both have it after their run; what neither does is passed over.

    `model`, `inputs` and `kwargs` are as they were before.
    """
    yield from _updated(ir, answer, executor)
    yield from _left_out(ir, model, answer, executor)
    if not executor.writes:  # ops that write do so to copies, which nobody keeps
        yield from _inputs(ir, feed(ir, inputs, kwargs).tensors, feed(ir, *answer.arguments).tensors, executor)


def _updated(ir: IR, answer: Answer, executor: IRExecutor) -> Iterator[Pair]:
    """Buffers that the IR writes to."""
    graph = ir.graph
    for vid in graph.updates:
        value = graph.values[vid]
        expected = answer.stored.get(key_of(graph, value)) if vid in graph.sources else None
        if expected is not None:
            yield Pair(f"buffer {key_of(graph, value)}", expected, executor.updates[value.name])


def _left_out(ir: IR, model: nn.Module, answer: Answer, executor: IRExecutor) -> Iterator[Pair]:
    """Buffers and parameters that the model writes to, and the IR has no update of."""
    graph, updates = ir.graph, executor.updates
    names = {key: graph.values[vid].name for vid, keys in graph.sources.items() for key in keys}
    told = {key for vid in graph.updates for key in graph.sources.get(vid, ())}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for key, before in stored_in(model).items():
        after = answer.stored.get(key)
        if after is not None and key not in told and not _same_bits(before, after):
            kind = "parameter" if key in parameters else "buffer"
            yield Pair(f"{kind} {key}", after, updates.get(names.get(key, ""), before))


def _inputs(ir: IR, before: Mapping[str, Any], after: Mapping[str, Any], executor: IRExecutor) -> Iterator[Pair]:
    updates = executor.updates
    for vid in ir.graph.inputs:
        name = ir.graph.values[vid].name
        if name in updates or not _same_bits(before[name], after[name]):
            yield Pair(f"input {name}", after[name], updates.get(name, before[name]))


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Cheaper than a comparison of numbers, and most tensors are as they were; a NaN is itself.

    Tensors that have no plain bits (sparse, quantized, meta, of a subclass) are taken to be as they were.
    """
    if type(left) not in PLAIN or left.layout is not torch.strided or left.is_quantized or left.is_meta:
        return True
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


PLAIN = (torch.Tensor, nn.Parameter)
