"""What a device says late of the last batches of a training, which no later step would hear."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.authoring.fit import FitLimits, TrainingLoop
from pipeline.errors import DataError
from pipeline.runtime import RecordingDevice
from pipeline.training import NotFinite, TrainProgram, record_step

X, LABELS = torch.linspace(-1, 1, 12).view(4, 3), torch.tensor([0, 1, 2, 1])
WRONG, BROKEN = (X, torch.tensor([0, 5, 2, 1])), (X * math.nan, LABELS)


@pytest.fixture
def program() -> TrainProgram:
    module = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return record_step(module, nn.functional.cross_entropy, optimizer, (X, LABELS), device=RecordingDevice(2**22))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (WRONG, DataError, "an index is out of range"),
        (BROKEN, NotFinite, "a step up to step 1: the loss or a gradient is not finite"),
    ],
)
def test_a_wait_says_what_was_wrong_with_the_last_step(
    batch: tuple[torch.Tensor, torch.Tensor], error: type[Exception], message: str, program: TrainProgram
) -> None:
    program.step(batch)
    with pytest.raises(error, match=message):
        program.synchronize()


def look_at_the_end_alone(program: TrainProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card is looked at once in a millisecond, so the last steps may be seen by no look."""
    assert program._late is not None
    value = program._late._value
    monkeypatch.setattr(value, "start", lambda *, at_once=False, start=value.start: at_once and start(at_once=True))


def test_a_wait_looks_also_where_the_last_look_was_just_now(
    program: TrainProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at_the_end_alone(program, monkeypatch)
    program.step(BROKEN)
    with pytest.raises(NotFinite):
        program.synchronize()
    program.step((X, LABELS))
    program.synchronize()


def test_a_step_launches_a_copy_of_the_loss_and_nothing_else_after_its_graph(program: TrainProgram) -> None:
    """The sum of the losses, which is looked at late, is a part of the graph."""
    launches: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if program._compiled.device.holds(args[0]):
                launches.append(func.name())
            return func(*args, **(kwargs or {}))

    program.step((X, LABELS))
    with Log():
        program.step((X, LABELS))
    assert launches == ["aten::clone"]


class Root(nn.Linear):
    """The gradient of a root is infinite at 0, where the root itself is finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (self.bias * 0).square().sum().sqrt()


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"check_gradients": True}])
def test_a_gradient_that_is_not_finite_is_said_late_where_the_loss_is(options: dict[str, Any]) -> None:
    module, device = Root(3, 3), RecordingDevice(2**22)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    program = record_step(module, nn.functional.cross_entropy, optimizer, (X, LABELS), device=device, **options)
    assert program.step((X, LABELS)).isfinite()
    with pytest.raises(NotFinite, match="the loss or a gradient is not finite"):
        program.synchronize()


def test_the_warm_up_is_no_step() -> None:
    """The example of the recording may be any batch of this form."""
    module = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    program = record_step(module, nn.functional.cross_entropy, optimizer, BROKEN, device=RecordingDevice(2**22))
    assert program.step((X, LABELS)).isfinite()
    program.synchronize()


def test_large_losses_are_no_broken_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loss is about 2.9e38, and two are more than float32 has."""
    module, target = nn.Linear(3, 3), torch.zeros(4, 3)
    target[0, 0] = 1.7e19
    batch = (X, target)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    program = record_step(module, nn.MSELoss(reduction="sum"), optimizer, batch, device=RecordingDevice(2**22))
    look_at_the_end_alone(program, monkeypatch)
    losses = [program.step(batch) for _ in range(4)]
    program.synchronize()
    assert all(2.8e38 < loss < math.inf for loss in losses)


@pytest.mark.parametrize(("batch", "error"), [(WRONG, DataError), (BROKEN, NotFinite)])
def test_a_training_ends_with_what_was_wrong_with_its_last_batch(
    batch: tuple[torch.Tensor, torch.Tensor], error: type[Exception], program: TrainProgram
) -> None:
    with pytest.raises(error):
        TrainingLoop(program).run([(X, LABELS), batch], FitLimits(1))
