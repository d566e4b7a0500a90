"""A torch module, a loss and an optimizer → one train step as a planned program."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.ir import Graph
from pipeline.lowering.fusion import fuse_train_step
from pipeline.runtime import CompiledProgram, compile_graph
from pipeline.training.batch import Batch, LossFunction
from pipeline.training.graph import LARGE, MAX_NORM, STEP, make_graph, moment_name, rate_name, stored_name
from pipeline.training.optimizer import OptimizerSettings, rate_state, read_optimizer
from pipeline.training.program import Phase, TrainProgram
from pipeline.training.state_dict import Sources
from pipeline.training.trace import TracedStep, trace_step

__all__ = ["record_step"]

Result = TypeVar("Result")


def record_step(
    module: nn.Module,
    loss: LossFunction,
    optimizer: Optimizer,
    batch: Batch,
    *,
    max_norm: float | None = None,
    large: int = LARGE,
) -> TrainProgram:
    """Record forward, loss, backward and the optimizer's update as one program.

    batch: an example, `(*inputs, target)`, where the loss is `loss(module(*inputs), target)`; or a mapping of names to
        tensors, where it is `loss(module(**those that forward names), batch)`. Later batches have the same shapes.
    max_norm: clip the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does.
    large: bytes from which on a parameter is updated as soon as its gradient is final, and not with the others.

    The module is recorded in the mode that it is in, which is `module.train()` for dropout and BatchNorm. Module and
    optimizer are not changed; the program begins with their values, also in the middle of a training.

    Raises:
        UsageError: the batch has no form that is known, or the loss is no single number that depends on a parameter.
        Unsupported: another optimizer than SGD, Adam and AdamW, or something that torch cannot record.
    """
    phases: list[Phase] = []

    def timed(name: str, work: Callable[[], Result], detail: Callable[[Result], str]) -> Result:
        start = time.perf_counter()
        result = work()
        phases.append(Phase(name, time.perf_counter() - start, detail(result)))
        return result

    def trace() -> tuple[TracedStep, OptimizerSettings, Graph]:
        traced = trace_step(module, loss, batch, clips=max_norm is not None)
        settings = read_optimizer(optimizer, module, traced.params)
        return traced, settings, make_graph(traced, settings, large=large)

    traced, settings, graph = timed("Trace", trace, lambda found: f"{len(found[2].ops)} ops")
    stored = _stored(module, traced)
    weights = {**stored, **_initial(settings, stored, graph, max_norm)}
    compiled = timed(
        "Compile",
        lambda: compile_graph(fuse_train_step(graph), weights),
        lambda made: f"arena of {made.plan.arena_bytes} bytes",
    )
    feed = {
        name: tensor.detach() for name, tensor in traced.layout.tensors(batch).items() if name in traced.layout.names
    }
    capture = timed("Capture", lambda: compiled.capture(feed, mode="train"), lambda made: str(made.report))
    sources = _sources(module, optimizer, traced, stored, compiled)
    return TrainProgram(graph, compiled, traced.layout, sources, capture=capture.report, phases=phases)


def _stored(module: nn.Module, traced: TracedStep) -> dict[str, torch.Tensor]:
    """Parameters and buffers by the names of their values."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {stored_name(name): tensors[name].detach() for name in traced.placeholders}


def _initial(
    settings: OptimizerSettings, stored: dict[str, torch.Tensor], graph: Graph, max_norm: float | None
) -> dict[str, torch.Tensor]:
    """The values that the optimizer's states begin with."""
    found = {STEP: torch.tensor(float(settings.step))}
    if max_norm is not None:
        found[MAX_NORM] = torch.tensor(float(max_norm))
    for group in settings.groups:
        found[rate_name(group.index)] = rate_state(group.learning_rate)
        for name in group.params:
            for sort in group.moments:
                known = settings.moments.get((name, sort))
                found[moment_name(name, sort)] = torch.zeros_like(stored[stored_name(name)]) if known is None else known
    names = {value.name for value in graph.values}
    return {name: tensor for name, tensor in found.items() if name in names}


def _sources(
    module: nn.Module,
    optimizer: Optimizer,
    traced: TracedStep,
    stored: dict[str, torch.Tensor],
    compiled: CompiledProgram,
) -> Sources:
    states = compiled.states()
    names = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    keys = {key: stored_name(names[id(tensor)]) for key, tensor in module.state_dict(keep_vars=True).items()}
    params = [names[id(tensor)] for group in optimizer.param_groups for tensor in group["params"]]
    return Sources(
        module,
        optimizer,
        {name: tensor for name, tensor in stored.items() if name not in states},
        keys,
        {number: name for number, name in enumerate(params) if name in traced.params},
    )
