"""What cannot be recorded is refused in a sentence, and a step that breaks changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

from pipeline.errors import Unsupported, UsageError
from pipeline.training import NotFinite, record_step
from tests.pipeline.training.steps import LOSS, MODELS, mlp, record, seeded

X, LABEL = MODELS["mlp"].batch(0)


def sgd(module: nn.Module, **options: float) -> Optimizer:
    return SGD(module.parameters(), lr=0.1, **options)  # type: ignore[arg-type]


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.argmax(x * self.scale, dim=1).float().unsqueeze(1).expand(-1, 10)


class Counted(nn.Module):
    """The number of words follows from the numbers in the input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0][:, :10] * self.scale


@pytest.mark.parametrize(
    ("module", "make_optimizer", "loss", "batch", "error", "said"),
    [
        (mlp, lambda m: Adagrad(m.parameters()), LOSS, (X, LABEL), Unsupported, "Adagrad; expected torch.optim.SGD"),
        (mlp, lambda m: sgd(m, dampening=0.5, momentum=0.9), LOSS, (X, LABEL), Unsupported, "dampening=0.5; only 0"),
        (mlp, lambda m: sgd(nn.Linear(2, 2)), LOSS, (X, LABEL), UsageError, "shape .2, 2. that the module has not"),
        (mlp, sgd, nn.CrossEntropyLoss(reduction="none"), (X, LABEL), UsageError, "the loss is a tensor .8."),
        (Rounded, sgd, nn.MSELoss(), (X, torch.zeros(8, 10)), UsageError, "does not depend on any parameter"),
        (Counted, sgd, lambda out, _: out.mean(), (X, LABEL), Unsupported, "the size u0 follows from the numbers"),
        (mlp, sgd, LOSS, (X,), UsageError, r"expected `\(\*inputs, target\)`"),
        (mlp, sgd, LOSS, (X, 3), UsageError, "'target' of the batch is a int; expected a tensor"),
    ],
)
def test_what_cannot_be_recorded(
    module: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[..., torch.Tensor],
    batch: tuple[torch.Tensor, ...],
    error: type[Exception],
    said: str,
) -> None:
    made = module()
    with pytest.raises(error, match=said):
        record_step(made, loss, make_optimizer(made), batch)


def test_a_batch_of_another_shape_is_refused() -> None:
    program, *_ = record(MODELS["mlp"], lambda params: SGD(params, lr=0.1))
    with pytest.raises(UsageError, match=r"input 'input' is float32\[4, 16\] on cpu; expected float32\[8, 16\]"):
        program.step((X[:4], LABEL[:4]))
    with pytest.raises(UsageError, match="the batch is not like the example batch, which is 2 tensors"):
        program.step((X, X, LABEL))


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / x.abs().amax()


def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_operator() -> None:
    module = seeded(Divided)
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


def test_an_input_that_is_not_finite_is_named() -> None:
    program, *_ = record(MODELS["mlp"], lambda params: SGD(params, lr=0.1))
    with pytest.raises(NotFinite, match="step 1: the loss is nan; input held such numbers before the step"):
        program.step((X * torch.nan, LABEL))
