"""What the pass `epilogues` leaves as it is, and that its numbers stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pipeline.ir import check
from pipeline.lowering.fusion import fuse_epilogues
from pipeline.runtime import compile_graph
from tests.support.torch_programs import Calls, feed_of, graph_of

Function = Callable[..., torch.Tensor]

X, WEIGHT = torch.linspace(-1, 2, 6).view(2, 3), torch.linspace(-2, 1, 12).view(3, 4).cos()
BIAS, ONE, ROWS = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0.5]), torch.linspace(0, 1, 8).view(2, 4)

WIDE_WEIGHT, WIDE_BIAS = WEIGHT.double(), BIAS.double()


def epilogues_of(function: Function, ins: list[torch.Tensor]) -> int:
    """How many products have an epilogue after the pass; the graph computes the same."""
    graph = graph_of(Calls([function]), ins)
    after = fuse_epilogues(graph)
    check(after)
    (found,) = compile_graph(after).run(feed_of(graph, ins)).values()
    torch.testing.assert_close(found, function(*ins), atol=1e-6, rtol=1e-6)
    return sum(op.kind == "LinearPointwise" for op in after.ops)


def test_a_bias_and_a_relu_are_one_call_with_their_product() -> None:
    assert epilogues_of(lambda x: (x @ WEIGHT + BIAS).relu(), [X]) == 1
    assert epilogues_of(lambda x: torch.addmm(BIAS, x, WEIGHT).relu(), [X]) == 1


STAYS: dict[str, tuple[Function, list[torch.Tensor]]] = {
    "float64": (lambda x: (x @ WIDE_WEIGHT + WIDE_BIAS).relu(), [X.double()]),
    "a bias that makes the sum float64": (lambda x: x @ WEIGHT + WIDE_BIAS, [X]),
    "one number for all columns": (lambda x: (x @ WEIGHT + ONE).relu(), [X]),
    "a matrix": (lambda x: (x @ WEIGHT + ROWS).relu(), [X]),
    "a vector as the rows": (lambda x: (x @ WEIGHT + BIAS).relu(), [X[0]]),
    "a multiple of the bias": (lambda x: torch.addmm(BIAS, x, WEIGHT, beta=2).relu(), [X]),
    "a multiple of the product": (lambda x: torch.addmm(BIAS, x, WEIGHT, alpha=2).relu(), [X]),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_one_call_does_not_compute_stays(case: str) -> None:
    assert epilogues_of(*STAYS[case]) == 0
