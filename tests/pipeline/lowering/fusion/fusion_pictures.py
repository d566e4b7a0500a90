"""A pass on the IR as text before → after; the same numbers, and nothing more to do the second time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

from pipeline.ir import Graph, check, from_text, to_text
from pipeline.runtime import compile_graph
from pipeline.runtime.slots import with_weights
from pipeline.runtime.tensors import torch_dtype

Pass = Callable[[Graph], Graph]
Tensors = Mapping[str, torch.Tensor]

ATOL = 1e-5

RTOL = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""float32: both sides sum up to a few hundred terms in orders of their own. Half precision: two roundings, where a
joined call rounds once and the ops one after the other round each result."""


HEAD = re.compile(r"\s*graph .*\{\n((\s*(param|state|const) .*)?\n)*")
"""The first lines of a graph: its name, its inputs and what it stores."""


def assert_becomes(apply: Pass, before: str, after: str, fixed: Tensors | None = None) -> None:
    """`after` has the head of `before` where it has none; `fixed` are the numbers of some weights; all others, and
    the inputs, are drawn."""
    if HEAD.match(after) is None:
        head = HEAD.match(before)
        assert head is not None
        after = f"{head[0]}{after}}}"
    graph = _read(before, fixed or {})
    fused = apply(graph)
    assert to_text(fused) == to_text(from_text(after))
    check(fused)
    assert to_text(apply(fused)) == to_text(fused)
    feed = {graph.values[vid].name: _draw(graph, vid) for vid in graph.inputs}
    outputs = compile_graph(fused).run(feed)
    for name, expected in compile_graph(graph).run(feed).items():
        torch.testing.assert_close(outputs[name], expected, atol=ATOL, rtol=RTOL.get(expected.dtype, 1e-5))


def assert_stays(apply: Pass, before: str, fixed: Tensors | None = None) -> None:
    graph = _read(before, fixed or {})
    assert apply(graph) is graph


def _read(text: str, fixed: Tensors) -> Graph:
    graph = from_text(text)
    stored = {graph.values[vid].name: vid for vid in graph.weight_names()}
    return with_weights(graph, {name: _draw(graph, vid) for name, vid in stored.items()} | dict(fixed))


def _draw(graph: Graph, vid: int) -> torch.Tensor:
    """Positive numbers, so that a variance is one."""
    value = graph.values[vid]
    generator = torch.Generator().manual_seed(vid)
    return (torch.rand(value.spec.sizes, generator=generator) + 0.1).to(torch_dtype(value.spec.dtype))
