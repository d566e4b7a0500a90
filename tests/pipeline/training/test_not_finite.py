"""A step whose loss or gradient is not finite stops, names the operator at fault, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from pipeline.training import NotFinite, record_step
from tests.pipeline.training.steps import LOSS, MODELS, mlp, record, seeded

X, LABEL = MODELS["mlp"].batch(0)


def sgd(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.1)


class Division(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / x.abs().amax()


def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_operator() -> None:
    module = seeded(Division)
    program = record_step(module, LOSS, Adam(module.parameters()), (X, LABEL))
    program.step((X, LABEL))
    before = program.snapshot()
    with pytest.raises(
        NotFinite, match=r"step 2: the loss is nan; the first operator .* is 'div', aten.div.Tensor"
    ) as e:
        program.step((torch.zeros(8, 16), LABEL))
    assert e.value.step == 2
    for name, tensor in program.snapshot().states.items():
        assert torch.equal(tensor, before.states[name]), name
        assert torch.equal(e.value.snapshot.states[name], before.states[name]), name
    program.step((X, LABEL))
    assert program.steps_done == 2


class Gamble(nn.Module):
    """Each of four divisions, on lines of their own, is by zero where a dropout has drawn so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(16, 10), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.drop(x))
        for _ in range(4):
            x = x / self.drop(torch.ones(1))
        return x


def test_the_operator_is_found_also_where_a_dropout_decides() -> None:
    """The step is run again with the numbers that it drew: the division is the one whose divisor was dropped."""
    module, twin = seeded(Gamble), seeded(Gamble)
    program = record_step(module, LOSS, sgd(module), (X, LABEL))
    divisions = [op.name for op in program.graph.ops if op.kind == "aten.div.Tensor"][:4]
    blamed = set[str]()
    for seed in range(12):
        torch.manual_seed(seed)
        twin.drop(X)
        dropped = [bool(twin.drop(torch.ones(1)) == 0) for _ in range(4)]
        torch.manual_seed(seed)
        if not any(dropped):
            program.step((X, LABEL))
            continue
        first = divisions[dropped.index(True)]
        with pytest.raises(NotFinite, match=rf"the first operator whose result is not finite is '{first}',"):
            program.step((X, LABEL))
        blamed.add(first)
    assert len(blamed) > 2


def test_an_input_that_is_not_finite_is_named() -> None:
    program, *_ = record(MODELS["mlp"], lambda params: SGD(params, lr=0.1))
    with pytest.raises(NotFinite, match="step 1: the loss is nan; input held such values before the step"):
        program.step((X * torch.nan, LABEL))


class Root(nn.Module):
    """The gradient of a root is infinite at 0, where the root itself is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(16, 10), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.sqrt((self.scale**2).sum())


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"check_gradients": True}])
def test_a_gradient_that_is_not_finite_stops_the_step(options: dict[str, Any]) -> None:
    module = seeded(Root)
    program = record_step(module, LOSS, sgd(module), (X, LABEL), **options)
    before = program.snapshot()
    with pytest.raises(
        NotFinite, match="step 1: a gradient is not finite; the first operator whose result is not finite"
    ):
        program.step((X, LABEL))
    for name, tensor in program.snapshot().states.items():
        assert torch.equal(tensor, before.states[name]), name
    assert program.steps_done == 0


def test_parameters_that_a_gradient_has_spoilt_are_named_one_step_later() -> None:
    module = seeded(Root)
    program = record_step(module, LOSS, sgd(module), (X, LABEL))
    program.step((X, LABEL))
    with pytest.raises(NotFinite, match=r"module\.scale held such values before .*record with check_gradients=True"):
        program.step((X, LABEL))


def test_a_failed_step_draws_no_random_number_for_its_message() -> None:
    module = nn.Sequential(nn.Dropout(0.5), seeded(Division))
    program = record_step(module, LOSS, sgd(module), (X, LABEL))
    torch.manual_seed(0)
    program.step((X, LABEL))
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    with pytest.raises(NotFinite):
        program.step((torch.zeros(8, 16), LABEL))
    assert torch.equal(torch.get_rng_state(), expected)


def test_parameters_that_no_gradient_reaches_are_named_in_the_phase() -> None:
    module = nn.ModuleDict({"used": seeded(mlp), "idle": nn.Linear(2, 2)})
    module.forward = lambda x: module["used"](x)  # type: ignore[assignment]
    program = record_step(module, LOSS, sgd(module), (X, LABEL))
    assert program.phases[0].detail.endswith("no gradient reaches idle.weight, idle.bias")
