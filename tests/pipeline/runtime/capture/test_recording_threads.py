"""Threads record graphs and wait for the device at the same time: on CUDA a wait fails, and breaks the record."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from pipeline.runtime import RecordingDevice, compile_graph
from pipeline.runtime.devices import GraphFailure
from tests.pipeline.runtime.capture.test_recording_device import FEED, mixed_graph, on

WAIT_S = 20.0
"""Seconds after which a thread that should have gone on has not."""


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice(2**22)


def wait_within_a_record(device: RecordingDevice, seconds: float) -> tuple[GraphFailure | None, bool]:
    """What becomes of a graph while which is recorded another thread waits, and whether that was done by then."""
    x, inside, done = on(device, 3), threading.Event(), threading.Event()

    def wait() -> None:
        inside.wait(WAIT_S)
        try:
            device.synchronize()
        finally:
            done.set()

    def stand() -> bool:
        inside.set()
        return done.wait(seconds)

    was_done: list[bool] = []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        try:
            device.record([lambda: was_done.append(stand()), partial(x.add_, 1)], device.new_pool(), ())
        except GraphFailure as failure:
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                waiting.result(WAIT_S)
            return failure, was_done[0]
        waiting.result(WAIT_S)
    return None, was_done[0]


def test_a_thread_waits_for_the_device_when_no_other_one_records(device: RecordingDevice) -> None:
    before = device.synchronizations
    assert wait_within_a_record(device, 0.2) == (None, False)
    assert device.synchronizations == before + 2, "one before the record, and the other thread's after it"


def test_without_the_lock_a_wait_breaks_the_record(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.runtime.devices.RECORDING", nullcontext())
    failure, was_done = wait_within_a_record(device, WAIT_S)
    assert was_done
    assert "another thread waited for the device" in str(failure)


def test_threads_capture_and_replay_one_program_at_the_same_time(device: RecordingDevice) -> None:
    """Each thread has captures of its own, on a stream of its own; they are recorded one after the other."""
    program = compile_graph(mixed_graph(), device=device)
    expected = program.run(FEED)["y"]
    begin = threading.Barrier(4)

    def replay(thread: int) -> list[torch.Tensor]:
        begin.wait(WAIT_S)
        with device.on_stream(thread + 1):
            found = [program.replay(FEED)["y"] for _ in range(3)]
            program.synchronize()
            program.drop_captures()
            return [*found, program.replay(FEED)["y"]]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(replay, range(4)):
            assert all(torch.equal(part, expected) for part in found)


def test_captures_that_fail_in_two_threads_leave_the_device_as_it_was(device: RecordingDevice) -> None:
    """Each failure names its own launch; afterwards a graph is recorded, and nothing is kept."""
    x = on(device, 3)
    begin = threading.Barrier(2)
    gc.collect()
    before = device.memory.used

    def fail(at: int) -> int:
        own = on(device, 3)
        launches = [partial(own.add_, 1) for _ in range(at)]
        begin.wait(WAIT_S)
        with pytest.raises(GraphFailure, match="reads the host") as failure:
            device.record([*launches, lambda: (own * 2).sum().item()], device.new_pool(), ())
        assert own.tolist() == [1, 1, 1]
        return failure.value.at

    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(fail, (1, 4))) == [1, 4]
    gc.collect()
    assert device.memory.used == before
    graph = device.record([partial(x.add_, 1)], device.new_pool(), ())
    graph.replay()
    assert x.tolist() == [2, 2, 2]


def test_what_another_thread_computes_meanwhile_is_not_recorded(device: RecordingDevice) -> None:
    """Nor taken back: only what was recorded changes nothing."""
    mine, other = on(device, 3), on(device, 3)

    def compute() -> None:
        with device.on_stream(1), device.scope():
            other.add_(1)

    with ThreadPoolExecutor(1) as pool:
        graph = device.record(
            [partial(mine.add_, 1), lambda: pool.submit(compute).result(WAIT_S)], device.new_pool(), ()
        )
    assert (mine.tolist(), other.tolist()) == ([1, 1, 1], [2, 2, 2])
    graph.replay()
    assert (mine.tolist(), other.tolist()) == ([2, 2, 2], [2, 2, 2])


def test_what_another_thread_has_in_place_of_freed_memory_is_not_taken_back(device: RecordingDevice) -> None:
    held, other = [on(device, 3)], list[torch.Tensor]()

    def give_away() -> None:
        place = held.pop().data_ptr()
        other.append(pool.submit(device.copy_in, torch.full((3,), 7.0)).result(WAIT_S))
        assert other[0].data_ptr() == place

    with ThreadPoolExecutor(1) as pool:
        device.record([lambda: held[0].add_(1), give_away], device.new_pool(), ())
    assert other[0].tolist() == [7, 7, 7]
