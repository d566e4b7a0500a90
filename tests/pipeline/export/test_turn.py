"""Threads that trace modules at once."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from pipeline.export.call_watch import capture_output
from pipeline.torch_ir import extract_ir
from pipeline.training import record_step


def _stack(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(layers)))


def test_threads_extract_and_record_at_once() -> None:
    """Torch's tracers failed: `ProxyTorchDispatchMode slot already occupied`, `Trying to pop empty mode stack`."""

    modules = {layers: _stack(layers) for layers in (2, 3, 4)}

    def trace(layers: int) -> int:
        module = modules[layers]
        batch = torch.ones(2, 4), torch.ones(2, 4)
        record_step(module, nn.functional.mse_loss, torch.optim.SGD(module.parameters(), lr=0.1), batch)
        return len(extract_ir(module, (batch[0],), strict=False).nodes)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(trace, modules)) == [4, 6, 8]


def test_streams_come_back_after_threads_that_collect_output() -> None:
    """The first of two blocks that overlap put the stream back, then the second put the first's, and all later output
    of the process was lost."""
    before, inside = sys.stdout, threading.Event()

    def collect(seconds: float) -> None:
        with capture_output():
            inside.set()
            time.sleep(seconds)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(collect, 0.1)
        inside.wait(10)
        pool.submit(collect, 0.3)
    lost, sys.stdout = sys.stdout is not before, before
    assert not lost
