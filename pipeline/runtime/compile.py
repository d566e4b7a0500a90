"""Graph → a program that runs: lower, plan, check the plan, bind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.ir.graph import Graph
from pipeline.lowering import lower, with_kernels
from pipeline.planning import ExecutionPlan, FeedSignature, check_plan, make_plan
from pipeline.runtime.executor import Executor
from pipeline.runtime.slots import Feed

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
            UserMistake: the feed does not fit `feed_signature`.
            InternalError: a kernel failed.
        """
        return self.executor.run(feed, copy=copy)


def compile_graph(graph: Graph) -> CompiledProgram:
    """Everything before the first run.

    Raises:
        Unsupported: ops without a kernel (all are listed), or a device other than the CPU.
        UserMistake: dimensions that are still names.
        SourceMistake: a weight does not fit its declaration.
        InternalError: the plan did not pass its checker.
    """
    graph = with_kernels(graph)
    plan = make_plan(graph, lower(graph))
    check_plan(plan)
    return CompiledProgram(plan, Executor(plan, graph.payloads))
