"""`optimize_ir` and `optimize_plan`: the caller's own passes of compile_graph, each checked after it ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.ir import Graph, InputRef, TensorSpec
from pipeline.planning import ExecutionPlan
from pipeline.runtime import CheckedBuilder, compile_graph, compile_graphs, compile_open_graph

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


def wider(graph: Graph) -> Graph:
    """The result in the middle is declared wider than relu makes it."""
    x, h, y = graph.values
    return replace(graph, values=(x, replace(h, spec=TensorSpec((4, 4), "float32")), y))


def to_abs_in_name(graph: Graph) -> Graph:
    """relu → abs, with the kernel call of relu."""
    first, *rest = graph.ops
    return replace(graph, ops=(replace(first, kind="aten.abs.default"), *rest))


def to_softmax_of_nothing(graph: Graph) -> Graph:
    first, *rest = graph.ops
    attrs = {"self": InputRef(0), "dim": 7}
    return replace(graph, ops=(replace(first, kind="aten.softmax.int", attrs=attrs, kernel=None), *rest))


def tables_of_texts(graph: Graph) -> Graph:
    return replace(graph, outputs=("y",))  # type: ignore[arg-type]


WRONG_PASSES = {
    cut: r"^optimize_ir: cut broke the graph:\n  - %1 'h' names the users \(1,\)",
    renamed: r"^optimize_ir: renamed changed the inputs of the graph: found z: float32\[1, 3\], expected x: ",
    nothing: "^optimize_ir: nothing returned None, expected the Graph after the change$",
    wider: r"wider broke the graph:\n  - op 0 \(aten.relu.default\): found float32\[4, 4\] for what it makes, expected",
    to_abs_in_name: r"its kernel call is of Relu, and the op of Abs; give an op that you change `kernel=None`",
    to_softmax_of_nothing: r"softmax.int\): found axis 7 of float32\[1, 3\], expected -2 to 1",
    tables_of_texts: "broke the graph:\n  - its fields have other types than those of a Graph",
}


@pytest.mark.parametrize("change", WRONG_PASSES, ids=lambda change: change.__name__)
def test_a_pass_that_breaks_the_graph_is_named(graph: Graph, change: Callable[[Graph], Graph]) -> None:
    with pytest.raises(UsageError, match=WRONG_PASSES[change]):
        compile_graph(graph, optimize_ir=[change])


@pytest.mark.parametrize("change", [wider, to_abs_in_name])
def test_the_graph_of_a_pass_is_refused_at_every_door(graph: Graph, change: Callable[[Graph], Graph]) -> None:
    said = r"graph 'twice': [12] ops? cannot be called as declared:\n  - op 0 \("
    for compile_it in (compile_graph, lambda wrong: compile_graphs({"main": wrong}), lambda wrong: run_open(wrong)):
        with pytest.raises(UsageError, match=said):
            compile_it(change(graph))


def run_open(graph: Graph) -> None:
    compile_open_graph(graph).run({"x": X})


@pytest.mark.parametrize(
    "passes, said",
    [
        (to_abs, r"is a function; expected a list of functions of a Graph; pass \[to_abs\]$"),
        ([3], "^optimize_ir: found 3, expected functions of a Graph$"),
        ("cse", "^optimize_ir is 'cse'; expected a list of functions of a Graph$"),
    ],
)
def test_passes_are_a_list_of_functions(graph: Graph, passes: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        compile_graph(graph, optimize_ir=passes)


def test_an_error_of_a_pass_is_its_own_and_names_it(graph: Graph) -> None:
    def divide(graph: Graph) -> Graph:
        raise ZeroDivisionError(graph.name)

    with pytest.raises(ZeroDivisionError) as raised:
        compile_graph(graph, optimize_ir=[divide])
    assert raised.value.__notes__ == ["in divide, a pass of optimize_ir"]


def without_the_last_call(plan: ExecutionPlan) -> ExecutionPlan:
    return replace(plan, calls=plan.calls[:-1], order=plan.order[:-1])


def test_a_pass_that_breaks_the_plan_is_named(graph: Graph) -> None:
    with pytest.raises(UsageError) as refused:
        compile_graph(graph, optimize_plan=[without_the_last_call])
    assert str(refused.value) == (
        "optimize_plan: without_the_last_call broke the plan:\n"
        "  - the caller reads 'y' (vid 2, output), which is not computed yet\n"
        "  - 'y' (vid 2, output) is never computed"
    )
