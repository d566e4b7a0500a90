"""A graph with named dims, replayed for any sizes: a plan and a capture for each, one set of weights and states."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext

import torch

from pipeline.errors import UsageError
from pipeline.ir.bind import bind_dims, dims_of
from pipeline.ir.graph import Graph, Role
from pipeline.runtime.binding import ProgramMemory
from pipeline.runtime.capture import MOST_CAPTURES, Capture, CapturePolicy, Captures, Snapshot
from pipeline.runtime.compile import bind_graph
from pipeline.runtime.context import runner_of_body
from pipeline.runtime.program import BoundProgram
from pipeline.runtime.slots import Feed, bind_arena
from pipeline.runtime.states import States
from pipeline.runtime.weights import Weights

__all__ = ["SizedProgram"]


class SizedProgram:
    """Captures of a graph with named dims: for each set of sizes one, with a plan and an arena of its own.

    At most `limit` are kept; the one that was replayed longest ago gives its memory back. Threads share the weights.
    Without states each thread has captures of its own; with states they take turns on one sequence of replays.
    """

    def __init__(self, graph: Graph, weights: Weights | None = None, *, limit: int = MOST_CAPTURES) -> None:
        """
        Raises:
            UsageError: a state has a named dim, so that its values at one size mean nothing at another.
        """
        sized = [graph.values[vid].name for vid in graph.updates if _is_state(graph, vid, static=False)]
        if sized:
            raise UsageError(f"the state {sized[0]!r} has a named dim; bind it to a number first (`bind_dims`)")
        self._graph, self._weights, self._limit = graph, weights or {}, limit
        self._policy = CapturePolicy.of()
        self._plan_key = hashlib.sha256(
            repr((graph.values, graph.ops, graph.inputs, graph.outputs)).encode()
        ).hexdigest()
        self._own = threading.local()
        stateful = any(_is_state(graph, vid, static=True) for vid in graph.updates)
        self._shared = self._new_captures() if stateful else None
        self._turn = threading.RLock() if stateful else nullcontext()

    @property
    def captures(self) -> Captures:
        """The captures of this thread, or those that all threads share."""
        if self._shared is not None:
            return self._shared
        try:
            return self._own.captures
        except AttributeError:
            self._own.captures = self._new_captures()
            return self._own.captures

    def capture(
        self,
        feed: Feed,
        *,
        mode: str = "inference",
        static_roles: Iterable[str] | None = None,
        copy_roles: Iterable[str] | None = None,
    ) -> Capture:
        """The capture for the sizes of `feed`; see `CompiledProgram.capture`.

        Raises:
            UsageError: the graph does not hold for these sizes, a state has no value, or there is no such mode or role.
            Unsupported: ops without a kernel.
        """
        self._policy = CapturePolicy.of(mode, static_roles, copy_roles)
        with self._turn:
            return self.captures.capture(feed, self._policy)

    def replay(
        self,
        feed: Feed,
        *,
        copy: bool = True,
        changed: Collection[str] | None = None,
        restore: Snapshot | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """Outputs by name; see `CompiledProgram.replay`."""
        with self._turn:
            return self.captures.replay(feed, self._policy, copy=copy, changed=changed, restore=restore)

    def snapshot(self) -> Snapshot:
        """Copies of states and random generators, of which all sizes have the same.

        Raises:
            UsageError: nothing was captured yet.
        """
        with self._turn:
            return self.captures.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`."""
        with self._turn:
            self.captures.restore(snapshot)

    def _new_captures(self) -> Captures:
        return Captures(MemoryBySize(self._graph, self._weights, self._plan_key), limit=self._limit)


class MemoryBySize:
    """Plans the graph for the sizes of each feed that it is asked about."""

    def __init__(self, graph: Graph, weights: Weights, plan_key: str) -> None:
        self._graph, self._weights = graph, weights
        self.plan_key = plan_key
        self._inputs = [graph.values[vid].name for vid in graph.inputs]
        self._states: States | None = None
        self._latest: tuple[dict[str, int], ProgramMemory] | None = None

    def memory_for(self, feed: Feed) -> ProgramMemory:
        shapes = {name: tuple(getattr(feed[name], "shape", ())) for name in self._inputs if name in feed}
        dims = dims_of(self._graph, shapes)
        if self._latest is None or self._latest[0] != dims:
            self._latest = None  # first, to free its arena
            bound = bind_graph(bind_dims(self._graph, dims), self._weights)
            memory = allocate_memory(bound, self._states)
            self._states = memory.states
            self._latest = (dims, memory)
        return self._latest[1]

    def latest_memory(self) -> ProgramMemory:
        if self._latest is None:
            raise UsageError("nothing was captured yet, so there are no states; capture a feed first")
        return self._latest[1]


def allocate_memory(bound: BoundProgram, states: States | None) -> ProgramMemory:
    """An arena beside the states of another plan of the same graph, or beside new ones."""
    with torch.inference_mode(mode=False), torch.no_grad():
        arena = bind_arena(bound.plan, torch.empty(bound.plan.arena_bytes, dtype=torch.uint8))
        states = States(bound.plan, bound.weights) if states is None else states
        return ProgramMemory(bound, states, arena, runner_of_body)


def _is_state(graph: Graph, vid: int, *, static: bool) -> bool:
    value = graph.values[vid]
    return value.role is not Role.INPUT and value.spec.is_static is static
