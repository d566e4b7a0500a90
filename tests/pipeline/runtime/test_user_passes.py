"""`optimize_ir` and `optimize_plan`: the caller's own passes of compile_graph, each checked after it ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.ir import Graph, TensorSpec
from pipeline.planning import ExecutionPlan
from pipeline.runtime import CheckedBuilder, compile_graph

X = torch.tensor([[1.0, -2.0, 3.0]])
SPEC = TensorSpec((1, 3), "float32")


@pytest.fixture
def graph() -> Graph:
    builder = CheckedBuilder("twice")
    x = builder.input("x", SPEC)
    (h,) = builder.emit("aten.relu.default", [x], [("h", SPEC)])
    return builder.build(builder.emit("aten.neg.default", [h], [("y", SPEC)]))


def to_abs(graph: Graph) -> Graph:
    """relu → abs; the kernel is made again when the graph is lowered."""
    first, *rest = graph.ops
    return replace(graph, ops=(replace(first, kind="aten.abs.default", kernel=None), *rest))


def test_passes_run_in_order_over_the_graph_and_the_plan(graph: Graph) -> None:
    seen: list[object] = []

    def look(plan: ExecutionPlan) -> ExecutionPlan:
        seen.append(plan)
        return plan

    program = compile_graph(graph, optimize_ir=[to_abs], optimize_plan=[look, look])
    assert torch.equal(program.run({"x": X})["y"], -X.abs())
    assert seen == [program.plan] * 2


def cut(graph: Graph) -> Graph:
    return replace(graph, ops=graph.ops[:1])


def renamed(graph: Graph) -> Graph:
    first, *rest = graph.values
    return replace(graph, values=(replace(first, name="z"), *rest))


def nothing(_: Graph) -> Graph:
    return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    "change, said",
    [
        (cut, "optimize_ir: cut broke the graph: "),
        (renamed, "optimize_ir: renamed changed the signature: "),
        (nothing, "optimize_ir: nothing returned NoneType, expected the Graph after the change"),
        (3, "optimize_ir: found 3, expected functions of a Graph"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(graph: Graph, change: Callable[[Graph], Graph], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        compile_graph(graph, optimize_ir=[change])


def test_a_pass_that_breaks_the_plan_is_named(graph: Graph) -> None:
    def without_the_last_call(plan: ExecutionPlan) -> ExecutionPlan:
        return replace(plan, calls=plan.calls[:-1])

    with pytest.raises(UsageError, match="optimize_plan: without_the_last_call broke the plan: "):
        compile_graph(graph, optimize_plan=[without_the_last_call])
