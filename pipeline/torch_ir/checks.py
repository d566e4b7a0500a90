"""Check all that a run needs before anything runs; one message lists everything that is missing or wrong.

Nodes may declare other results than their operators make: those of a traced IR do not, those of an edited or damaged
one may. Each operator is run on the meta device, on tensors as they are declared, so nothing is computed. Operators
that do not run on meta are skipped.

The memory of tensors matters where two share bytes and one is written, or an `as_strided` reads by offsets. Otherwise
given tensors are copied to the strides of the trace; under an `as_strided` that would give another result than the
model itself computes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pipeline.errors import UsageError
from pipeline.export.tree import not_dense
from pipeline.importers.from_torch.tensors import copy_with_strides, extent, is_dense, overlap
from pipeline.ir import Graph, InputRef, Op, Role, Value
from pipeline.ir.dims import dim_names, dims_of, fix_dims
from pipeline.ir.graph import parts
from pipeline.ops.aten.memory import AS_STRIDED
from pipeline.runtime.call_check import find_mismatch, key_of_call
from pipeline.runtime.kernels.base import place_of
from pipeline.runtime.operators import find_operator
from pipeline.runtime.tensors import has_strides
from pipeline.torch_ir.arguments import Inputs, feed
from pipeline.torch_ir.errors import ExecutionError
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.weights import Bound, fits_shape, misfit, missing_message

Tensors = Mapping[str, torch.Tensor]


def wrong_sizes(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What is wrong with the sizes of named dims: two sizes for one name, or a violated range or guard.

    Inputs that are absent or do not fit at all are skipped; they are reported elsewhere.
    """
    inputs = {graph.values[vid].name: graph.values[vid].spec.shape for vid in graph.inputs}
    fitting = {
        name: tensor.shape
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and not not_dense(tensor) and fits_shape(tensor, inputs[name])
    }
    try:
        dims = dims_of(graph, fitting)
        if len(fitting) == len(inputs):
            fix_dims(graph, dims)
    except UsageError as error:
        yield str(error)


def find_unmatched_ops(graph: Graph, own: Container[str]) -> list[Op]:
    """Ops, in bodies too, whose input tensors match no argument, except those with an executor in `own`."""
    return [
        *(op for op in graph.ops if op.inputs and op.kind not in own and not _gives_tensors(op)),
        *(op for outer in graph.ops for body in outer.bodies for op in find_unmatched_ops(body, own)),
    ]


def refuse_unmatched_ops(ops: Sequence[Op]) -> None:
    """
    Raises:
        SourceError: torch has no such operator.
        ExecutionError: it has one by now.
    """
    for op in ops:
        find_operator(op.kind)
        raise ExecutionError(
            f"node {op.name!r}: {op.kind} was not there when the IR was read, so nobody knows which tensor is which "
            "argument: import the module that defines it first, then load the IR"
        )


def _gives_tensors(op: Op) -> bool:
    return any(type(part) is InputRef for item in op.attrs.values() for part in parts(item))


def check_inputs(
    ir: IR,
    bound: Bound,
    inputs: Inputs,
    kwargs: Mapping[str, Any] | None,
    *,
    strict_sizes: bool,
    dynamic: bool,
    counted: Sequence[Value] = (),
) -> dict[str, torch.Tensor]:
    """Check arguments and stored tensors (`bound`), and return the inputs by name.

    With `strict_sizes` the declared sizes are required; with `dynamic`, named sizes have to keep their ranges and
    guards. `counted` are the values on whose strides the results depend.

    Raises:
        ExecutionError: something is missing or does not fit.
    """
    fed = feed(ir, inputs, kwargs)
    missing, wrong = list(bound.missing), list(bound.wrong)
    for vid in ir.graph.inputs:
        value = ir.graph.values[vid]
        if value.name in fed.tensors:
            shape = value.spec.shape if strict_sizes else ("any",) * fed.tensors[value.name].dim()
            wrong.extend(misfit(f"input {value.name!r}", fed.tensors[value.name], value, shape))
        elif value.name not in fed.explained:
            missing.append(missing_message(ir.graph, value))
    if dynamic:
        wrong.extend(wrong_sizes(ir.graph, fed.tensors))
    if not missing and not wrong and not fed.problems:
        wrong.extend(shared_and_written(ir.graph, fed.tensors))
        wrong.extend(find_other_strides(ir.graph, counted, {**bound.tensors, **fed.tensors}))
    if missing and not wrong and (fed.only_absent or not fed.problems):
        raise _add_notes(ExecutionError("\n".join(missing)), [*fed.problems, *bound.hints])
    if missing or wrong or fed.problems:
        raise ExecutionError("\n".join([*missing, *fed.problems, *wrong, *bound.hints]))
    return fed.tensors


