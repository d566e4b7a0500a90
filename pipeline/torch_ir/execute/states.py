"""What the model writes to, from call to call: given back by name, and told where a run that failed took it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from pipeline.importers.from_torch.operators import WHEN_TRAINING
from pipeline.ir import Graph, Op, Role, Value
from pipeline.torch_ir.calls import find_operator
from pipeline.torch_ir.errors import ExecutionError
from pipeline.torch_ir.nodes import key_of, stored
from pipeline.torch_ir.weights.binding import misfit

__all__ = ["given_states", "lost", "versions", "writes"]

Tensors = Mapping[str, torch.Tensor]


def given_states(graph: Graph, given: Tensors, *, any_stored: bool) -> dict[str, torch.Tensor]:
    """Copies of `given` by the names of placeholders; they come by these, or by names in the checkpoint.

    With `any_stored`, whatever is stored may be written to, as it is where ops write to their arguments.

    Raises:
        ExecutionError: no such state, or another shape or dtype; the message lists all of it.
    """
    values = [value for value in stored(graph) if any_stored or _is_state(graph, value)]
    names = graph.weight_names()
    named = {name: value for value in values for name in names[value.vid]}
    known = ", ".join(repr(key_of(graph, value)) for value in values) or "none"
    wrong = [
        f"state {name!r}: the model writes to no such buffer; expected of {known}" for name in given.keys() - named
    ]
    for name in given.keys() & named:
        wrong.extend(misfit(f"state {name!r}", given[name], named[name], named[name].spec.shape))
    if wrong:
        raise ExecutionError("\n".join(sorted(wrong)))
    return {named[name].name: tensor.detach().clone() for name, tensor in given.items()}


def lost(graph: Graph, names: Collection[str]) -> ExecutionError:
    """What to do where a run that failed had begun to write to the states `names`."""
    keys = [key_of(graph, value) for value in stored(graph) if value.name in names]
    which = ", ".join(map(repr, keys))
    return ExecutionError(
        f"a run that failed had begun to write to {which}, which hold no value now; put back what `updates` gave "
        f"before that run, as in give_states({{{keys[0]!r}: tensor}}), or load the weights again (load_weights, "
        "load_weights_from_state_dict): then what all earlier runs have written is lost"
    )


def versions(tensors: Tensors) -> dict[str, int]:
    """Torch counts the writes to each tensor, through views too."""
    return {name: tensor._version for name, tensor in tensors.items()}


def writes(graph: Graph) -> bool:
    """Whether some op writes to its arguments: the IR was not functionalized."""
    return any(_changes(op) or any(map(writes, op.bodies)) for op in graph.ops)


def _changes(op: Op) -> bool:
    operator = find_operator(op.kind)
    if operator is not None and operator._schema.is_mutable:
        return True
    return op.kind in WHEN_TRAINING and (op.attrs.get("training") or op.attrs.get("use_input_stats")) is True


def _is_state(graph: Graph, value: Value) -> bool:
    return value.role is Role.STATE and value.vid in graph.updates
