"""Memory that two tensors share: harmless, unless somebody writes to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from pipeline.importers.from_torch.memory import extent, meet
from pipeline.ir import Graph

__all__ = ["shared_and_written", "unshared"]

Tensors = Mapping[str, torch.Tensor]


def shared_and_written(graph: Graph, tensors: Tensors) -> Iterator[str]:
    """Inputs that the model writes to and that have bytes in common with another: an IR takes each for one of its own.

    The halves of a cache have none in common, though they may lie in the same memory.
    """
    written = [graph.values[vid].name for vid in graph.inputs if vid in graph.updates]
    places = {name: (tensor.data_ptr(), tensor.data_ptr() + extent(tensor)) for name, tensor in tensors.items()}
    for name in written:
        begin, end = places[name]
        others = [
            other
            for other, (first, last) in places.items()
            if first < end and begin < last and other != name and meet(tensors[name], tensors[other], first - begin)
        ]
        if others:
            yield (
                f"input {name!r} shares memory with {', '.join(map(repr, others))}, and the model writes to it, "
                "which the IR shows in one place only: give copies (.clone())"
            )


def unshared(outputs: Tensors, kept: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs with memory of their own: who writes to one must not write to a weight, an input or a state."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.layout is torch.strided}
    return {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in taken else tensor
        for name, tensor in outputs.items()
    }
