"""A step of a program against eager torch: they agree, and a planted difference is named where it begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from pipeline.runtime.devices import CPU, Device
from pipeline.runtime.recording import RecordingDevice
from pipeline.training import TrainProgram, compare_step, record_step

LOSS = nn.MSELoss()
BATCHES = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(n)), torch.zeros(8, 3)) for n in range(4)]


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def record(module: nn.Module, max_norm: float | None = None, device: Device = CPU) -> TrainProgram:
    return record_step(module, LOSS, AdamW(module.parameters(), lr=1e-2), BATCHES[0], max_norm=max_norm, device=device)


DEVICES = pytest.mark.parametrize("device", [CPU, RecordingDevice()], ids=["cpu", "recording"])


@DEVICES
def test_each_step_agrees_with_eager_torch(device: Device) -> None:
    """The bias before the normalisation has a gradient of rounding alone, which Adam makes a whole step of."""
    program = record(make(), max_norm=0.5, device=device)
    for step, batch in enumerate(BATCHES, 1):
        before = torch.get_rng_state()
        found = compare_step(program, LOSS, batch, max_norm=0.5)
        assert (found.step, found.name, found.errors) == (step, "", None)
        assert str(found).startswith(f"step {step}: no difference, torch and the program agree on")
        assert not torch.equal(torch.get_rng_state(), before)  # the step of the program has drawn
    assert program.steps_done == 4


def test_another_loss_differs_at_once() -> None:
    found = compare_step(record(make()), nn.L1Loss(), BATCHES[0])
    assert found.name == "loss"
    assert found.op == ""  # the program computes what it has recorded


def test_the_first_value_and_the_first_operator_that_differ_are_named() -> None:
    module = make()
    program = record_step(module, LOSS, SGD(module.parameters(), lr=0.1, momentum=0.9), BATCHES[0])
    assert compare_step(program, LOSS, BATCHES[0]).errors is None
    module[4].register_forward_pre_hook(lambda _, args: (args[0].detach(),))  # eager torch stops gradients there
    found = compare_step(program, LOSS, BATCHES[1])
    assert (found.step, found.name) == (2, "optimizer.0.weight.momentum_buffer")
    assert "differs from eager torch" in str(found)


@DEVICES
@pytest.mark.parametrize("kind", ["tanh", "mm"])
def test_a_wrong_kernel_is_named(kind: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    program = record(nn.Sequential(nn.Linear(6, 16), nn.Dropout(), nn.Tanh(), nn.Linear(16, 3)), device=device)
    walk = program.walk

    def walk_wrongly(batch: object):  # type: ignore[no-untyped-def]
        for name, result in walk(batch):  # type: ignore[arg-type]
            yield name, result + 0.1 if kind in name else result

    monkeypatch.setattr(program, "walk", walk_wrongly)
    assert kind in compare_step(program, nn.L1Loss(), BATCHES[0]).op
