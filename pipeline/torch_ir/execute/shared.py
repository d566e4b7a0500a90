"""Memory that two tensors share: harmless, unless somebody writes to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from pipeline.ir import Graph

__all__ = ["shared_and_written", "unshared"]

Tensors = Mapping[str, torch.Tensor]


def shared_and_written(graph: Graph, tensors: Tensors) -> Iterator[str]:
    """Inputs that the model writes to and that begin where another begins: an IR takes each for a tensor of its own.

    Tensors of one memory that begin elsewhere in it, such as the halves of a cache, are taken for distinct.
    """
    written = [graph.values[vid].name for vid in graph.inputs if vid in graph.updates]
    for name in written:
        others = [other for other in tensors if other != name and _begins_with(tensors[name], tensors[other])]
        if others:
            yield (
                f"input {name!r} is the same tensor as {', '.join(map(repr, others))}, and the model writes to it, "
                "which the IR shows in one place only: give copies (.clone())"
            )


def unshared(outputs: Tensors, kept: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs with memory of their own: who writes to one must not write to a weight, an input or a state."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.layout is torch.strided}
    return {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in taken else tensor
        for name, tensor in outputs.items()
    }


def _begins_with(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.numel() > 0 and other.numel() > 0 and one.data_ptr() == other.data_ptr() != 0)
