"""Run an IR: check everything, then run it by the planned runtime, a program for each set of sizes, or op by op.

Both ways are the runtime's. The engine keeps the states, the buffers that the model writes to, from run to run: in the
program where there is one, else as tensors by name. A run op by op works on copies, so one that fails changes no state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from pipeline.errors import DataError, InternalError, SourceError, Unsupported
from pipeline.importers.from_torch.operators import RUNNING, WHEN_TRAINING
from pipeline.ir import Graph, Op, Role, Value
from pipeline.ir.dims import dim_names
from pipeline.runtime import SizedProgram
from pipeline.runtime.eager import Own, as_traced, run_eager
from pipeline.runtime.slots import with_stored
from pipeline.runtime.states import LostStates
from pipeline.torch_ir.calls import find_known_operator
from pipeline.torch_ir.document.nodes import key_of, stored_values
from pipeline.torch_ir.errors import ExecutionError, NoWeights, by_name
from pipeline.torch_ir.execute.arguments import Inputs
from pipeline.torch_ir.execute.checks import (
    check_inputs,
    copy_from_first_element,
    copy_if_shared,
    counts_from_storage,
    explain_wrong_results,
    find_counted_values,
    find_unmatched_ops,
    refuse_other_moves,
    refuse_unmatched_ops,
)
from pipeline.torch_ir.ir import IR, an_ir
from pipeline.torch_ir.registry import REGISTERED, Registry
from pipeline.torch_ir.weights import Bound, bind_stored, fits_shape, load_weights, misfit

Tensors = Mapping[str, torch.Tensor]

MOST_PROGRAMS = 16
"""For how many sets of sizes an engine keeps plans and arenas; what ran longest ago is dropped."""


class Engine:
    """Runs on the planned runtime where possible, else op by op, and never writes to tensors of the caller.

    `own` are executors of single ops. `not_planned` says why the planned runtime is not used although it was asked for;
    "" where it is.
    """

    def __init__(self, graph: Graph, own: Own, *, planned: bool) -> None:
        self._graph = graph
        self._own = own
        self._inputs = [graph.values[vid] for vid in graph.inputs]
        self._stored = {value.name: value for value in stored_values(graph)}
        self._from_storage = counts_from_storage(graph)
        self._writing = find_write(graph)
        self._program: SizedProgram | None = None
        """Made by the first planned run, from the weights and the states of that moment; then it has the states."""
        self._states: dict[str, torch.Tensor] = {}
        self.updated: dict[str, torch.Tensor] = {}
        """After a run: the values of the inputs that the model writes to."""
        self.not_planned = _never(own, self._writing) if planned else ""
        self._planned = planned and not self.not_planned

    @property
    def writes(self) -> bool:
        """Whether ops of the graph write to their arguments, as they do without functionalization."""
        return self._writing is not None

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
                self._states |= self.states()
                self._program, self._planned, self.not_planned = None, False, str(error)
        return self.refer(stored, inputs)

    def refer(self, stored: Tensors, inputs: Tensors, own: Own | None = None, given: Collection[str] = ()) -> Tensors:
        """Outputs by name, op by op. States in `given` are taken for this run as `stored` has them.

        Raises:
            DataError, LostStates: as `run`.
        """
        kept = {name: tensor for name, tensor in self.states().items() if name not in given}
        if self._writing is not None:  # to what, only the run shows
            kept = {**{name: tensor.clone() for name, tensor in stored.items()}, **kept}
            inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        # With other strides than those of the trace a run would copy the states, and write to the copies.
        kept = {name: as_traced(tensor, self._stored[name]) for name, tensor in kept.items()}
        tensors = {**stored, **kept, **inputs}
        with torch.no_grad():
            result = run_eager(self._graph, tensors, check=False, own=self._own if own is None else own)
        updates = copy_if_shared(result.updates, tensors.values())
        written = {name: tensor for name, tensor in updates.items() if name in self._stored}
        self.updated = {name: tensor for name, tensor in updates.items() if name not in self._stored}
        if self._writing is not None:
            written = {**kept, **written}
        self.give_states(written)
        return copy_if_shared(result.outputs, [*tensors.values(), *written.values(), *self.updated.values()])

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
            self._program = SizedProgram(weights, limit=MOST_PROGRAMS, approve=refuse_other_moves)
        outputs, self.updated = self._program.run_updating(inputs)
        return outputs

    def _fits(self, inputs: Tensors, *, strict_sizes: bool) -> bool:
        """Whether the planned runtime takes these inputs: exact sizes, on the CPU, and at the begin of their storage if
        some `as_strided` counts from there.
        """
        if not self._planned or any(not tensor.is_cpu for tensor in inputs.values()):
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


def _never(own: Own, writing: Op | None) -> str:
    if own:
        return f"executors of your own run {', '.join(sorted(own))} (register_executor), which a plan cannot call"
    if writing is not None:
        return (
            f"{writing.kind} writes to its arguments, and a plan holds values that no op changes; extract_ir turns "
            "writes into values, unless functionalize=False is given"
        )
    return ""


NOT_LOADED = (
    "Weights not loaded. Call load_weights() or load_weights_from_state_dict() first, or give IRExecutor weights"
)


def execute_ir(
    ir: IR,
    inputs: Inputs,
    weights: Tensors | None = None,
    weights_path: str | Path | None = None,
    constants: Tensors | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    strict_sizes: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Run `ir` once. `IRExecutor` is for several runs.

    Args:
        ir: what `extract_ir` gives, or `IR.load`.
        inputs: tensors of the declared dtypes and shapes, in order, or by name.
        weights: tensors by their names in the checkpoint or by those of the placeholders.
        weights_path: a checkpoint, in place of `weights`: a safetensors or torch file.
        constants: tensors that go before `weights` and before what the IR holds itself.
        kwargs: keyword arguments of the model, if it has any.
        strict_sizes: refuse inputs of other sizes than the declared sizes.

    Returns:
        The outputs, in the order of `ir.graph_outputs`.

    Raises:
        NoWeights: neither weights nor a path to them, for an IR that has some (a ValueError too).
        ExecutionError: something does not fit the IR; the message lists all of it. Or torch has no operator of a name.
        WeightLoadError: the file of weights cannot be read; NoWeightFile where there is none.

    Example:
        >>> import onnxline, torch
        >>> ir = onnxline.extract_ir(torch.nn.Linear(4, 2, device="meta"), (torch.empty(1, 4, device="meta"),))
        >>> onnxline.execute_ir(ir, (torch.ones(1, 4),), {"weight": torch.ones(2, 4), "bias": torch.zeros(2)})
        (tensor([[4., 4.]]),)
    """
    if weights is None and weights_path is not None:
        weights = load_weights(weights_path)
    executor = IRExecutor(ir, weights, constants, strict_sizes=strict_sizes)
    executor.refuse_without_weights("Either weights or weights_path must be provided: the IR holds none")
    return executor.execute(inputs, kwargs)


