"""Workers that are handed out: to one call at a time, and never with another memory limit than the call's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from passes.context import PassContext
from passes.errors import StepCrashed
from passes.guard.registry import WorkerPool
from tests.support import worker_faults as faults


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool()
    yield made
    made.close()


def process(context: PassContext) -> int:
    return context.worker.call(os.getpid)


def test_an_idle_worker_is_handed_out_again_and_only_with_its_own_limit(pool: WorkerPool) -> None:
    with pool.take(60.0) as context:
        first = process(context)
    with pool.take(60.0, 1.0) as context:
        limited = process(context)
        assert {context.worker.memory_bytes, context.proofs.memory_bytes} == {2**30}
    with pool.take(60.0) as context:
        assert process(context) == first != limited
    with pool.take(60.0, 1.0) as context:
        assert process(context) == limited


def test_a_call_that_asks_for_too_much_memory_costs_that_call(pool: WorkerPool) -> None:
    with pool.take(60.0) as context:
        assert context.worker.memory_bytes > 0, "there is a limit unless one asks for none"
    with pool.take(60.0, 1.0) as context, pytest.raises(StepCrashed, match=r"the limit of 1 GiB"):
        context.worker.call(faults.allocate, bytes_wanted=2**31)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, as other threads run here
def test_a_forked_process_starts_workers_of_its_own(pool: WorkerPool) -> None:
    with pool.take(60.0) as context:
        own = process(context)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            with pool.take(60.0) as context:
                os.write(writer, f"{process(context)}".encode())
            pool.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reader, 99)) != own
    os.close(reader)
    os.close(writer)
    with pool.take(60.0) as context:
        assert process(context) == own
