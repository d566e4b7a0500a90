"""Replays that draw for torch's default generator, on streams and in threads that do not wait for one another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import dropout

from pipeline.runtime import CompiledProgram, RecordingDevice, compile_graph
from pipeline.runtime.graph_draws import RECORDING, DrawingGraph, follow
from pipeline.runtime.recording_memory import DeviceGenerator
from tests.pipeline.runtime.capture.test_recording_device import FEED, mixed_graph
from tests.support.torch_programs import feed_of, graph_of

ONES = torch.ones(64)
WAIT_S = 20


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice(2**20)


def dropping(device: RecordingDevice) -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
    graph = graph_of(torch.nn.Dropout(0.5).train(), [ONES])
    return compile_graph(graph, device=device), feed_of(graph, [ONES])


def drawn(program: CompiledProgram, feed: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(iter(program.replay(feed).values()))


def test_replays_on_two_streams_draw_in_turn_what_eager_torch_draws(device: RecordingDevice) -> None:
    """Nobody orders the streams: each graph has a seed and an offset of its own on the device."""
    (first, feed), (second, _), plain = dropping(device), dropping(device), compile_graph(mixed_graph(), device=device)
    for program in (first, second):
        program.capture(feed)
    plain.capture(FEED)
    torch.manual_seed(5)
    found = []
    for stream, program in ((1, first), (2, second), (1, first)):
        with device.on_stream(stream):
            found.append(drawn(program, feed))
        with device.on_stream(3):
            plain.replay(FEED)
    rest = torch.rand(3)
    torch.manual_seed(5)
    for one in found:
        assert torch.equal(one, dropout(ONES, 0.5))
    assert torch.equal(rest, torch.rand(3))


def test_a_seed_that_comes_while_a_graph_is_recorded_is_that_of_the_default_generator(device: RecordingDevice) -> None:
    """Another generator stands there meanwhile, and takes the seed; without one nothing is drawn."""
    torch.manual_seed(5)
    device.record([int], device.new_pool(), ())
    before = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(before, torch.rand(3))
    torch.manual_seed(5)
    device.record([lambda: torch.manual_seed(7)], device.new_pool(), ())
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


def test_a_graph_that_draws_follows_another_seed_and_goes_on_where_others_have_drawn(device: RecordingDevice) -> None:
    program, feed = dropping(device)
    program.capture(feed)
    torch.manual_seed(5)
    first = drawn(program, feed)
    torch.rand(3)
    second = drawn(program, feed)
    torch.manual_seed(6)
    third = drawn(program, feed)
    torch.manual_seed(5)
    assert torch.equal(first, dropout(ONES, 0.5))
    torch.rand(3)
    assert torch.equal(second, dropout(ONES, 0.5))
    torch.manual_seed(6)
    assert torch.equal(third, dropout(ONES, 0.5))


class SeededOnce(DeviceGenerator):
    """A generator that counts its seeds."""

    seeds = 0

    def manual_seed(self, seed: int) -> torch.Generator:
        self.seeds += 1
        return super().manual_seed(seed)


def test_a_generator_follows_another_seed_once_and_no_offset_of_one_that_it_does_not_have(
    device: RecordingDevice,
) -> None:
    """A generator of CUDA would draw other numbers with the offset alone; to give a seed costs time at each replay."""
    own, other = SeededOnce(), device.generator(7)
    with pytest.raises(RuntimeError, match="the offset is that of another seed"):
        device.generator(0).set_offset(other.get_offset())
    for _ in range(3):
        follow(own, other)
        assert torch.equal(torch.rand(3, generator=own), torch.rand(3, generator=other))
    assert (own.initial_seed(), own.seeds) == (7, 1)


def test_a_replay_that_draws_waits_for_a_thread_that_records(device: RecordingDevice) -> None:
    """The generator of that record stands for the default one meanwhile."""
    graph = DrawingGraph(lambda: None, device.generator(0), device.generator(1))
    with ThreadPoolExecutor(1) as pool, recording_elsewhere():
        late = pool.submit(graph.replay)
        with pytest.raises(TimeoutError):
            late.result(0.1)
    late.result(WAIT_S)


@contextmanager
def recording_elsewhere() -> Iterator[None]:
    """Another thread holds the turn of records."""
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with RECORDING:
            is_held.set()
            is_over.wait(WAIT_S)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        assert is_held.wait(WAIT_S)
        try:
            yield
        finally:
            is_over.set()
            held.result(WAIT_S)


def test_graphs_that_know_one_generator_race_on_two_streams(device: RecordingDevice) -> None:
    """As torch's graphs do, whose replays write the seed and the offset: the rule of the recording device itself."""
    xs = [device.copy_in(torch.ones(3)) for _ in range(2)]
    graphs = []
    for x in xs:
        with device.capture_into(device.new_pool(), ()) as graph:
            x.add_(1)
        graphs.append(graph)
    with device.on_stream(1):
        graphs[0].replay()
    with device.on_stream(2), pytest.raises(RuntimeError, match="streams race"):
        graphs[1].replay()