def _add_notes(error: ExecutionError, notes: Sequence[str]) -> ExecutionError:
    """Add hints as notes, so that the message itself stays that of pytorch-ir, which its users know."""
    for note in notes:
        error.add_note(note)
    return error


def refuse_other_results(graph: Graph) -> None:
    """
    Raises:
        ExecutionError: nodes declare other results than their operators make; all of them.
    """
    if said := _find_all_mismatches(graph):
        raise ExecutionError("\n".join(said))


def explain_wrong_results(
    graph: Graph, inputs: Mapping[str, torch.Tensor], own: Container[str]
) -> ExecutionError | None:
    """The error for a failed run on `inputs`, if declared results are wrong; ops of a kind in `own` are skipped."""
    if dim_names(graph):
        graph = fix_dims(graph, dims_of(graph, {name: tuple(tensor.shape) for name, tensor in inputs.items()}))
    said = _find_all_mismatches(graph, own)
    return ExecutionError("\n".join(said)) if said else None


def _find_all_mismatches(graph: Graph, own: Container[str] = ()) -> list[str]:
    """One line for each op that declares other results; equal calls are run once."""
    wrong, said_of = [], dict[object, str]()
    for op in graph.ops:
        if op.bodies or op.kind in own:
            continue
        key = key_of_call(graph, op)
        if key not in said_of:
            ins, outs = ([graph.values[vid].spec for vid in vids] for vids in (op.inputs, op.outputs))
            said_of[key] = find_mismatch(op.kind, op.attrs, ins, outs)
        if said := said_of[key]:
            wrong.append(f"{place_of(op)}: {said}; correct the node, or extract the IR again")
    return wrong


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
            if first < end and begin < last and other != name and overlap(tensors[name], tensors[other], first - begin)
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
        if has_strides(tensor, strides) or (value.role is not Role.INPUT and _is_dense(tensor.shape, strides)):
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
        name: copy_with_strides(tensor)
        for name, tensor in given.items()
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.storage_offset()
    }


def _counts(op: Op) -> bool:
    return op.kind.startswith("aten.as_strided") or any(_counts(inner) for body in op.bodies for inner in body.ops)


def _traced_strides(graph: Graph, values: Sequence[Value], tensors: Tensors) -> list[tuple[int, ...]]:
    if values and dim_names(graph):
        named = {graph.values[vid].name for vid in graph.inputs}
        shapes = {name: tensor.shape for name, tensor in tensors.items() if name in named}
        bound = fix_dims(graph, dims_of(graph, shapes))
        values = [bound.values[value.vid] for value in values]
    return [_strides(value, tensors[value.name].shape) for value in values]


def _strides(value: Value, shape: Sequence[int]) -> tuple[int, ...]:
    if value.strides is not None:
        return tuple(stride for stride in value.strides if isinstance(stride, int))
    return torch.empty(tuple(shape), device="meta").stride()


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return is_dense(torch.empty_strided(tuple(shape), tuple(strides), dtype=torch.int8, device="meta"))


ROWS = frozenset({"aten.embedding.default", "aten.linear.default"})
"""Operators whose results are contiguous, whatever the strides of their arguments."""