class IRExecutor:
    """Runs `ir` on `weights`, by their names in the checkpoint or by those of the placeholders.

    `constants` go before `weights` and before what the IR holds itself. Buffers that the model writes to (a KV cache,
    running statistics) are kept here from call to call; the caller's tensors are never written to.

    Runs are planned: storage and kernels are settled once for all calls with equal sizes. `planned=False` takes the
    plain reference, op by op with torch's operators, and so does an IR that was not functionalized or that has ops with
    an executor of the user's own. Threads may share an executor, and wait for one another: the runs of one are planned
    in one storage. `strict_sizes=False` lets inputs have other sizes than the declared ones, on the
    reference too: right where the ops happen not to care, as with a batch of 2 for a batch of 1.
    """

    def __init__(
        self,
        ir: IR,
        weights: Tensors | None = None,
        constants: Tensors | None = None,
        *,
        planned: bool = True,
        strict_sizes: bool = True,
        registry: Registry = REGISTERED,
    ) -> None:
        self.ir = ir = an_ir(ir, ExecutionError)
        self._weights = None if weights is None else by_name("weights", weights, ExecutionError)
        self._constants = _optional("constants", constants)
        self._strict_sizes = strict_sizes
        self._own = registry.executors_for(ir.graph)
        self._unmatched_ops = find_unmatched_ops(ir.graph, self._own)
        self._counted = find_counted_values(ir.graph)
        self._dynamic = strict_sizes and bool(dim_names(ir.graph))
        self._bound: Bound | None = None
        self._planned = planned
        self._engine = Engine(ir.graph, self._own, planned=planned)
        self._alone = RLock()

    @property
    def not_planned(self) -> str:
        """Why runs are not planned although that was asked for; "" where they are."""
        return self._engine.not_planned

    def load_weights(self, path: str | Path) -> None:
        """Take the weights of a file.

        Raises:
            WeightLoadError: it cannot be read.
        """
        self.load_weights_from_state_dict(load_weights(path))

    def load_weights_from_state_dict(self, state_dict: Tensors) -> None:
        """Take these weights; what earlier runs have written to buffers is forgotten."""
        weights = by_name("weights", state_dict, ExecutionError)
        with self._alone:
            self._weights, self._bound = weights, None
            self._engine = Engine(self.ir.graph, self._own, planned=self._planned)

    def give_states(self, states: Tensors) -> None:
        """Set buffers that the model writes to, by their names in the checkpoint or by those of the placeholders.

        They are copied; the rest stay. So a run that failed can be undone, and a cache that was kept be used again.

        Raises:
            ExecutionError: the model writes to no such buffer, or it has another shape or dtype.
        """
        states = by_name("states", states, ExecutionError)
        given = copy_given_states(self.ir.graph, states, any_stored=self.writes)
        with self._alone:
            self._engine.give_states(given)

    def refuse_without_weights(self, said: str = NOT_LOADED) -> None:
        """Check that each weight has a value.

        Raises:
            NoWeights: no weights were given, and there are some that neither the IR nor `constants` has.
        """
        if self._weights is None and (bound := self._get_bound({})).unloaded:
            raise NoWeights("\n".join([said, *bound.hints]))

    def execute(
        self, inputs: Inputs, kwargs: Mapping[str, Any] | None = None, constants: Tensors | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The outputs, in the order of `ir.graph_outputs`.

        `inputs` and `kwargs` nest as the model takes them; all tensors in a row do too, or a mapping by input name.

        Raises:
            ExecutionError: weights were never loaded; or inputs, weights or constants are missing or do not fit, all of
                it in one message, before anything runs; or torch has no operator of a node's name; or an index
                in the inputs is out of range, which the run tells;
                or an earlier run that failed so left states half written (see `give_states`).
        """
        return self._execute(inputs, _optional("kwargs", kwargs), _optional("constants", constants), None)

    def observe(
        self,
        inputs: Inputs,
        kwargs: Mapping[str, Any] | None,
        observers: Callable[[Graph, Own], Own],
    ) -> tuple[torch.Tensor, ...]:
        """`execute` on the reference, with the op executors that `observers(graph, the user's executors)` returns."""
        return self._execute(inputs, kwargs, {}, observers(self.ir.graph, self._own))

    def _execute(
        self, inputs: Inputs, kwargs: Mapping[str, Any] | None, constants: Tensors, own: Own | None
    ) -> tuple[torch.Tensor, ...]:
        """Check and run; with `own`, executors of single ops, on the reference."""
        with self._alone:
            if not constants:
                self.refuse_without_weights()
            bound = self._get_bound(constants)
            fed = check_inputs(
                self.ir,
                bound,
                inputs,
                kwargs,
                strict_sizes=self._strict_sizes,
                dynamic=self._dynamic,
                counted=self._counted,
            )
            with self._explain_errors(fed):
                refuse_unmatched_ops(self._unmatched_ops)
                outputs = self._run(bound.tensors, fed, constants, own)
        return tuple(outputs[self.ir.graph.values[vid].name] for vid in self.ir.graph.outputs)

    def _run(self, tensors: Tensors, fed: Tensors, constants: Tensors, own: Own | None) -> Tensors:
        if own is None and not constants:
            return self._engine.run(tensors, fed, strict_sizes=self._strict_sizes)
        graph = self.ir.graph
        names = graph.weight_names()
        given = [value.name for value in stored_values(graph) if not constants.keys().isdisjoint(names[value.vid])]
        return self._engine.refer(tensors, fed, own, given)

    @contextmanager
    def _explain_errors(self, fed: Tensors) -> Iterator[None]:
        """Turn errors of a run into ones that say what to do."""
        try:
            yield
        except DataError as error:  # an index out of range, or an edited node that reads another tensor as its index
            raise explain_wrong_results(self.ir.graph, fed, self._own) or ExecutionError(str(error)) from error
        except SourceError as error:  # an operator that torch has not
            raise ExecutionError(str(error)) from error
        except LostStates as error:
            raise lost_states_error(self.ir.graph, error.names) from error
        except (InternalError, RuntimeError, ArithmeticError) as error:
            if (mismatch := explain_wrong_results(self.ir.graph, fed, self._own)) is not None:
                raise mismatch from error
            raise

    @property
    def updates(self) -> dict[str, torch.Tensor]:
        """After a run: copies of the buffers and inputs that the model has written to, by name in the graph.

        Raises:
            ExecutionError: a run that failed left some of them half written (see `give_states`).
        """
        with self._alone:
            try:
                kept = self._engine.states()
            except LostStates as error:
                raise lost_states_error(self.ir.graph, error.names) from error
            return {**{name: tensor.clone() for name, tensor in self._engine.updated.items()}, **kept}

    @property
    def writes(self) -> bool:
        """Whether ops of the IR write to their arguments, as they do without functionalization."""
        return self._engine.writes

    def _get_bound(self, constants: Tensors) -> Bound:
        if constants:
            return self._bind({**self._constants, **constants})
        if self._bound is None:
            self._bound = self._bind(self._constants)
        return self._bound

    def _bind(self, constants: Tensors) -> Bound:
        bound = bind_stored(self.ir, self._weights or {}, constants)
        if counts_from_storage(self.ir.graph):
            bound.tensors.update(copy_from_first_element(self._counted, bound.tensors))
        return bound


def _optional(what: str, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {} if given is None else by_name(what, given, ExecutionError)
