"""Threads replay one program at the same time, and none waits for another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from pipeline.runtime import compile_graph
from pipeline.runtime.capture.recorders import CallLoop
from tests.pipeline.runtime.capture.capture_programs import negate, train_graph
from tests.support.torch_programs import compile_module


@pytest.mark.parametrize("replays", [1_000, 10_000])
def test_eight_threads_replay_many_times_without_a_difference(replays: int) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).eval()
    program, feed = compile_module(module, [torch.randn(2, 4)])
    ((name, _),) = feed.items()
    inputs = [torch.randn(2, 4) for _ in range(8)]
    wanted = [next(iter(program.run({name: x}).values())) for x in inputs]

    def differences(thread: int) -> int:
        """Each thread goes through all inputs, from another one on."""
        return sum(
            not torch.equal(
                next(iter(program.replay({name: inputs[at % 8]}, copy=at % 2 == 0).values())), wanted[at % 8]
            )
            for at in range(thread, thread + replays)
        )

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(differences, range(8))) == [0] * 8


def test_a_replay_waits_for_no_other_replay() -> None:
    """One thread stands in the middle of a replay until another one has finished a replay of the same program."""
    inside, done = threading.Event(), threading.Event()
    program = negate()

    def stand() -> list[float]:
        capture = program.capture({"x": torch.ones(2)})
        capture._parts = (CallLoop([inside.set, partial(done.wait, 20)]), *capture._parts)
        return program.replay({"x": torch.ones(2)})["y"].tolist()

    with ThreadPoolExecutor(1) as pool:
        standing = pool.submit(stand)
        assert inside.wait(20)
        assert program.replay({"x": torch.zeros(2)})["y"].tolist() == [0, 0]
        assert not standing.done()
        done.set()
        assert standing.result(20) == [-1, -1]


def test_threads_take_turns_on_one_sequence_of_states() -> None:
    program = compile_graph(train_graph())
    program.capture({"x": torch.ones(2)}, mode="train")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: program.replay({"x": torch.ones(2)}), range(400)))
    assert program.states()["step"].item() == 400
    other = program.new_context()
    assert other.states.values()["step"].item() == 0
