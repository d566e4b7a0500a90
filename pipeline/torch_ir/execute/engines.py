"""The two engines that run an IR: the planned runtime, a program for each set of sizes, and the reference, op by op.

States, the buffers that the model writes to, pass from one engine to the other by name. Those that a failed run has
left half written are reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

import torch

from pipeline.errors import Unsupported
from pipeline.importers.from_torch.operators import RUNNING, WHEN_TRAINING
from pipeline.ir import Graph, Op, Role, Value
from pipeline.runtime import SizedProgram
from pipeline.runtime.eager import Own, as_traced, run_eager
from pipeline.runtime.states import LostStates
from pipeline.runtime.weights import with_stored
from pipeline.torch_ir.calls import find_known_operator
from pipeline.torch_ir.document.nodes import key_of, stored_values
from pipeline.torch_ir.errors import ExecutionError
from pipeline.torch_ir.execute.checks import refuse_other_moves
from pipeline.torch_ir.execute.memory import copy_if_shared, counts_from_storage
from pipeline.torch_ir.weights import fits_shape, misfit

Tensors = Mapping[str, torch.Tensor]


def copy_given_states(graph: Graph, given: Tensors, *, any_stored: bool) -> dict[str, torch.Tensor]:
    """Copies of `given` by the names of placeholders; they come by these, or by names in the checkpoint.

    With `any_stored`, whatever is stored may be written to, as it is where ops write to their arguments.

    Raises:
        ExecutionError: no such state, or another shape or dtype; the message lists all of it.
    """
    values = [value for value in stored_values(graph) if any_stored or _is_state(graph, value)]
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


def lost_states_error(graph: Graph, names: Collection[str]) -> ExecutionError:
    """The error that says what to do after a failed run had begun to write to the states `names`."""
    keys = [key_of(graph, value) for value in stored_values(graph) if value.name in names]
    which = ", ".join(map(repr, keys))
    return ExecutionError(
        f"a run that failed had begun to write to {which}, which hold no value now; put back what `updates` gave "
        f"before that run, as in give_states({{{keys[0]!r}: tensor}}), or load the weights again (load_weights, "
        "load_weights_from_state_dict): then what all earlier runs have written is lost"
    )


def versions(tensors: Tensors) -> dict[str, int]:
    """torch's count of writes to each tensor, through views too."""
    return {name: tensor._version for name, tensor in tensors.items()}


def find_write(graph: Graph) -> Op | None:
    """The first op, in bodies too, that writes to its arguments; None in an IR that was functionalized."""
    for op in graph.ops:
        if _changes(op):
            return op
        found = next(filter(None, map(find_write, op.bodies)), None)
        if found is not None:
            return found
    return None


def _changes(op: Op) -> bool:
    operator = find_known_operator(op.kind)
    if operator is not None and operator._schema.is_mutable:
        return True
    is_training = op.kind in WHEN_TRAINING and (op.attrs.get("training") or op.attrs.get("use_input_stats")) is True
    return is_training and any(op.attrs.get(name) is not None for name in RUNNING)


def _is_state(graph: Graph, value: Value) -> bool:
    return value.role is Role.STATE and value.vid in graph.updates


Results = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Outputs by name, and the values after the run of the inputs that the model writes to."""


class ReferenceEngine:
    """Runs op by op, keeps states between runs, and never writes to tensors of the caller.

    `writing` is an op of the graph that writes to its arguments, which only an IR that was not functionalized has. Then
    any stored tensor may be written to, so all are copied before the first run.
    """

    def __init__(self, graph: Graph) -> None:
        self.writing = find_write(graph)
        self._graph = graph
        self._names = {value.name for value in graph.with_role(Role.STATE)}
        self._values = {value.name: value for value in stored_values(graph)}
        self._states: dict[str, torch.Tensor] = {}
        self._lost: set[str] = set()
        """States on which ops had begun to write when a run failed."""

    def run(self, stored: Tensors, inputs: Tensors, own: Own, given: Collection[str] = ()) -> Results:
        """
        `stored` are weights, constants and states as they were at first; those in `given` are taken for this run as
        they come. `own` are executors of single ops.

        Raises:
            DataError: an index in the inputs is out of range.
            LostStates: an earlier run that failed had begun to write to some states.
        """
        self._refuse_lost()
        tensors = {**self._with_states(stored, given), **(inputs if self.writing is None else _copies(inputs))}
        before = versions(self._states)
        try:
            with torch.no_grad():
                result = run_eager(self._graph, tensors, check=False, own=own)
        except BaseException:
            after = versions(self._states)
            self._lost = {name for name in after if after[name] != before[name]}
            raise
        updates = copy_if_shared(result.updates, tensors.values())
        self._states |= {name: tensor for name, tensor in updates.items() if name in self._names}
        updated = {name: tensor for name, tensor in updates.items() if name not in self._names}
        return copy_if_shared(result.outputs, [*tensors.values(), *self._states.values(), *updated.values()]), updated

    def states(self) -> dict[str, torch.Tensor]:
        """Copies of the states that were written or given.

        Raises:
            LostStates: a run that failed had begun to write to some.
        """
        self._refuse_lost()
        return _copies(self._states)

    def give_states(self, states: Tensors) -> None:
        self._states |= self._with_traced_strides(states)
        self._lost -= states.keys()

    def _refuse_lost(self) -> None:
        if self._lost:
            raise LostStates(self._lost)

    def _with_states(self, stored: Tensors, given: Collection[str]) -> Tensors:
        if self.writing is not None:
            missing = {name: one for name, one in stored.items() if name not in self._states}
            self._states |= self._with_traced_strides(_copies(missing))
        return {**stored, **{name: one for name, one in self._states.items() if name not in given}}

    def _with_traced_strides(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors with traced strides: with others, a run would copy them and write to the copies."""
        return {name: as_traced(tensor, self._values[name]) for name, tensor in tensors.items()}


