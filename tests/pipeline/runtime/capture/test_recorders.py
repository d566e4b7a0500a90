"""Recorders: the same launches on every device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pipeline.runtime.capture.recorders import RECORDERS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_recording_runs_the_same_launches_on_what_their_operands_hold_then(device: str) -> None:
    x, y, total = (torch.zeros(4, device=device) for _ in range(3))
    launches = [partial(torch.neg, x, out=y), partial(total.add_, y)]
    recorder = RECORDERS[device]()
    with torch.inference_mode():
        recorder.warm_up(lambda: [launch() for launch in launches])
        total.zero_()
        recording = recorder.record(launches)
        total.zero_()
        for number in (1.0, 2.0, 3.0):
            x.fill_(number)
            recording.replay()
    assert total.tolist() == [-6] * 4


def test_a_loop_knows_which_launch_failed() -> None:
    def fail() -> None:
        raise IndexError("index 9 is out of bounds")

    recording = RECORDERS["cpu"]().record([int, int, fail, int])
    with pytest.raises(IndexError):
        recording.replay()
    assert recording.begun == 3
