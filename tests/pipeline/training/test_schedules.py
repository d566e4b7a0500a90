"""Every scheduler of torch sets the learning rate of a recorded step, as it does that of torch's own step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeline.errors import UsageError
from pipeline.events import Event, Phase, Progress, RunLog
from pipeline.training import PHASES, record_step
from tests.pipeline.training.steps import LOSS, MODELS, seeded

BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 0])

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, 10, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.6)], [3]
    ),
}


def make_module() -> nn.Module:
    return nn.Linear(6, 3)


def losses(optimizer: Optimizer, step: Callable[[], float], schedule: Any) -> list[float]:
    found = []
    for _ in range(8):
        found.append(step())
        schedule.step(*([found[-1]] if isinstance(schedule, ReduceLROnPlateau) else []))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_does_what_it_does_to_torch(name: str) -> None:
    module, twin = seeded(make_module), seeded(make_module)
    groups = [[{"params": [own.weight]}, {"params": [own.bias], "lr": 0.05}] for own in (module, twin)]
    ours, theirs = (SGD(group, lr=0.2, momentum=0.5) for group in groups)
    program = record_step(module, LOSS, ours, BATCH)

    found = losses(ours, lambda: program.step(BATCH).item(), SCHEDULES[name](ours))
    expected = losses(theirs, lambda: step_of_torch(twin, theirs, *BATCH), SCHEDULES[name](theirs))
    assert found == pytest.approx(expected, rel=1e-5)
    rates = [group["lr"] for group in ours.param_groups]
    assert rates == [group["lr"] for group in theirs.param_groups]
    assert [group["lr"] for group in program.state_dict()["optimizer"]["param_groups"]] == rates


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_training_changes_between_torch_and_a_program(name: str, dtype: torch.dtype) -> None:
    """Three steps of a program, three of torch, then those of another program: all are those of torch alone, and the
    rate that the schedule has set last is not lost on the way."""
    x, target = BATCH[0].to(dtype), BATCH[1]
    found = []
    for changes in ((), (0, 3, 6)):
        module = seeded(make_module).to(dtype)
        optimizer = Adam(module.parameters(), lr=0.2, weight_decay=0.01)
        schedule, program, own = SCHEDULES[name](optimizer), None, list[float]()
        for number in range(8):
            if number in changes and program is None:
                program = record_step(module, LOSS, optimizer, (x, target))
            elif number in changes and program is not None:
                program.write_back()
                program = None
            own.append(program.step((x, target)).item() if program else step_of_torch(module, optimizer, x, target))
            schedule.step(*([own[-1]] if isinstance(schedule, ReduceLROnPlateau) else []))
        found.append([*own, *(group["lr"] for group in optimizer.param_groups)])
    assert found[1] == pytest.approx(found[0], rel=1e-5 if dtype == torch.float32 else 1e-12)


def step_of_torch(module: nn.Module, optimizer: Optimizer, x: torch.Tensor, target: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = LOSS(module(x), target)
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_snapshot_has_the_rate_that_a_schedule_has_set_last() -> None:
    module = seeded(make_module)
    optimizer = SGD(module.parameters(), lr=0.2)
    program, schedule = record_step(module, LOSS, optimizer, BATCH), lr_scheduler.ExponentialLR(optimizer, 0.1)
    program.step(BATCH)
    schedule.step()
    snapshot = program.snapshot()
    program.step(BATCH)
    expected = program.state_dict()["module"]["weight"]
    program.restore(snapshot)
    program.step(BATCH)
    assert torch.equal(program.state_dict()["module"]["weight"], expected)


def test_every_scheduler_of_torch_is_tried() -> None:
    bases = {"LRScheduler", "SWALR"}  # SWALR is of torch.optim.swa_utils, and no scheduler of a training
    known = {name for name in dir(lr_scheduler) if name.endswith(("LR", "Restarts", "Plateau", "Scheduler"))}
    assert known - bases - {"_LRScheduler", "LRScheduler"} == set(SCHEDULES)


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: Adam(p, lr=0.1)])
def test_a_momentum_that_is_cycled_is_refused(make: Callable[..., Optimizer]) -> None:
    """It is part of the recorded graph; a step that went on with the old one would be silently wrong."""
    module = seeded(make_module)
    optimizer = make(module.parameters())
    program = record_step(module, LOSS, optimizer, BATCH)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.3, 10)
    with pytest.raises(UsageError, match=r"group 0 of the optimizer has (momentum|betas)=.*cycle_momentum=False"):
        for _ in range(2):
            program.step(BATCH)
            schedule.step()


@pytest.mark.parametrize("change", [{"weight_decay": 0.5}, {"nesterov": True}])
def test_another_option_that_is_changed_later_is_refused(change: dict[str, object]) -> None:
    module = seeded(make_module)
    program = record_step(module, LOSS, SGD(module.parameters(), lr=0.1, momentum=0.9), BATCH)
    program.step(BATCH)
    program.optimizer.param_groups[0].update(change)
    with pytest.raises(UsageError, match="only learning rates may differ: record the step again"):
        program.step(BATCH)
    assert program.steps_done == 1


def test_a_group_that_is_added_later_is_refused() -> None:
    module, other = seeded(make_module), nn.Parameter(torch.ones(1))
    program = record_step(module, LOSS, SGD(module.parameters(), lr=0.1), BATCH)
    program.optimizer.add_param_group({"params": [other]})
    with pytest.raises(UsageError, match="the optimizer has 2 groups, this program 1"):
        program.step(BATCH)


def test_a_rate_in_a_tensor_may_be_written_in_place() -> None:
    module = seeded(make_module)
    rate = torch.tensor(0.1)
    program = record_step(module, LOSS, Adam(module.parameters(), lr=rate, foreach=False), BATCH)
    program.step(BATCH)
    rate.zero_()
    before = program.state_dict()["module"]["weight"]
    program.step(BATCH)
    assert torch.equal(program.state_dict()["module"]["weight"], before)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), torch.tensor(float("nan")), "0.1"])
def test_a_rate_that_is_no_finite_number_is_refused(rate: object) -> None:
    """The loss of that step is finite, and its update would spoil every parameter."""
    module = seeded(make_module)
    optimizer = Adam(module.parameters(), lr=0.1)
    program = record_step(module, LOSS, optimizer, BATCH)
    program.step(BATCH)
    other = program.state_dict()["optimizer"]
    other["param_groups"][0]["lr"] = optimizer.param_groups[0]["lr"] = rate
    for refused in (
        lambda: program.step(BATCH),
        lambda: program.load_state_dict({"optimizer": other}),
        lambda: record_step(module, LOSS, optimizer, BATCH),
    ):
        with pytest.raises(UsageError, match=r"the learning rate of a group of the optimizer is .* finite number"):
            refused()
    optimizer.param_groups[0]["lr"] = 0.1
    program.step(BATCH)
    assert program.steps_done == 2


# The phases of a train step are seen from outside: in the program, as events, and in a log.


def test_each_phase_is_in_the_program_and_among_the_events() -> None:
    events: list[Event] = []
    module, batch = seeded(MODELS["mlp"].make), MODELS["mlp"].batch(0)
    program = record_step(module, LOSS, SGD(module.parameters(), lr=0.1), batch, observe=events.append)
    begun = [event.part for event in events if isinstance(event, Progress)]
    ended = [event.name for event in events if isinstance(event, Phase)]
    assert begun == list(PHASES) == ["Trace", "Compile", "Warmup", "Capture", "Replay"]
    assert ended == ["Trace", "Compile", "Warmup", "Capture"]
    assert [phase.name for phase in program.phases] == begun
    assert all(phase.seconds > 0 for phase in program.phases[:-1])
    assert (program.phases[-1].seconds, program.phases[-1].detail) == (0.0, "0 steps")
    program.step(batch)
    assert program.phases[-1].seconds > 0
    assert program.phases[-1].detail == "1 step"


def test_a_log_has_a_line_for_each_phase() -> None:
    log = RunLog()
    module = seeded(MODELS["mlp"].make)
    record_step(module, LOSS, SGD(module.parameters(), lr=0.1), MODELS["mlp"].batch(0), observe=log.add)
    lines = [line[11:] for line in log.text().splitlines()]
    assert [line.split(":")[0] for line in lines if line.startswith("phase ")] == [
        f"phase {name}" for name in PHASES[:4]
    ]
    assert any(line.startswith("phase Warmup: ") and line.endswith("(8 states as before)") for line in lines)