def _copies(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


MOST_PROGRAMS = 16
"""For how many sets of sizes an engine keeps plans and arenas; what ran longest ago is dropped."""


class PlannedEngine:
    """Runs plans, one for each set of sizes, over one set of states."""

    def __init__(self, graph: Graph, weights: Tensors) -> None:
        self._graph = graph
        self._weights = weights
        self._program: SizedProgram | None = None
        """Made by the first run, from the weights and the states that were given until then."""

    def run(self, inputs: Tensors) -> Results:
        """
        Raises:
            Unsupported: the runtime cannot run this graph; the message says what it lacks.
            UsageError: sizes that the graph does not hold for.
            ExecutionError: a node has other results than the graph says.
            DataError: an index in the inputs is out of range.
            LostStates: an earlier run that failed had begun to write to some states.
        """
        if self._program is None:
            stored = with_stored(self._graph, self._weights)
            self._program = SizedProgram(stored, limit=MOST_PROGRAMS, approve=refuse_other_moves)
        return self._program.run_updating(inputs)

    def states(self) -> dict[str, torch.Tensor]:
        """Copies of the states as they are; empty before the first run.

        Raises:
            LostStates: a run that failed had begun to write to some.
        """
        return {} if self._program is None else self._program.states()

    def give_states(self, states: Tensors) -> None:
        if self._program is not None and self._program.sizes:
            self._program.give_states(states)
        else:  # nothing ran so far
            self._weights = {**self._weights, **states}
            self._program = None


Engine = TypeVar("Engine", PlannedEngine, ReferenceEngine)


class Engines:
    """Runs on the planned runtime where possible, else on the plain reference; the states move to the one that runs.

    `not_planned` says why the planned runtime is not used although it was asked for; "" where it is.
    """

    def __init__(self, graph: Graph, own: Own, *, planned: bool) -> None:
        self._graph = graph
        self._own = own
        self._inputs = [graph.values[vid] for vid in graph.inputs]
        self._from_storage = counts_from_storage(graph)
        self._reference = ReferenceEngine(graph)
        self._engine: PlannedEngine | None = None
        self._holder: PlannedEngine | ReferenceEngine = self._reference
        """The engine that ran last, which has the states."""
        self.updated: dict[str, torch.Tensor] = {}
        """After a run: the values of the inputs that the model writes to."""
        self.not_planned = _never(own, self._reference.writing) if planned else ""
        self._planned = planned and not self.not_planned

    @property
    def writes(self) -> bool:
        """Whether ops of the graph write to their arguments, as they do without functionalization."""
        return self._reference.writing is not None

    def run(self, stored: Tensors, inputs: Tensors, *, strict_sizes: bool) -> Tensors:
        """Outputs by name, on the planned runtime if it can."""
        if self._fits(inputs, strict_sizes=strict_sizes):
            if self._engine is None:
                self._engine = PlannedEngine(self._graph, stored)
            try:
                outputs, self.updated = self._holding(self._engine).run(inputs)
                return outputs
            except Unsupported as error:  # raised before anything ran; the runtime is not tried again
                self._holding(self._reference)
                self.not_planned, self._planned, self._engine = str(error), False, None
        return self.refer(stored, inputs)

    def refer(self, stored: Tensors, inputs: Tensors, own: Own | None = None, given: Collection[str] = ()) -> Tensors:
        """Outputs by name, on the reference; `own` and `given` are its own."""
        own = self._own if own is None else own
        outputs, self.updated = self._holding(self._reference).run(stored, inputs, own, given)
        return outputs

    def states(self) -> dict[str, torch.Tensor]:
        """
        Raises:
            LostStates: a run that failed had begun to write to some.
        """
        return self._holder.states()

    def give_states(self, states: Tensors) -> None:
        self._holder.give_states(states)

    def _holding(self, engine: Engine) -> Engine:
        """Move the states to `engine`, which runs next, and return it."""
        if self._holder is not engine:
            engine.give_states(self._holder.states())
            self._holder = engine
        return engine

    def _fits(self, inputs: Tensors, *, strict_sizes: bool) -> bool:
        """Whether the planned runtime takes these inputs: exact sizes, on the CPU, and at the begin of their storage if
        some `as_strided` counts from there.
        """
        if not self._planned or any(not tensor.is_cpu for tensor in inputs.values()):
            return False
        if self._from_storage and any(tensor.storage_offset() for tensor in inputs.values()):
            return False
        return strict_sizes or all(fits_shape(inputs[value.name], value.spec.shape) for value in self._inputs)


def _never(own: Own, writing: Op | None) -> str:
    if own:
        return f"executors of your own run {', '.join(sorted(own))} (register_executor), which a plan cannot call"
    if writing is not None:
        return (
            f"{writing.kind} writes to its arguments, and a plan holds values that no op changes; extract_ir turns "
            "writes into values, unless functionalize=False is given"
        )
    return ""
