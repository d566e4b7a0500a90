"""Operators that only move elements cost nothing at run time: no launch is left of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pipeline.errors import Unsupported
from pipeline.ir import Graph, check
from pipeline.lowering import lower, with_kernels
from pipeline.lowering.memory_order import in_traced_order
from pipeline.planning import make_plan
from pipeline.planning.check import violations
from pipeline.runtime import compile_graph
from tests.support.torch_programs import Calls, graph_of


def kinds_of_steps(graph: Graph) -> list[str]:
    """The kinds of the calls that do work, in order."""
    return [step.kind.name for step in compile_graph(graph).context.bound.steps]


@pytest.mark.parametrize(
    "moved",
    [
        lambda x: x.view(6, 4),
        lambda x: x.transpose(0, 2),
        lambda x: x[:, 1:, ::2],
        lambda x: x[1],
        lambda x: x.unbind(1)[2],
        lambda x: x.split([1, 3], 2)[1],
        lambda x: x.unfold(2, 2, 1),
        lambda x: x.diagonal(1, 0, 2),
        lambda x: x[:, :, :1].expand(2, 3, 5),
        lambda x: x.transpose(1, 2).unsqueeze(0).movedim(0, -1).squeeze(),
        lambda x: torch.dropout(x.contiguous().detach().clone(), 0.5, train=False),
    ],
)
def test_a_move_is_free(moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What is left is the exponential before it and the one after it."""
    graph = graph_of(Calls([lambda x: moved(x.exp()).exp()]), [torch.randn(2, 3, 4)])
    assert kinds_of_steps(graph) == ["Exp"] * 2


def test_attention_is_left_where_it_writes() -> None:
    """Its result lies token by token, so joining the heads again is a view, as in eager torch."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, 8, 2, 16).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(1, 8, 32)

    graph = graph_of(Calls([lambda x: attend(x).exp()]), [torch.randn(1, 8, 32)])
    assert kinds_of_steps(graph) == ["AtenScaledDotProductAttention", "Exp"]


def test_what_constants_alone_decide_is_decided_before_the_run() -> None:
    def masked(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(4)
        return x.masked_fill(at[None] > at[:, None], 0.0)

    graph = graph_of(Calls([masked, lambda x: x + torch.rand(4)]), [torch.randn(4, 4)])
    assert kinds_of_steps(graph) == ["MaskedFill", "Aten", "Add"]


@pytest.mark.parametrize("cut", [lambda x: x[1:], lambda x: x[1:].view(1, 3), lambda x: x.chunk(2)[1].unsqueeze(0)])
def test_storage_is_not_a_value(cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What `as_strided` shows depends on where a tensor lies; a plan that cannot tell does not guess."""
    graph = graph_of(Calls([lambda x: cut(x).as_strided((2, 2), (1, 1), 0)]), [torch.randn(4)])
    with pytest.raises(Unsupported, match=r"aten\.as_strided\.default, counts through the memory of .* within another"):
        compile_graph(graph)


def test_the_checker_knows_that_an_operand_lies_otherwise() -> None:
    """Told that the sum may be written over its second operand, as if its axes were not turned, the planner does it."""
    graph = graph_of(Calls([lambda x, y: (x * 2).t() + (y * 3)]), [torch.randn(4, 4), torch.randn(4, 4)])
    graph = with_kernels(in_traced_order(graph))
    calls = lower(graph)
    (total,) = [call for call in calls if call.out_vids == (graph.ops[-2].outputs[0],)]
    assert "inplace" not in total.constraints
    wrong = replace(total, constraints={"inplace": (1,)})
    plan = make_plan(graph, [wrong if call is total else call for call in calls])
    assert [problems for problems in violations(plan) if "may not put 'add as stored'" in problems]


def test_each_stored_form_has_a_name_of_its_own() -> None:
    """Two reads through the memory of one input make two forms of it, and a model may use the first name itself."""

    def read_twice(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((2, 2), (1, 1)) + x.as_strided((2, 2), (2, 1))

    x = torch.randn(3, 4).t()
    graph = graph_of(Calls([read_twice]), [x])
    name = graph.values[graph.inputs[0]].name
    taken = replace(graph.values[-1], name=f"{name} as stored")
    graph = in_traced_order(replace(graph, values=(*graph.values[:-1], taken)))
    check(graph)
    forms = [value.name for value in graph.values if value.producer is not None and "as stored" in value.name]
    assert forms == [f"{name} as stored", f"{name} as stored'", f"{name} as stored''"]
    (result,) = compile_graph(graph).run({name: x}).values()
    torch.testing.assert_close(result, read_twice(x))
