"""CUDA destroys no graph for a thread that records another one, and Python collects garbage whenever it likes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from pipeline.runtime.devices import GraphFailure
from pipeline.runtime.recording import RecordingDevice
from tests.pipeline.runtime.capture.test_recording_device import on


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice(2**12)


def test_no_graph_may_go_while_another_one_is_recorded(device: RecordingDevice) -> None:
    x = on(device, 3)
    kept = [device.record([partial(x.add_, 1)], device.new_pool(), ())]
    with pytest.raises(GraphFailure, match="a graph was destroyed"):
        device.record([partial(x.add_, 1), kept.clear], device.new_pool(), ())


def test_garbage_waits_until_a_record_is_done(device: RecordingDevice) -> None:
    x = on(device, 3)
    with collected_often():
        garbage: list[object] = [device.record([partial(x.add_, 1)], device.new_pool(), ())]
        garbage.append(garbage)
        graph = weakref.ref(garbage[0])
        del garbage
        is_there: list[bool] = []
        look = [make_objects, lambda: is_there.append(graph() is not None)]
        device.record([partial(x.add_, 1), *look], device.new_pool(), ())
        make_objects()
    assert is_there == [True]
    assert graph() is None


@contextmanager
def collected_often() -> Iterator[None]:
    """Objects from before are left out, so that the next ones are looked at soon."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(5000, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def make_objects() -> None:
    made: list[object] = []
    made += [[made] for _ in range(50_000)]
