"""Graph → a program that runs: lower, plan, check the plan, bind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.errors import UsageError
from pipeline.ir.check import check
from pipeline.ir.graph import Graph
from pipeline.lowering import lower, with_kernels
from pipeline.lowering.aten import in_traced_order
from pipeline.planning import ExecutionPlan, FeedSignature, check_plan, make_plan
from pipeline.runtime.executor import Executor
from pipeline.runtime.fold import fold_constants
from pipeline.runtime.run_errors import place_of
from pipeline.runtime.slots import Feed
from pipeline.runtime.weights import Weights, with_weights

__all__ = ["CompiledProgram", "compile_graph"]


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A plan, and the executor that owns its storage."""

    plan: ExecutionPlan
    executor: Executor

    @property
    def feed_signature(self) -> FeedSignature:
        """Name and spec of every tensor that `run` expects."""
        return self.plan.feed_signature

    def run(self, feed: Feed, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Outputs by name for inputs by name; `copy=False` returns views that a later run may change.

        Raises:
            UsageError: the feed does not fit `feed_signature`, or a state has no value yet.
            DataError: an index in the feed is out of range (a UsageError too).
            InternalError: a kernel failed.
        """
        return self.executor.run(feed, copy=copy)

    def run_updating(self, feed: Feed, *, copy: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Outputs as from `run`, and {updated input: its value after the run}; the caller's tensors are not changed."""
        return self.executor.run_updating(feed, copy=copy)

    def states(self) -> dict[str, torch.Tensor]:
        """Copies of the states that runs change, by name, as they are now.

        Raises:
            UsageError: a run failed while it wrote to some; see `pipeline.runtime.states`.
        """
        return self.executor.states.values()

    def give_states(self, states: Feed) -> None:
        """Set states by name; the others are not changed.

        Raises:
            UsageError: no such state, or another shape or dtype.
        """
        self.executor.states.give(states)

    def reset_states(self) -> None:
        """Set every state back to its value when the graph was compiled."""
        self.executor.states.reset()


def compile_graph(graph: Graph, weights: Weights | None = None) -> CompiledProgram:
    """Lower, plan, check and bind `graph`: everything before the first run.

    `weights` are tensors by value name or by name in a checkpoint. They are bound once, without a copy. Weights that
    are neither among them nor in the graph's payloads are part of each feed.

    Raises:
        Unsupported: ops without a kernel (all are listed), or a device other than the CPU.
        UsageError: dimensions that are still names, or weights that the graph does not have.
        SourceError: a weight does not fit its declaration.
        InternalError: the graph breaks a rule of the IR, or the plan did not pass its checker.
    """
    if not isinstance(graph, Graph):
        raise UsageError(f"compile_graph: found {type(graph).__name__}, expected a Graph, as from_onnx makes")
    check(graph, read_payloads=False)  # binding names bytes that do not fit
    graph = with_kernels(in_traced_order(fold_constants(with_weights(graph, weights or {}))))
    plan = make_plan(graph, lower(graph))
    check_plan(plan)
    return CompiledProgram(plan, _executor(plan, graph))


def _executor(plan: ExecutionPlan, graph: Graph, *, functional: bool = False) -> Executor:
    bodies = {
        at: [
            _executor(inner, body, functional=functional or graph.ops[at].kind == AUTOCAST)
            for inner, body in zip(plans, graph.ops[at].bodies, strict=True)
        ]
        for at, plans in plan.bodies.items()
    }
    places = [place_of(op) for op in graph.ops]
    return Executor(plan, graph.payloads, bodies, functional=functional, places=places)


AUTOCAST = "higher_order.wrap_with_autocast"
