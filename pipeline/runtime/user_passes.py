"""The caller's own passes of `compile_graph`, over the graph and over the plan; each is checked after it ran.

What is wrong after a pass is the pass's, whose name the message says. A pass keeps what its caller feeds and gets: the
inputs, the outputs and the values that change from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from passes.suggest import describe_argument
from pipeline.errors import UsageError
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.planning import ExecutionPlan
from pipeline.planning.check import differences
from pipeline.planning.check import violations as plan_violations
from pipeline.runtime.call_check import call_keys, find_wrong_calls, find_wrong_rules, refuse_wrong_graph

GraphPass: TypeAlias = Callable[[Graph], Graph]
PlanPass: TypeAlias = Callable[[ExecutionPlan], ExecutionPlan]
T = TypeVar("T", Graph, ExecutionPlan)


def run_graph_passes(graph: Graph, passes: Sequence[GraphPass]) -> Graph:
    """`graph` after each of `passes`.

    Raises:
        UsageError: `passes` is no list of functions, or a pass returns something else than a Graph, a graph that
            breaks a rule of the IR, one with a call that its operator does not take, or one of another signature; the
            message names the pass.
    """
    if _check_passes("optimize_ir", passes, "Graph"):
        refuse_wrong_graph(graph)
    for change in passes:
        changed = _call("optimize_ir", change, graph)
        wrong = find_wrong_rules(changed) or [*find_wrong_calls(changed, call_keys(graph), tried=True)]
        _refuse("optimize_ir", change, "the graph", wrong)
        for what, found, expected in zip(SIGNATURE, _signature(changed), _signature(graph), strict=True):
            if found != expected:
                shown, wanted = (
                    ", ".join(f"{name}: {spec}" for name, spec in side) or "none" for side in (found, expected)
                )
                raise UsageError(
                    f"optimize_ir: {_name(change)} changed the {what} of the graph: found {shown}, expected {wanted}"
                )
        graph = changed
    return graph


def run_plan_passes(graph: Graph, plan: ExecutionPlan, passes: Sequence[PlanPass]) -> ExecutionPlan:
    """`plan`, a plan of `graph`, after each of `passes`.

    Raises:
        UsageError: `passes` is no list of functions, or a pass returns something else than a plan, or a plan that the
            checker refuses; the message names the pass.
    """
    for change in _check_passes("optimize_plan", passes, "plan"):
        plan = _call("optimize_plan", change, plan)
        _refuse("optimize_plan", change, "the plan", plan_violations(plan) or differences(graph, plan))
    return plan


def _check_passes(option: str, passes: object, noun: str) -> Sequence[Callable[[T], T]]:
    if not isinstance(passes, list | tuple):
        advice = f"; pass [{_name(passes)}]" if callable(passes) else ""
        raise UsageError(f"{option} is {describe_argument(passes)}; expected a list of functions of a {noun}{advice}")
    for change in passes:
        if not callable(change):
            raise UsageError(f"{option}: found {describe_argument(change)}, expected functions of a {noun}")
    return passes


def _call(option: str, change: Callable[[T], T], given: T) -> T:
    try:
        made = change(given)
    except Exception as error:
        error.add_note(f"in {_name(change)}, a pass of {option}")
        raise
    if not isinstance(made, type(given)):
        found, expected = describe_argument(made), type(given).__name__
        raise UsageError(f"{option}: {_name(change)} returned {found}, expected the {expected} after the change")
    return made


def _refuse(option: str, change: Callable[[T], T], what: str, wrong: Sequence[str]) -> None:
    if wrong:
        listed = "".join(f"\n  - {problem}" for problem in wrong[:LISTED])
        more = f"\n  - and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise UsageError(f"{option}: {_name(change)} broke {what}:{listed}{more}")


LISTED = 10


def _name(change: object) -> str:
    return getattr(change, "__name__", None) or type(change).__name__


SIGNATURE = ("inputs", "outputs", "updates")


def _signature(graph: Graph) -> tuple[list[tuple[str, TensorSpec]], ...]:
    """Names and specs of the inputs, of the outputs, and of the values that change from run to run."""
    return tuple(
        [(graph.values[vid].name, graph.values[vid].spec) for vid in vids]
        for vids in (graph.inputs, graph.outputs, sorted(graph.updates))
    )
