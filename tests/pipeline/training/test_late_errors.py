"""What a device says late of the last batches of a training, which no later step would hear."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

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


def test_a_wait_looks_also_where_the_last_look_was_just_now(
    program: TrainProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card is looked at once in a millisecond, so the last steps may be seen by no look."""
    assert program._late is not None
    value = program._late._value
    monkeypatch.setattr(value, "start", lambda *, at_once=False, start=value.start: at_once and start(at_once=True))
    program.step(BROKEN)
    with pytest.raises(NotFinite):
        program.synchronize()
    program.step((X, LABELS))
    program.synchronize()


@pytest.mark.parametrize(("batch", "error"), [(WRONG, DataError), (BROKEN, NotFinite)])
def test_a_training_ends_with_what_was_wrong_with_its_last_batch(
    batch: tuple[torch.Tensor, torch.Tensor], error: type[Exception], program: TrainProgram
) -> None:
    with pytest.raises(error):
        TrainingLoop(program).run([(X, LABELS), batch], FitLimits(1))
