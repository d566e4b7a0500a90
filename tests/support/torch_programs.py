"""Small torch modules, exported, imported and compiled: what the tests of the lowering and of the runtime run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from pipeline.importers.from_torch import from_torch, functionalize_program
from pipeline.ir import Graph, check
from pipeline.runtime import CompiledProgram, compile_graph
from pipeline.runtime.eager import run_eager


class Calls(torch.nn.Module):
    """Several functions of the same tensors; the results of all of them."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        return [function(*tensors) for function in self.functions]


class SmallDecoder(torch.nn.Module):
    """A state, two bodies, traced strides and calls of torch operators: what a plan can hold, in two lines."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(6, 4))

    @staticmethod
    def example() -> list[torch.Tensor]:
        return [torch.ones(4, 1).t(), torch.tensor([0])]

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, at, torch.cond(x.sum() > 0, lambda x: x.relu() + 1, lambda x: x - 1, (x,)))
        return torch.nn.functional.pad(self.cache.t(), (1, 0), value=0.5).sum(0, keepdim=True) * 2


def graph_of(module: torch.nn.Module, inputs: Sequence[torch.Tensor], **options: Any) -> Graph:
    graph = from_torch(functionalize_program(torch.export.export(module, tuple(inputs), strict=False, **options)))
    check(graph)
    return graph


def feed_of(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {graph.values[vid].name: tensor for vid, tensor in zip(graph.inputs, inputs, strict=True)}


def compile_module(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
    """The program with the module's weights, and the feed of `inputs`."""
    graph = graph_of(module, inputs)
    weights = {name: tensor for name, tensor in module.state_dict().items() if name in sources(graph)}
    return compile_graph(graph, weights), feed_of(graph, inputs)


def sources(graph: Graph) -> set[str]:
    return {key for keys in graph.sources.values() for key in keys}


def outputs(graph: Graph, results: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [results[graph.values[vid].name] for vid in graph.outputs]


def run_both(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """What the planned runtime, the plain reference, and the module itself make; random numbers from the same seed."""
    graph = graph_of(module, inputs)
    held = module.state_dict()
    weights = {name: tensor for name, tensor in held.items() if name in sources(graph)}
    by_value = {graph.values[vid].name: held[key] for vid, (key, *_) in graph.sources.items() if key in held}
    program, feed = compile_graph(graph, weights), feed_of(graph, inputs)
    for vid in program.plan.offsets:  # what a kernel does not write is no result then
        program.context._slots[vid].untyped_storage().fill_(0x5A)
    torch.manual_seed(0)
    planned = outputs(graph, program.run(feed))
    torch.manual_seed(0)
    plain = outputs(graph, run_eager(graph, {**by_value, **feed}).outputs)
    torch.manual_seed(0)
    with torch.no_grad():
        results = module(*(tensor.clone() for tensor in inputs))
    return planned, plain, list(tree_leaves(results))


@contextmanager
def in_float64() -> Iterator[None]:
    """float64 is torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
