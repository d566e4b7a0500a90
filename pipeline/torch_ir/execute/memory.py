"""Cases where the memory of tensors matters: two share bytes and one is written, or an `as_strided` reads by offsets.

Otherwise given tensors are copied to the strides of the trace. Under an `as_strided` that would give another result
than the model itself computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from pipeline.importers.from_torch.tensors import copy_with_strides, extent, meet
from pipeline.ir import Graph, Op, Role, Value
from pipeline.ir.bind import bind_dims, dim_names, dims_of
from pipeline.lowering.traced_order import AS_STRIDED
from pipeline.ops import Layout

Tensors = Mapping[str, torch.Tensor]


def shared_and_written(graph: Graph, tensors: Tensors) -> Iterator[str]:
    """Report inputs that the model writes to and that share bytes with another: an IR treats inputs as separate.

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


def copy_if_shared(outputs: Tensors, kept: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy outputs that share a storage with `kept`, so that a write to them changes no weight, input or state."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.layout is torch.strided}
    return {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in taken else tensor
        for name, tensor in outputs.items()
    }


def find_counted_values(graph: Graph) -> list[Value]:
    """Inputs and stored values that some `as_strided`, in a body too, is computed from."""
    reached: set[int] = set()
    for op in reversed(graph.ops):
        if _counts(op) or (op.kind not in ROWS and not reached.isdisjoint(op.outputs)):
            reached.update(op.inputs)
    return [value for value in graph.values if value.producer is None and value.vid in reached]


def counts_from_storage(graph: Graph) -> bool:
    """Whether some `as_strided` says where in the storage it begins. A plan counts from the first element of an input,
    which is the same place only where the input begins its storage.
    """
    return any(
        (op.kind == AS_STRIDED and "storage_offset" in op.attrs) or any(map(counts_from_storage, op.bodies))
        for op in graph.ops
    )


def find_other_strides(graph: Graph, values: Sequence[Value], tensors: Tensors) -> Iterator[str]:
    """A message for each tensor of `values` whose strides are not those of the trace.

    A stored tensor may have other strides if it had no gaps in the trace: then it can be copied to them.
    """
    values = [value for value in values if value.name in tensors]
    for value, strides in zip(values, _traced_strides(graph, values, tensors), strict=True):
        tensor = tensors[value.name]
        if _has_strides(tensor, strides) or (value.role is not Role.INPUT and _dense(tensor.shape, strides)):
            continue
        yield (
            f"{'input' if value.role is Role.INPUT else 'weight'} {value.name!r}: found strides "
            f"{list(tensor.stride())}, but the IR was traced with {list(strides)}, and the model counts through its "
            "memory (as_strided): give a tensor with these strides, or extract it again with one like this"
        )


def copy_from_first_element(values: Sequence[Value], tensors: Tensors) -> dict[str, torch.Tensor]:
    """Copies of stored tensors that begin inside of a storage: in the trace their storage began with them."""
    given = {value.name: tensors[value.name] for value in values if value.name in tensors}
    return {
        name: copy_with_strides(one)
        for name, one in given.items()
        if isinstance(one, torch.Tensor) and one.layout is torch.strided and one.storage_offset()
    }


def _counts(op: Op) -> bool:
    return op.kind.startswith("aten.as_strided") or any(_counts(inner) for body in op.bodies for inner in body.ops)


def _traced_strides(graph: Graph, values: Sequence[Value], tensors: Tensors) -> list[tuple[int, ...]]:
    if values and dim_names(graph):
        named = {graph.values[vid].name for vid in graph.inputs}
        bound = bind_dims(graph, dims_of(graph, {name: one.shape for name, one in tensors.items() if name in named}))
        values = [bound.values[value.vid] for value in values]
    return [_strides(value, tensors[value.name].shape) for value in values]


def _strides(value: Value, shape: Sequence[int]) -> tuple[int, ...]:
    if value.strides is not None:
        return tuple(stride for stride in value.strides if isinstance(stride, int))
    return torch.empty(tuple(shape), device="meta").stride()


def _has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    axes = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return not tensor.numel() or all(size == 1 or own == wanted for size, own, wanted in axes)


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements with these strides leave no gap, and are all distinct."""
    like = torch.empty_strided(tuple(shape), tuple(strides), dtype=torch.int8, device="meta")
    return extent(like) == like.numel() and Layout(tuple(shape), tuple(strides)).is_distinct


ROWS = frozenset({"aten.embedding.default", "aten.linear.default"})
"""Operators whose results are contiguous, whatever the strides of their arguments."""
