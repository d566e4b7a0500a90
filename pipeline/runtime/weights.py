"""Stored values as tensors: payloads of the graph, or tensors that the caller gives by name."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from passes.suggest import nearest
from pipeline.errors import SourceError, UsageError
from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir.graph import Graph, Payload, Value
from pipeline.runtime.devices import CPU
from pipeline.runtime.tensors import as_tensor, dtype_name, why_unreadable

Weights = Mapping[str, torch.Tensor]


def stored_tensor(payload: Payload, strides: Sequence[int] | None = None) -> torch.Tensor:
    """The payload as a CPU tensor with these strides (None: contiguous); copied only where they differ."""
    return CPU.copy_in(payload.tensor if isinstance(payload, TensorPayload) else as_tensor(payload.numpy()), strides)


Lenders = Mapping[int, weakref.ref[torch.Tensor]]
"""By vid, the caller's tensors whose memory the bound weights show; a program keeps the memory, not the tensors."""


def lenders_of(payloads: Mapping[int, Payload], bound: Mapping[int, torch.Tensor]) -> Lenders:
    """The tensors among `payloads` whose memory `bound` shows; what was copied when it was bound lends nothing."""
    return {
        vid: weakref.ref(payload.tensor)
        for vid, payload in payloads.items()
        if vid in bound and isinstance(payload, TensorPayload) and _same_storage(payload.tensor, bound[vid])
    }


def refuse_moved(lenders: Lenders, bound: Mapping[int, torch.Tensor], names: Mapping[int, str]) -> None:
    """Check that the caller's tensors still have the memory that was bound.

    Raises:
        UsageError: one was given other memory, so that the program computes with numbers that its caller does not see.
    """
    for vid, lender in lenders.items():
        tensor = lender()
        if tensor is not None and not _same_storage(tensor, bound[vid]):
            raise UsageError(
                f"weight {names[vid]!r} was bound to the memory of a tensor that has other memory now (`.data` was "
                "set, or the module was moved); compile the graph again with the weights as they are"
            )


def _same_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def with_weights(graph: Graph, weights: Weights) -> Graph:
    """`graph` with `weights` as payloads; they are matched by any name in `Graph.weight_names`.

    Raises:
        SourceError: names that the graph does not have, tensors that are not what it declares, or different ones under
            two names of one weight: all of them.
    """
    return _with_named(graph, weights, {name: vid for vid, names in graph.weight_names().items() for name in names})


def with_stored(graph: Graph, tensors: Weights) -> Graph:
    """`graph` with `tensors` as payloads, by the names of its values only, never by names in a checkpoint.

    Raises:
        SourceError: as `with_weights`.
    """
    return _with_named(graph, tensors, {graph.values[vid].name: vid for vid in graph.weight_names()})


def _with_named(graph: Graph, tensors: Weights, vids: Mapping[str, int]) -> Graph:
    if not tensors:
        return graph
    wrong = [problem for name, tensor in tensors.items() if (problem := _wrong(graph, vids, name, tensor))]
    if wrong := wrong or [*_other_twins(vids, tensors)]:
        listed = "\n".join(f"  - {problem}" for problem in wrong)
        raise SourceError(f"weights that do not belong to graph {graph.name!r}:\n{listed}")
    given = {vids[name]: TensorPayload(tensor) for name, tensor in tensors.items()}
    return replace(graph, payloads={**graph.payloads, **given})


def _other_twins(vids: Mapping[str, int], tensors: Weights) -> Iterator[str]:
    """Names of one weight under which different tensors are given: either could be meant."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        twin = first.setdefault(vids[name], name)
        if twin != name and not _is_same(tensors[twin], tensor):
            yield f"{twin!r} and {name!r} are names of one weight, and the two tensors differ: leave one of them out"


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same memory, or the same bytes."""
    if _same_storage(one, other) and one.storage_offset() == other.storage_offset() and one.stride() == other.stride():
        return True
    return bool(TensorPayload(one).numpy().tobytes() == TensorPayload(other).numpy().tobytes())


def _wrong(graph: Graph, vids: Mapping[str, int], name: str, tensor: torch.Tensor) -> str:
    if name not in vids:
        return f"it has no {name!r}{nearest(name, vids)}"
    if why := why_unreadable(tensor):
        return f"{name!r} {why}"
    value: Value = graph.values[vids[name]]
    if (tuple(tensor.shape), dtype_name(tensor.dtype)) == (value.spec.shape, value.spec.dtype):
        return ""
    found = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    return f"{name!r} is {found}; the graph declares {value.spec.dtype}{list(value.spec.shape)}"
