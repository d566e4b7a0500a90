"""Several entry points of one model, such as prefill and decode: one set of weights, one set of states, one arena."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType

import torch

from passes.suggest import bytes_text, nearest
from pipeline.argument_checks import FLAG, MAPPING, TEXT, Check, a_mapping, expects
from pipeline.errors import UsageError
from pipeline.ir.graph import Graph, Payload, Role, TensorSpec
from pipeline.planning import ExecutionPlan
from pipeline.runtime.capture import Captures, Replayable
from pipeline.runtime.compile import BindOptions, bind_graph
from pipeline.runtime.context import Context
from pipeline.runtime.devices import Device
from pipeline.runtime.kernels import PackedMemory
from pipeline.runtime.program import BoundProgram, ProcessBound
from pipeline.runtime.slots import Feed, Weights, new_memory, with_weights
from pipeline.runtime.states import StateTable


class EntryPoint(Replayable):
    """One of several entry points, to be captured and replayed: a decode step after a prefill that ran.

    Its replays are part of the sequence of all entry points, and have their states. With `copy=False` the outputs are
    views that a later run or replay of any entry point may change. A snapshot has the states that this graph has.
    """

    def __init__(self, context: Context, turn: AbstractContextManager[object]) -> None:
        super().__init__(turn)
        self._context = context

    @property
    def captures(self) -> Captures:
        return self._context.captures

    @property
    def signature(self) -> tuple[Sequence[str], Sequence[str]]:
        plan = self._context.plan
        inputs, outputs = ([plan.slots[vid].name for vid in vids] for vids in (plan.inputs, plan.outputs))
        return inputs, outputs

    @expects(feed=MAPPING, copy=FLAG)
    def run(self, feed: Feed, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """As `CompiledEntries.run` of this entry point.

        Args:
            feed: as in `CompiledEntries.run`.
            copy: as in `CompiledEntries.run`.
        """
        with self._turn():
            return self._context.run(feed, copy=copy)


BOUND_PROGRAMS = Check(
    lambda item: (
        isinstance(item, Mapping) and bool(item) and all(isinstance(program, BoundProgram) for program in item.values())
    ),
    "BoundPrograms by name; compile_graphs makes the entries of Graphs",
)


class CompiledEntries(ProcessBound):
    """Plans that share weights, states and an arena. Runs are one sequence: threads take turns.

    `new_sequence()` gives a further one over the same weights, with states and an arena of its own.
    """

    instead = f"take `new_sequence()` for states of its own, or {ProcessBound.instead}"

    @expects(bound=BOUND_PROGRAMS)
    def __init__(self, bound: Mapping[str, BoundProgram]) -> None:
        self._bound = dict(bound)
        self.plans: Mapping[str, ExecutionPlan] = MappingProxyType(
            {name: program.plan for name, program in bound.items()}
        )
        largest = max(self.plans.values(), key=lambda plan: plan.arena_bytes)
        self.arena_bytes = largest.arena_bytes
        device = next(iter(bound.values())).device
        table = StateTable(self.plans, device)
        with torch.inference_mode(mode=False):
            arena = new_memory(largest, self.arena_bytes, device)
        self._contexts = {name: Context(program, table=table, arena=arena) for name, program in bound.items()}
        self._turn = threading.RLock()
        self._entries = {name: EntryPoint(context, self._turn) for name, context in self._contexts.items()}

    def __repr__(self) -> str:
        return f"CompiledEntries({', '.join(self.plans)}): arena of {bytes_text(self.arena_bytes)}"

    def new_sequence(self) -> CompiledEntries:
        """The same programs with states as they were when the graphs were compiled."""
        return CompiledEntries(self._bound)

    @expects(entry=TEXT, feed=MAPPING, copy=FLAG)
    def run(self, entry: str, feed: Feed, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Run one entry point.

        Args:
            entry: its name.
            feed: input → a tensor or an array of the shape and dtype that the graph declares.
            copy: False returns views that a later run of any entry point may change.

        Returns:
            Output → its tensor.

        Raises:
            UsageError: no such entry point, a feed that does not fit it, or a state without a value.
            DataError: an index in the feed is out of range (a UsageError too).
            InternalError: a kernel failed.
        """
        with self._turn:
            return self._context(entry).run(feed, copy=copy)

    @expects(entry=TEXT, feed=MAPPING, copy=FLAG)
    def run_updating(
        self, entry: str, feed: Feed, *, copy: bool = True
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """As `run`, for a graph that changes inputs.

        Args:
            entry: see `run`.
            feed: see `run`.
            copy: see `run`.

        Returns:
            Output → its tensor, and input that the graph changes → its value after the run.

        Raises:
            UsageError, DataError, InternalError: as `run`.
        """
        with self._turn:
            return self._context(entry).run_updating(feed, copy=copy)

    @expects(name=TEXT)
    def entry(self, name: str) -> EntryPoint:
        """One entry point, with `capture` and `replay`.

        Args:
            name: a key of the entries that were compiled.

        Raises:
            UsageError: there is none of this name.
        """
        self._context(name)
        return self._entries[name]

    def states(self) -> dict[str, torch.Tensor]:
        """Copies of the states of all entry points, by name.

        Raises:
            UsageError: a run failed while it wrote to some; see `pipeline.runtime.states`.
        """
        with self._turn:
            return {
                name: state for context in self._contexts.values() for name, state in context.states.values().items()
            }

    @expects(states=MAPPING)
    def give_states(self, states: Feed) -> None:
        """Set states by name; the others are not changed.

        Args:
            states: name of a state → tensor of its shape and dtype.

        Raises:
            UsageError: no such state, or another shape or dtype.
        """
        with self._turn:
            known = frozenset[str]().union(*(context.states.names for context in self._contexts.values()))
            if strange := [name for name in states if name not in known]:
                raise UsageError(f"no entry point has a state {strange[0]!r}{nearest(strange[0], known)}")
            for context in self._contexts.values():
                context.states.give({name: state for name, state in states.items() if name in context.states.names})

    def reset_states(self) -> None:
        """Set every state back to its value when the graphs were compiled."""
        with self._turn:
            for context in self._contexts.values():
                context.states.reset()

    def _context(self, entry: str) -> Context:
        context = self._contexts.get(entry)
        if context is None:
            names = ", ".join(self._contexts)
            raise UsageError(
                f"there is no entry point {entry!r}{nearest(entry, self._contexts)}; entry points: {names}"
            )
        return context


@expects(graphs=a_mapping("{name of the entry point: graph}"), weights=MAPPING.or_none(), native=FLAG, debug=FLAG)
def compile_graphs(
    graphs: Mapping[str, Graph],
    weights: Weights | None = None,
    *,
    device: Device | torch.device | str | None = None,
    debug: bool = False,
    native: bool = False,
) -> CompiledEntries:
    """Lower, plan, check and bind several graphs of one model.

    A state that one graph changes is the state of this name in the others, and its first value is that of any graph
    that has one.

    Args:
        graphs: name of an entry point → its graph.
        weights: tensors by value name or by name in a checkpoint; each goes to every graph that has it, and is bound
            without a copy.
        device: as for `compile_graph`.
        debug: as for `compile_graph`.
        native: as for `compile_graph`.

    Returns:
        The entry points, which share weights, states and an arena.

    Raises:
        UsageError: no graphs, weights that no graph has, or states that are not the same in all graphs.
        Unsupported, SourceError, InternalError: as `compile_graph`.
    """
    if not graphs:
        raise UsageError("compile_graphs: found no graphs, expected {name of the entry point: graph}")
    if strange := [type(item).__name__ for item in graphs.values() if not isinstance(item, Graph)]:
        raise UsageError(f"compile_graphs: found a {strange[0]}, expected {{name of the entry point: graph}}")
    known = {name: frozenset(sum(graph.weight_names().values(), ())) for name, graph in graphs.items()}
    every = frozenset[str]().union(*known.values())
    if strange := [name for name in weights or () if name not in every]:
        raise UsageError(f"no graph has a weight {strange[0]!r}{nearest(strange[0], every)}")
    own = {
        name: with_weights(graph, {key: tensor for key, tensor in (weights or {}).items() if key in known[name]})
        for name, graph in graphs.items()
    }
    memory, options = PackedMemory(), BindOptions(device, debug, native)
    return CompiledEntries(
        {name: bind_graph(graph, memory=memory, options=options) for name, graph in _with_shared_states(own).items()}
    )


def _with_shared_states(graphs: Mapping[str, Graph]) -> dict[str, Graph]:
    """`graphs`, in which a stored value is a state if any graph changes it: the other graphs read the change."""
    changed: dict[str, tuple[str, str]] = {}
    """By name in a checkpoint: its name in the graph that changes it, and that graph's name."""
    for entry, graph in graphs.items():
        for value in graph.with_role(Role.STATE):
            if value.vid in graph.updates:
                for key in graph.sources.get(value.vid, (value.name,)):
                    changed.setdefault(key, (value.name, entry))
    return _with_first_values({entry: _with_states(entry, graph, changed) for entry, graph in graphs.items()})


def _with_first_values(graphs: Mapping[str, Graph]) -> dict[str, Graph]:
    """`graphs`, in which a state has the first value that any of them has for it.

    Raises:
        UsageError: two graphs have different ones, of which only one could be taken.
    """
    owners: dict[tuple[str, TensorSpec], tuple[str, Payload]] = {}
    """By name and form; graphs with other forms of a state are refused by `StateTable`."""
    for entry, graph in graphs.items():
        for value in graph.with_role(Role.STATE):
            if value.vid not in graph.payloads:
                continue
            payload = graph.payloads[value.vid]
            owner, first = owners.setdefault((value.name, value.spec), (entry, payload))
            if first is not payload and first.numpy().tobytes() != payload.numpy().tobytes():
                raise UsageError(
                    f"the state {value.name!r} begins with other values in {owner!r} than in {entry!r}; give it one "
                    "first value by `weights`"
                )
    values = {form: payload for form, (_, payload) in owners.items()}
    return {entry: _with_payloads(graph, values) for entry, graph in graphs.items()}


def _with_payloads(graph: Graph, values: Mapping[tuple[str, TensorSpec], Payload]) -> Graph:
    missing = {
        value.vid: values[value.name, value.spec]
        for value in graph.with_role(Role.STATE)
        if value.vid not in graph.payloads and (value.name, value.spec) in values
    }
    return replace(graph, payloads={**graph.payloads, **missing}) if missing else graph


def _with_states(entry: str, graph: Graph, changed: Mapping[str, tuple[str, str]]) -> Graph:
    values = list(graph.values)
    for value in graph.with_role(Role.PARAM, Role.STATE, Role.CONST):
        owners = [changed[key] for key in graph.sources.get(value.vid, (value.name,)) if key in changed]
        if not owners:
            continue
        name, owner = owners[0]
        if name != value.name:
            raise UsageError(
                f"a state is called {name!r} in {owner!r} and {value.name!r} in {entry!r}; entry points share a state "
                "by its name: give it one"
            )
        values[value.vid] = replace(value, role=Role.STATE)
    return replace(graph, values=tuple(values))
