"""The caller's own passes of `compile_graph`: over the graph before it is lowered, over the plan before it is bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from pipeline.errors import InternalError, UsageError
from pipeline.ir import Graph, check
from pipeline.ir.graph import TensorSpec
from pipeline.planning import ExecutionPlan, check_against, check_plan

GraphPass: TypeAlias = Callable[[Graph], Graph]
PlanPass: TypeAlias = Callable[[ExecutionPlan], ExecutionPlan]
T = TypeVar("T", Graph, ExecutionPlan)


def run_graph_passes(graph: Graph, passes: Sequence[GraphPass]) -> Graph:
    """`graph` after each of `passes`, which keep its inputs and outputs.

    Raises:
        UsageError: a pass returns something else than a Graph, a graph that breaks a rule of the IR, or one of other
            inputs or outputs; the message names the pass.
    """
    for change in passes:
        changed = _call("optimize_ir", change, graph)
        try:
            check(changed, read_payloads=False)
        except InternalError as error:
            raise UsageError(f"optimize_ir: {_name(change)} broke the graph: {error}") from error
        if (found := _signature(changed)) != (expected := _signature(graph)):
            raise UsageError(f"optimize_ir: {_name(change)} changed the signature: found {found}, expected {expected}")
        graph = changed
    return graph


def run_plan_passes(graph: Graph, plan: ExecutionPlan, passes: Sequence[PlanPass]) -> ExecutionPlan:
    """`plan`, a plan of `graph`, after each of `passes`.

    Raises:
        UsageError: a pass returns something else than a plan, or a plan that the checker refuses; the message names the
            pass.
    """
    for change in passes:
        plan = _call("optimize_plan", change, plan)
        try:
            check_plan(plan)
            check_against(graph, plan)
        except InternalError as error:
            raise UsageError(f"optimize_plan: {_name(change)} broke the plan: {error}") from error
    return plan


def _call(option: str, change: Callable[[T], T], given: T) -> T:
    if not callable(change):
        raise UsageError(f"{option}: found {change!r:.60}, expected functions of a {type(given).__name__}")
    made = change(given)
    if not isinstance(made, type(given)):
        found, expected = type(made).__name__, type(given).__name__
        raise UsageError(f"{option}: {_name(change)} returned {found}, expected the {expected} after the change")
    return made


def _name(change: Callable[[T], T]) -> str:
    return getattr(change, "__name__", None) or repr(change)[:60]


def _signature(graph: Graph) -> tuple[tuple[tuple[str, TensorSpec], ...], ...]:
    return tuple(
        tuple((graph.values[vid].name, graph.values[vid].spec) for vid in vids)
        for vids in (graph.inputs, graph.outputs)
    )
