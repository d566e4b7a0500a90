"""What runs an IR: the planned runtime, with a program for each set of sizes, or its plain reference op by op.

The engine keeps the states, the buffers that the model writes to, from run to run: in the program where there is one,
else as tensors by name. A run op by op works on copies, so one that fails changes no state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from pipeline.errors import Unsupported
from pipeline.importers.from_torch.operators import RUNNING, WHEN_TRAINING
from pipeline.ir import Graph, Op, Role, Value
from pipeline.runtime import SizedProgram
from pipeline.runtime.compile import BindOptions
from pipeline.runtime.devices import Device
from pipeline.runtime.eager import Own, Step, as_traced, run_eager, walk_eager
from pipeline.runtime.slots import with_stored
from pipeline.torch_ir.calls import find_known_operator
from pipeline.torch_ir.checks import copy_if_shared, counts_from_storage, refuse_other_results
from pipeline.torch_ir.errors import ExecutionError
from pipeline.torch_ir.nodes import key_of, stored_values
from pipeline.torch_ir.weights import fits_shape, misfit

Tensors = Mapping[str, torch.Tensor]

MOST_PROGRAMS = 16
"""For how many sets of sizes an engine keeps plans and arenas; what ran longest ago is dropped."""


class Engine:
    """Runs on the planned runtime where possible, else op by op, and never writes to tensors of the caller.

    Args:
        graph: what is run.
        own: kind of an op → the user's executor of it; a graph with any runs op by op.
        planned: whether the planned runtime was asked for.
        device: where plans run; a run op by op is refused where a device is named.
    """

    def __init__(
        self, graph: Graph, own: Own, *, planned: bool, device: Device | torch.device | str | None = None
    ) -> None:
        self._graph = graph
        self._own = own
        self._inputs = [graph.values[vid] for vid in graph.inputs]
        self._stored = {value.name: value for value in stored_values(graph)}
        self._from_storage = counts_from_storage(graph)
        self._first_write = find_write(graph)
        self._program: SizedProgram | None = None
        """Made by the first planned run, from the weights and the states of that moment; then it has the states."""
        self._states: dict[str, torch.Tensor] = {}
        self.updated: dict[str, torch.Tensor] = {}
        """After a run: the values of the inputs that the model writes to."""
        self.not_planned = _why_never_planned(own, self._first_write) if planned else ""
        """Why the planned runtime is not used although it was asked for; empty where it is used."""
        self._planned = planned and not self.not_planned
        self._options = BindOptions(device)

    @property
    def writes(self) -> bool:
        """Whether ops of the graph write to their arguments, as they do without functionalization."""
        return self._first_write is not None

    def run(self, stored: Tensors, inputs: Tensors, *, strict_sizes: bool) -> Tensors:
        """Outputs by name, on the planned runtime if it can.

        `stored` are weights, constants and states as they were at first.

        Raises:
            UsageError: sizes that the graph does not hold for.
            ExecutionError: a node has other results than the graph says.
            DataError: an index in the inputs is out of range.
            LostStates: an earlier planned run that failed had begun to write to some states.
        """
        if self._fits(inputs, strict_sizes=strict_sizes):
            try:
                return self._run_planned(stored, inputs)
            except Unsupported as error:  # raised before anything ran; the runtime is not tried again
                if self._options.device is not None:
                    raise
                self._states |= self.states()
                self._program, self._planned, self.not_planned = None, False, str(error)
        if self._options.device is not None:
            why = self.not_planned or "it was asked for, or for inputs of other sizes than the declared ones"
            raise ExecutionError(
                f"device {self._options.device}: this run goes op by op ({why}), and only a plan runs on a device; "
                "leave device out, and move weights and inputs there"
            )
        return self.run_op_by_op(stored, inputs)

    def run_op_by_op(self, stored: Tensors, inputs: Tensors, given: Collection[str] = ()) -> Tensors:
        """Outputs by name, op by op. States in `given` are taken for this run as `stored` has them.

        Raises:
            DataError, LostStates: as `run`.
        """
        kept, inputs = self._copy_written(stored, inputs, given)
        tensors = {**stored, **kept, **inputs}
        with torch.no_grad():
            result = run_eager(self._graph, tensors, check=False, own=self._own)
        updates = copy_if_shared(result.updates, tensors.values())
        written = {name: tensor for name, tensor in updates.items() if name in self._stored}
        self.updated = {name: tensor for name, tensor in updates.items() if name not in self._stored}
        if self._first_write is not None:
            written = {**kept, **written}
        self.give_states(written)
        return copy_if_shared(result.outputs, [*tensors.values(), *written.values(), *self.updated.values()])

    def walk(self, stored: Tensors, inputs: Tensors) -> Iterator[Step]:
        """Every op with its results, those of bodies too, as `run_op_by_op` computes them; no state is changed."""
        kept, inputs = self._copy_written(stored, inputs)
        tensors = {**stored, **kept, **inputs}
        return walk_eager(self._graph, tensors, check=False, own=self._own, into_bodies=True)

    def _copy_written(
        self, stored: Tensors, inputs: Tensors, given: Collection[str] = ()
    ) -> tuple[dict[str, torch.Tensor], Tensors]:
        """The states, but for those in `given`, and the inputs, both as a run op by op may write to them."""
        kept = {name: tensor for name, tensor in self.states().items() if name not in given}
        if self._first_write is not None:  # to what, only the run shows
            kept = {**{name: tensor.clone() for name, tensor in stored.items()}, **kept}
            inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        # With other strides than those of the trace a run would copy the states, and write to the copies.
        return {name: as_traced(tensor, self._stored[name]) for name, tensor in kept.items()}, inputs

    def states(self) -> dict[str, torch.Tensor]:
        """Copies of the states that were written or given.

        Raises:
            LostStates: a planned run that failed had begun to write to some.
        """
        if self._program is not None and self._program.sizes:
            return self._program.states()
        return {name: tensor.clone() for name, tensor in self._states.items()}

    def give_states(self, states: Tensors) -> None:
        if self._program is not None and self._program.sizes:
            self._program.give_states(states)
        else:  # no planned run so far
            self._states |= states
            self._program = None

    def _run_planned(self, stored: Tensors, inputs: Tensors) -> Tensors:
        if self._program is None:
            weights = with_stored(self._graph, {**stored, **self._states})
            self._program = SizedProgram(
                weights, limit=MOST_PROGRAMS, approve=refuse_other_results, options=self._options
            )
        outputs, self.updated = self._program.run_updating(inputs)
        return outputs

    def _fits(self, inputs: Tensors, *, strict_sizes: bool) -> bool:
        """Whether the planned runtime takes these inputs: exact sizes, on the CPU unless a device was named, and at the
        begin of their storage if some `as_strided` counts from there.
        """
        elsewhere = self._options.device is None and any(not tensor.is_cpu for tensor in inputs.values())
        if not self._planned or elsewhere:
            return False
        if self._from_storage and any(tensor.storage_offset() for tensor in inputs.values()):
            return False
        return strict_sizes or all(fits_shape(inputs[value.name], value.spec.shape) for value in self._inputs)


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


def find_write(graph: Graph) -> Op | None:
    """The first op, in bodies too, that writes to its arguments; None in an IR that was functionalized."""
    for op in graph.ops:
        if _writes_to_arguments(op):
            return op
        found = next(filter(None, map(find_write, op.bodies)), None)
        if found is not None:
            return found
    return None


def _writes_to_arguments(op: Op) -> bool:
    operator = find_known_operator(op.kind)
    if operator is not None and operator._schema.is_mutable:
        return True
    is_training = op.kind in WHEN_TRAINING and (op.attrs.get("training") or op.attrs.get("use_input_stats")) is True
    return is_training and any(op.attrs.get(name) is not None for name in RUNNING)


def _is_state(graph: Graph, value: Value) -> bool:
    return value.role is Role.STATE and value.vid in graph.updates


def _why_never_planned(own: Own, writing: Op | None) -> str:
    if own:
        return f"executors of your own run {', '.join(sorted(own))} (register_executor), which a plan cannot call"
    if writing is not None:
        return (
            f"{writing.kind} writes to its arguments, and a plan holds values that no op changes; extract_ir turns "
            "writes into values, unless functionalize=False is given"
        )
    return ""
