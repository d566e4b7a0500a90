"""Recorders: the same launches on every device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pipeline.ir.graph import Graph
from pipeline.ops import GraphBuilder
from pipeline.runtime import compile_graph
from pipeline.runtime.capture.recorders import RECORDERS, Recorder
from tests.pipeline.runtime.capture.capture_programs import PAIR

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def recorder_for(device: str) -> Recorder:
    """The recorder of a program on `device`."""
    session = compile_graph(negated(), device=device).context.captures.session
    return RECORDERS[session.device.recorder](session)


def negated() -> Graph:
    builder = GraphBuilder("negated")
    return builder.build(builder.emit("aten.neg.default", [builder.input("x", PAIR)], [("y", PAIR)]))


@pytest.mark.parametrize("device", DEVICES)
def test_a_recording_runs_the_same_launches_on_what_their_operands_hold_then(device: str) -> None:
    x, y, total = (torch.zeros(4, device=device) for _ in range(3))
    launches = [partial(torch.neg, x, out=y), partial(total.add_, y)]
    recorder = recorder_for(device)
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

    recording = recorder_for("cpu").record([int, int, fail, int])
    with pytest.raises(IndexError):
        recording.replay()
    assert recording.begun == 3
