"""Jobs over processes: each way in which a job may end, and what becomes of the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.jobs import Job, JobStatus, LocalProcesses, Outcome
from tests.pipeline.jobs import sample_jobs as functions
from tests.support.processes import still_running


def outcomes(*jobs: Job, count: int = 2, attempts: int = 3) -> dict[str, Outcome]:
    found = list(LocalProcesses(count, attempts).run(jobs))
    assert sorted(one.key for one in found) == sorted(job.key for job in jobs)
    return {one.key: one for one in found}


def test_every_end_of_a_job(tmp_path: Path) -> None:
    found = outcomes(
        Job("double", functions.double, {"number": 21}),
        Job("mistake", functions.mistake),
        Job("bug", functions.bug),
        Job("unspeakable", functions.unspeakable),
        Job("dies once", functions.die_at_first, {"file": str(tmp_path / "once")}),
        Job("dies always", functions.abort),
        Job("last", functions.double, {"number": 4}),
    )
    assert {key: (one.status, one.value, one.exit_code, one.attempts) for key, one in found.items()} == {
        "double": (JobStatus.DONE, 42, 0, 1),
        "mistake": (JobStatus.FAILED, None, 2, 1),
        "bug": (JobStatus.FAILED, None, 3, 1),
        "unspeakable": (JobStatus.FAILED, None, 3, 1),
        "dies once": (JobStatus.DONE, "alive", 0, 2),
        "dies always": (JobStatus.LOST, None, 3, 3),
        "last": (JobStatus.DONE, 8, 0, 1),
    }
    assert (found["mistake"].why, found["mistake"].trace) == ("this is wrong; do that", "")
    assert found["bug"].why == "ZeroDivisionError: one by nothing"
    assert "sample_jobs.py" in found["bug"].trace
    assert "returned what JSON cannot hold" in found["unspeakable"].why
    assert "died (signal SIGABRT)" in found["dies always"].why


def test_a_process_is_kept_for_the_next_job() -> None:
    found = outcomes(*(Job(str(number), functions.process) for number in range(4)), count=1)
    assert len({one.value for one in found.values()}) == 1


def test_processes_work_at_once_and_share_the_cores() -> None:
    ours = sorted(os.sched_getaffinity(0))
    found = outcomes(*(Job(str(number), functions.cores, {"seconds": 0.5}) for number in range(2)), count=2)
    assert len({one.where for one in found.values()}) == 2
    assert sorted(core for one in found.values() for core in one.value) == ours if len(ours) > 1 else ours * 2


def test_by_default_one_process_for_two_cores() -> None:
    assert LocalProcesses().count == max(1, len(os.sched_getaffinity(0)) // 2)


def test_no_jobs() -> None:
    assert outcomes() == {}


def test_processes_end_when_nobody_waits_any_more() -> None:
    jobs = [Job("quick", functions.process), Job("slow", functions.process, {"seconds": 60})]
    running = LocalProcesses(2).run(jobs)
    quick = next(running)
    running.close()  # type: ignore[attr-defined]
    assert not still_running([quick.value])
    with pytest.raises(StopIteration):
        next(running)


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored by what it starts in the background
from pipeline.jobs import Job, LocalProcesses
from tests.pipeline.jobs.sample_jobs import process
jobs = [Job("quick", process), Job("slow", process, {"seconds": 60})]
for outcome in LocalProcesses(1).run(jobs):
    print(outcome.value, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_processes_end_with_their_parent(number: signal.Signals, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(number)
        assert parent.wait(10) != 0
    assert not still_running([child])
