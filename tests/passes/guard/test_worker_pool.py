"""Workers that are handed out: to one call at a time, and never with another memory limit than the call's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from passes.context import PassContext
from passes.errors import StepCrashed
from passes.guard.handle_call import WorkerPool
from tests.support import worker_faults as faults


@pytest.fixture
def benches() -> Iterator[WorkerPool]:
    made = WorkerPool()
    yield made
    made.close()


def process(bench: PassContext) -> int:
    return bench.worker.call(os.getpid)


def test_an_idle_worker_is_handed_out_again_and_only_with_its_own_limit(benches: WorkerPool) -> None:
    with benches.take(60.0) as bench:
        first = process(bench)
    with benches.take(60.0, 1.0) as bench:
        limited = process(bench)
        assert {bench.worker.memory_bytes, bench.proofs.memory_bytes} == {2**30}
    with benches.take(60.0) as bench:
        assert process(bench) == first != limited
    with benches.take(60.0, 1.0) as bench:
        assert process(bench) == limited


def test_a_call_that_asks_for_too_much_memory_costs_that_call(benches: WorkerPool) -> None:
    with benches.take(60.0) as bench:
        assert bench.worker.memory_bytes > 0, "there is a limit unless one asks for none"
    with benches.take(60.0, 1.0) as bench, pytest.raises(StepCrashed, match=r"the limit of 1\.0 GiB"):
        bench.worker.call(faults.allocate, bytes_wanted=2**31)
