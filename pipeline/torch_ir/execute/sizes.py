"""Sizes of inputs against the named dims of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from pipeline.errors import UsageError
from pipeline.export.tree import not_dense
from pipeline.ir import Graph
from pipeline.ir.bind import bind_dims, dims_of
from pipeline.torch_ir.weights.stored import sized

__all__ = ["wrong_sizes"]


def wrong_sizes(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What speaks against the sizes of named dims: two of one name, a range or a guard that does not hold.

    Inputs that are absent or fit no size at all are passed over; they are told elsewhere.
    """
    inputs = {graph.values[vid].name: graph.values[vid].spec.shape for vid in graph.inputs}
    fitting = {
        name: one.shape
        for name, one in tensors.items()
        if isinstance(one, torch.Tensor) and not not_dense(one) and sized(one, inputs[name])
    }
    try:
        dims = dims_of(graph, fitting)
        if len(fitting) == len(inputs):
            bind_dims(graph, dims)
    except UsageError as error:
        yield str(error)
