"""Check all that a run needs before anything runs; one message lists everything that is missing or wrong."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from pipeline.errors import UsageError
from pipeline.export.tree import not_dense
from pipeline.ir import Graph, InputRef, Op, Value
from pipeline.ir.bind import bind_dims, dims_of
from pipeline.ir.graph import parts
from pipeline.runtime.torch_args import find_operator
from pipeline.torch_ir.errors import ExecutionError
from pipeline.torch_ir.execute.arguments import Inputs, feed
from pipeline.torch_ir.execute.memory import find_other_strides, shared_and_written
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.weights import Bound, fits_shape, misfit, missing_message

__all__ = ["check_inputs", "find_unmatched_ops", "refuse_unmatched_ops"]


def wrong_sizes(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What is wrong with the sizes of named dims: two sizes for one name, or a violated range or guard.

    Inputs that are absent or do not fit at all are skipped; they are reported elsewhere.
    """
    inputs = {graph.values[vid].name: graph.values[vid].spec.shape for vid in graph.inputs}
    fitting = {
        name: one.shape
        for name, one in tensors.items()
        if isinstance(one, torch.Tensor) and not not_dense(one) and fits_shape(one, inputs[name])
    }
    try:
        dims = dims_of(graph, fitting)
        if len(fitting) == len(inputs):
            bind_dims(graph, dims)
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
