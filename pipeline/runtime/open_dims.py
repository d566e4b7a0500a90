"""A graph with named dims: a plan for each set of sizes, of which the last are kept, over one set of weights."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

import torch

from passes.suggest import nearest, plural
from pipeline.argument_checks import FLAG, MAPPING, a_mapping, expects
from pipeline.errors import UsageError
from pipeline.ir.dims import dim_names, dims_of, evaluate, fix_dims, names_in
from pipeline.ir.graph import Dim, Graph, Role, to_device
from pipeline.ir.json import digest_graph
from pipeline.runtime.capture import MOST_CAPTURES, Captures, Replayable
from pipeline.runtime.capture.feed_buffers import as_tensors
from pipeline.runtime.compile import A_GRAPH, DEFAULT_OPTIONS, BindOptions, bind_graph
from pipeline.runtime.context import Context
from pipeline.runtime.devices import Device
from pipeline.runtime.kernels import PackedMemory
from pipeline.runtime.program import BoundProgram, ProgramMemory
from pipeline.runtime.slots import Feed, Weights, refuse_unreadable, with_weights

Buckets = Mapping[str, Sequence[int]]

SizeKey = tuple[tuple[str, int], ...]

Kept = TypeVar("Kept")


SIZES = a_mapping("{name of a dim: sizes}")


class SizedProgram(Replayable):
    """A graph with named dims, run or replayed at any sizes: a plan, a context and a capture for each.

    At most `limit` of each are kept; what was used longest ago gives its memory back. Threads share plans and weights.
    Without states each thread has contexts and captures of its own; with states, of which all sizes have the same, the
    threads take turns on one sequence of runs and replays.
    """

    @expects(graph=A_GRAPH, weights=MAPPING.or_none(), buckets=a_mapping("{name of a dim: sizes}").or_none())
    def __init__(
        self,
        graph: Graph,
        weights: Weights | None = None,
        *,
        limit: int = MOST_CAPTURES,
        buckets: Buckets | None = None,
        approve: Callable[[Graph], None] = lambda _: None,
        options: BindOptions = DEFAULT_OPTIONS,
    ) -> None:
        """As `compile_open_graph`; `approve` looks at the graph for each new set of sizes, and may refuse it."""
        graph = to_device(with_weights(graph, weights or {}), options.find_device(graph).name)
        self._graph = graph
        _refuse_sized_states(graph)
        _refuse_buckets(graph, buckets or {})
        stateful = any(_is_state(graph, vid) for vid in graph.updates)
        super().__init__(threading.RLock() if stateful else None)
        self._buckets = MappingProxyType({name: tuple(sorted(sizes)) for name, sizes in (buckets or {}).items()})
        self._plans: LastUsed[BoundProgram] = LastUsed(limit)
        self._looking = threading.Lock()
        """Held to look into `_plans` and `_planning`, and not while a plan is made."""
        self._planning: dict[SizeKey, threading.Lock] = {}
        """Sizes whose plan is being made → the lock for which only threads that need this plan wait."""
        self._shapes = {value.name: value.spec.shape for value in graph.values}
        self._approve, self._options, self._packed = approve, options, PackedMemory()
        self._limit, self._digest = limit, digest_graph(graph)
        self._own = threading.local()
        self._shared = self._new_sequence() if stateful else None

    @property
    def signature(self) -> tuple[Sequence[str], Sequence[str]]:
        graph = self._graph
        inputs, outputs = ([graph.values[vid].name for vid in vids] for vids in (graph.inputs, graph.outputs))
        return inputs, outputs

    def describe(self) -> str:
        dims = ", ".join(sorted(dim_names(self._graph))) or "none"
        plans = f"plans for {len(self.sizes)} of at most {self._limit} sizes"
        return f"{plural(len(self._graph.ops), 'op')}, named dims {dims}, {plans}"

    @property
    def sizes(self) -> list[dict[str, int]]:
        """The sizes for which a plan is kept, those that were used last at the end."""
        with self._looking:
            return [dict(key) for key in self._plans.keys]

    @property
    def captures(self) -> Captures:
        return self._sequence.captures

    @expects(feed=MAPPING, copy=FLAG)
    def run(self, feed: Feed, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Outputs by name. With buckets the inputs are filled up with zeros, and the outputs cut again.

        Args:
            feed: input → tensor of its dtype and device, and of any shape for which the graph holds.
            copy: as in `CompiledProgram.run`.

        Raises:
            UsageError: shapes for which the graph does not hold, sizes above every bucket, or as `CompiledProgram.run`.
        """
        tensors = as_tensors(feed)
        dims = _dims_of_feed(self._graph, tensors)
        planned = {name: self._bucket(name, size) for name, size in dims.items()}
        with self._turn():
            context = self._sequence.context_for(planned)
            if planned == dims:
                return context.run(tensors, copy=copy)
            outputs = context.run(
                {name: self._fill(name, tensor, planned) for name, tensor in tensors.items()}, copy=copy
            )
        return {name: self._cut_padding(name, tensor, dims) for name, tensor in outputs.items()}

    @expects(feed=MAPPING)
    def run_updating(self, feed: Feed) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Outputs, and {updated input: its value after the run}, for exactly the sizes of the feed: without buckets.

        Args:
            feed: as in `run`.

        Raises:
            UsageError: as `run`.
        """
        tensors = as_tensors(feed)
        dims = _dims_of_feed(self._graph, tensors)
        with self._turn():
            return self._sequence.context_for(dims).run_updating(tensors)

    def states(self) -> dict[str, torch.Tensor]:
        """Copies of the states that runs change, by name; none before the first run.

        Raises:
            UsageError: a run failed while it wrote to some; see `pipeline.runtime.states`.
        """
        with self._turn():
            latest = self._sequence.latest
            return {} if latest is None else latest.states.values()

    @expects(states=MAPPING)
    def give_states(self, states: Feed) -> None:
        """Set states by name, of a program that ran before; the others are not changed.

        Args:
            states: name of a state → tensor of its shape and dtype.

        Raises:
            UsageError: no such state, another shape or dtype, or nothing was run yet.
        """
        with self._turn():
            self._sequence.latest_memory().states.give(states)

    @property
    def _sequence(self) -> SizedSequence:
        if self._shared is not None:
            return self._shared
        try:
            return self._own.sequence
        except AttributeError:
            self._own.sequence = self._new_sequence()
            return self._own.sequence

    def _new_sequence(self) -> SizedSequence:
        return SizedSequence(self._graph, self._digest, self._limit, self._plan)

    def _plan(self, dims: Mapping[str, int]) -> BoundProgram:
        key = _key_of(dims)
        with self._looking:
            found = self._plans.find(key)
            if found is not None:
                return found
            making = self._planning.setdefault(key, threading.Lock())
        with making:  # two threads that meet a new size make one plan
            with self._looking:
                found = self._plans.find(key)
            if found is not None:
                return found
            try:
                found = self._make_plan(dims)
                with self._looking:
                    return self._plans.find_or_make(key, lambda: found)
            finally:
                with self._looking:
                    self._planning.pop(key, None)

    def _make_plan(self, dims: Mapping[str, int]) -> BoundProgram:
        graph = fix_dims(self._graph, dims) if dims else self._graph
        self._approve(graph)
        return bind_graph(graph, memory=self._packed, options=self._options)

    def _bucket(self, name: str, size: int) -> int:
        """The size to plan for: the least bucket that holds `size`, or `size` itself where the dim has no buckets."""
        if name not in self._buckets:
            return size
        fits = [bucket for bucket in self._buckets[name] if bucket >= size]
        if not fits:
            raise UsageError(f"{name} = {size} is above every bucket: {', '.join(map(str, self._buckets[name]))}")
        return fits[0]

    def _fill(self, name: str, tensor: torch.Tensor, dims: Mapping[str, int]) -> torch.Tensor:
        """An input with zeros after its elements, up to the planned sizes."""
        if name not in self._shapes:
            return tensor  # the run names it
        wanted = _sizes(self._shapes[name], dims)
        if tuple(tensor.shape) == wanted:
            return tensor
        filled = tensor.new_zeros(wanted)
        filled[tuple(slice(size) for size in tensor.shape)] = tensor
        return filled

    def _cut_padding(self, name: str, tensor: torch.Tensor, dims: Mapping[str, int]) -> torch.Tensor:
        return tensor[tuple(slice(size) for size in _sizes(self._shapes[name], dims))]


class SizedSequence:
    """One sequence of runs and replays over all sizes: contexts by sizes, which share their states."""

    def __init__(
        self, graph: Graph, plan_key: str, limit: int, plan: Callable[[Mapping[str, int]], BoundProgram]
    ) -> None:
        self._graph, self._plan = graph, plan
        self.plan_key = plan_key
        self._contexts: LastUsed[Context] = LastUsed(limit, lambda context: context.memory.synchronize())
        self.latest: Context | None = None
        """The context of the sizes that were used last; all of them share its states."""
        self.captures = Captures(self, limit=limit)

    @property
    def memories(self) -> Sequence[ProgramMemory]:
        return [context.memory for context in self._contexts.items]

    def context_for(self, dims: Mapping[str, int]) -> Context:
        bound = self._plan(dims)  # also where there is a context, so that plans and contexts are dropped in one order
        states = self.latest.states if self.latest is not None else None
        self.latest = self._contexts.find_or_make(_key_of(dims), lambda: Context(bound, states=states))
        return self.latest

    def memory_for(self, feed: Feed) -> ProgramMemory:
        return self.context_for(_dims_of_feed(self._graph, as_tensors(feed))).memory

    def latest_memory(self) -> ProgramMemory:
        if self.latest is None:
            raise UsageError("nothing was run or captured yet, so there are no states; capture a feed first")
        return self.latest.memory


class LastUsed(Generic[Kept]):
    """Things by sizes, at most `limit`; the least recently used makes room before another is made, after `finish`."""

    def __init__(self, limit: int, finish: Callable[[Kept], object] = lambda _: None) -> None:
        if type(limit) is not int or limit < 1:
            raise UsageError(f"limit={limit!r}; expected 1 or more sizes to keep")
        self._limit, self._finish = limit, finish
        self._kept: OrderedDict[SizeKey, Kept] = OrderedDict()

    @property
    def keys(self) -> list[SizeKey]:
        return list(self._kept)

    @property
    def items(self) -> list[Kept]:
        return list(self._kept.values())

    def find(self, key: SizeKey) -> Kept | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def find_or_make(self, key: SizeKey, make: Callable[[], Kept]) -> Kept:
        found = self.find(key)
        if found is None:
            while len(self._kept) >= self._limit:
                _, dropped = self._kept.popitem(last=False)
                self._finish(dropped)
            self._kept[key] = found = make()
        return found


@expects(native=FLAG, debug=FLAG)
def compile_open_graph(
    graph: Graph,
    weights: Weights | None = None,
    *,
    limit: int = MOST_CAPTURES,
    buckets: Buckets | None = None,
    device: Device | torch.device | str | None = None,
    debug: bool = False,
    native: bool = False,
) -> SizedProgram:
    """A program for `graph` that plans when sizes are fed for the first time, and keeps the last `limit` plans.

    `weights` are bound to all plans without a copy. `buckets` are sizes by the name of a dim, to one of which `run`
    rounds a fed size up; replays are for the sizes that are fed. That is right only where elements after the fed ones
    do not change the others, which nothing checks: rows of a batch do not, positions of a sequence do without a mask.
    `device`, `debug` and `native` are as for `compile_graph`.

    Raises:
        UsageError: a state with a named dim, so that its values at one size mean nothing at another; buckets of a dim
            that the graph does not have or that follows from others; a limit below 1.
        SourceError: a weight does not fit its declaration.
    """
    return SizedProgram(graph, weights, limit=limit, buckets=buckets, options=BindOptions(device, debug, native))


def _refuse_sized_states(graph: Graph) -> None:
    sized = [graph.values[vid] for vid in graph.updates if _is_state(graph, vid)]
    named = [value.name for value in sized if not value.spec.is_static]
    if named:
        raise UsageError(f"the state {named[0]!r} has a named dim; give it a size first, by fix_dims")


def _refuse_buckets(graph: Graph, buckets: Buckets) -> None:
    names = dim_names(graph)
    if not isinstance(buckets, Mapping):
        raise UsageError(f"buckets: found {buckets!r}, expected {{name of a dim: sizes}}; dims: {', '.join(names)}")
    for name, sizes in buckets.items():
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise UsageError(f"graph {graph.name!r} has no dim {name!r}{nearest(name, names)}; its dims: {known}")
        if not isinstance(sizes, Sequence) or not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise UsageError(f"buckets of {name!r}: found {sizes!r}, expected sizes of 1 or more, such as [8, 64]")
    for vid in (*graph.inputs, *graph.outputs):
        for dim in graph.values[vid].spec.shape:
            mixed = names_in(dim) & buckets.keys() if isinstance(dim, str) and not dim.isidentifier() else ()
            if mixed:
                raise UsageError(
                    f"{graph.values[vid].name!r} has the size {dim!r}, in which elements after those of "
                    f"{', '.join(mixed)} are not at the end: leave out its buckets"
                )


def _is_state(graph: Graph, vid: int) -> bool:
    return graph.values[vid].role is not Role.INPUT


def _key_of(dims: Mapping[str, int]) -> SizeKey:
    return tuple(sorted(dims.items()))


def _dims_of_feed(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    shapes = _shapes_of(tensors)
    inputs = [graph.values[vid].name for vid in graph.inputs]
    if missing := [name for name in inputs if name not in shapes]:
        raise UsageError(f"the feed lacks {', '.join(map(repr, missing))}; inputs: {', '.join(inputs)}")
    return dims_of(graph, shapes)


def _shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    for name, given in tensors.items():
        if not isinstance(given, torch.Tensor):
            raise UsageError(f"input {name!r} is a {type(given).__name__}; expected a torch tensor or a numpy array")
    refuse_unreadable(tensors)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _sizes(shape: Sequence[Dim], dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(evaluate(dim, dims)) if isinstance(dim, str) else dim for dim in shape)
