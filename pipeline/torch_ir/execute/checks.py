"""All that a run needs, held against the IR before anything runs: what is absent or wrong is in one message."""

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
    """What speaks against the sizes of named dims: two of one name, a range or a guard that does not hold.

    Inputs that are absent or fit no size at all are passed over; they are told elsewhere.
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
    """Ops, in bodies too, that read tensors and give them to no argument; all but those with an executor in `own`."""
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
    """The inputs by name; `bound` is what is stored. Sizes may be others than the declared ones if not `strict_sizes`;
    `dynamic`: some have names, and are held to their ranges and guards. `counted` are the values whose order in memory
    the results depend on.

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
    """The message stays the sentences of pytorch-ir, which its users know; what helps with them stands below."""
    for note in notes:
        error.add_note(note)
    return error
