"""One table: what is done is not done again, whatever ended the run before."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import UsageError
from pipeline.jobs import Job, JobProgress, JobStatus, LocalProcesses, Outcome, run_jobs
from pipeline.jobs.run import OutcomeTable
from tests.pipeline.jobs import sample_jobs as functions
from tests.pipeline.jobs.sample_jobs import count_calls, double


def jobs_that_count(folder: Path, *names: str, seconds: float = 0.0) -> list[Job]:
    folder.mkdir(exist_ok=True)
    return [
        Job(name, functions.count_calls, {"folder": str(folder), "name": name, "seconds": seconds}) for name in names
    ]


def calls(folder: Path) -> dict[str, int]:
    return {path.name: len(path.read_text()) for path in sorted(folder.iterdir())}


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    jobs = jobs_that_count(tmp_path / "calls", "a", "b", "c")
    told: list[JobProgress] = []
    first = run_jobs(jobs[:2], LocalProcesses(2), tmp_path / "table.jsonl", {}, told.append)
    again = run_jobs(jobs, LocalProcesses(2), tmp_path / "table.jsonl", {}, told.append)
    assert calls(tmp_path / "calls") == {"a": 1, "b": 1, "c": 1}
    assert again[:2] == first
    assert [one.value for one in again] == ["a", "b", "c"]
    assert [(one.done, one.total, one.known) for one in told] == [
        (1, 2, False),
        (2, 2, False),
        (1, 3, True),
        (2, 3, True),
        (3, 3, False),
    ]


def test_what_changed_is_done_again(tmp_path: Path) -> None:
    table = tmp_path / "table.jsonl"

    def attempt(number: int, versions: dict[str, str]) -> tuple[Outcome, list[bool]]:
        told: list[JobProgress] = []
        job = Job("one", functions.double, {"number": number})
        (found,) = run_jobs([job], LocalProcesses(1), table, versions, told.append)
        return found, [one.known for one in told]

    first, _ = attempt(1, {"onnx": "1"})
    assert attempt(1, {"onnx": "1"}) == (first, [True])
    assert attempt(2, {"onnx": "1"})[0].value == 4
    assert attempt(2, {"onnx": "2"})[1] == [False]
    assert attempt(1, {"onnx": "1"}) == (first, [True])


def test_what_was_made_and_is_gone_is_done_again(tmp_path: Path) -> None:
    jobs = jobs_that_count(tmp_path / "calls", "a", "b")
    table = tmp_path / "table.jsonl"
    run_jobs(jobs, LocalProcesses(1), table, {})
    run_jobs(jobs, LocalProcesses(1), table, {}, is_current=lambda known: known.key != "b")
    assert calls(tmp_path / "calls") == {"a": 1, "b": 2}


def test_what_went_wrong_is_done_again(tmp_path: Path) -> None:
    file = tmp_path / "deaths"
    jobs = [Job("dies", functions.die_at_first, {"file": str(file), "times": 2}), Job("wrong", functions.mistake)]
    table = tmp_path / "table.jsonl"
    first = run_jobs(jobs, LocalProcesses(1, attempts=2), table, {})
    assert [one.status for one in first] == [JobStatus.LOST, JobStatus.FAILED]
    again = run_jobs(jobs, LocalProcesses(1, attempts=2), table, {})
    assert [(one.status, one.attempts) for one in again] == [(JobStatus.DONE, 1), (JobStatus.FAILED, 1)]


KILLED = """
import sys
from pathlib import Path
from pipeline.jobs import LocalProcesses, run_jobs
from tests.pipeline.jobs.test_run import jobs_that_count
jobs = jobs_that_count(Path(sys.argv[1], "calls"), *"abcdef", seconds=0.3)
run_jobs(jobs, LocalProcesses(1), Path(sys.argv[1], "table.jsonl"), {}, lambda one: print(one.outcome.key, flush=True))
"""


def test_a_run_that_was_killed_is_taken_up_again(tmp_path: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=environment, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        ended = [parent.stdout.readline().decode().strip() for _ in range(2)]
        time.sleep(0.1)  # into the third
        parent.send_signal(signal.SIGKILL)
    time.sleep(0.4)  # the third would end now, if it still ran
    assert calls(tmp_path / "calls") == {"a": 1, "b": 1}
    assert ended == ["a", "b"]
    known: list[str] = []
    jobs = jobs_that_count(tmp_path / "calls", *"abcdef", seconds=0.3)
    found = run_jobs(
        jobs, LocalProcesses(1), tmp_path / "table.jsonl", {}, lambda one: known.extend(one.outcome.key * one.known)
    )
    assert known == ["a", "b"]
    assert [one.value for one in found] == list("abcdef")
    assert calls(tmp_path / "calls") == dict.fromkeys("abcdef", 1)


def test_two_at_once_cannot_write_one_table(tmp_path: Path) -> None:
    with (
        OutcomeTable(tmp_path / "table.jsonl", {}).open(),
        pytest.raises(UsageError, match=r"another onnxline writes to .*table\.jsonl"),
    ):
        run_jobs([Job("a", functions.bug)], LocalProcesses(1), tmp_path / "table.jsonl", {})


def test_keys_are_distinct(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="these have one together: a"):
        run_jobs([Job("a", functions.bug), Job("a", functions.bug)], LocalProcesses(1), tmp_path / "t", {})


# Jobs that come after others.


def test_a_job_begins_when_those_before_it_have_ended(tmp_path: Path) -> None:
    slow, quick, last = jobs_that_count(tmp_path / "calls", "slow", "quick", "last")
    jobs = [replace(slow, arguments={**slow.arguments, "seconds": 0.5}), replace(last, after=["slow"]), quick]
    told: list[str] = []
    run_jobs(jobs, LocalProcesses(2), tmp_path / "table.jsonl", {}, lambda one: told.append(one.outcome.key))
    assert told.index("slow") < told.index("last")


def test_a_job_after_one_that_went_wrong(tmp_path: Path) -> None:
    """It runs after a failure, which it may tell; but what ends a process would end it, too."""
    first, second, third = jobs_that_count(tmp_path / "calls", "first", "second", "third")
    jobs = [Job("wrong", functions.mistake), replace(first, after=["wrong"])]
    jobs += [Job("dies", functions.abort), replace(second, after=["dies"]), replace(third, after=["second", "wrong"])]
    found = {one.key: one for one in run_jobs(jobs, LocalProcesses(2, attempts=1), tmp_path / "table.jsonl", {})}
    assert calls(tmp_path / "calls") == {"first": 1}
    assert [found[name].status for name in ("second", "third")] == [JobStatus.LOST, JobStatus.LOST]
    assert found["second"].why.startswith("it was not begun, since dies was lost: ") and found["second"].attempts == 0


def test_a_job_that_serves_another_runs_for_that_one_only(tmp_path: Path) -> None:
    first, last = jobs_that_count(tmp_path / "calls", "first", "last")
    jobs, table = [first, replace(last, after=["first"])], tmp_path / "table.jsonl"
    assert [one.key for one in run_jobs([last], LocalProcesses(1), table, {})] == ["last"]
    assert [one.key for one in run_jobs(jobs, LocalProcesses(1), table, {})] == ["last"]
    again = run_jobs(jobs, LocalProcesses(1), table, {}, is_current=lambda known: known.key != "last")
    assert [one.key for one in again] == ["first", "last"]
    assert calls(tmp_path / "calls") == {"first": 1, "last": 2}


def test_a_job_comes_after_those_before_it(tmp_path: Path) -> None:
    first, last = jobs_that_count(tmp_path / "calls", "first", "last")
    with pytest.raises(UsageError, match="the job last comes after first, expected jobs before it"):
        run_jobs([replace(last, after=["first"]), first], LocalProcesses(1), tmp_path / "table.jsonl", {})


# The table, after any history of writers that were killed in the middle of a line.

JOBS = st.builds(
    Job,
    key=st.text('ab\n"é✓\ud800', max_size=3).filter(lambda text: "\ud800" not in text),
    function=st.sampled_from([double, count_calls]),
    arguments=st.dictionaries(
        st.text(max_size=2), st.integers() | st.none() | st.lists(st.text(max_size=2)), max_size=2
    ),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
WRITES = st.tuples(JOBS, VALUES, st.sampled_from(JobStatus), st.text(), st.integers(1, 3))
SESSIONS = st.lists(st.tuples(st.lists(WRITES, max_size=4), st.integers(0, 60)), max_size=4)


def key_of(job: Job) -> str:
    return repr((job.key, job.address, sorted(job.arguments.items())))


@settings(max_examples=60)
@given(SESSIONS)
def test_the_last_whole_line_counts(sessions: list) -> None:
    """Each session writes lines, and its last one is cut short by some bytes."""
    expected: dict[str, tuple[Job, Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.jsonl")
        for writes, cut in sessions:
            with OutcomeTable(path, {"onnx": "1"}).open() as table:
                sizes = [path.stat().st_size]
                for job, value, state, why, attempts in writes:
                    table.add(job, Outcome(job.key, state, value, why, attempts=attempts))
                    sizes.append(path.stat().st_size)
            left = max(sizes[-1] - cut, sizes[-2] if len(sizes) > 1 else sizes[-1])
            with path.open("r+b") as file:
                file.truncate(left)
            for (job, value, state, why, attempts), end in zip(writes, sizes[1:], strict=True):
                if end - 1 <= left:  # a line that lacks only its end is whole
                    expected[key_of(job)] = job, Outcome(job.key, state, value, why, attempts=attempts)
        with OutcomeTable(path, {"onnx": "1"}).open() as table:
            for job, outcome in expected.values():
                assert table.find(job) == (outcome if outcome.status is JobStatus.DONE else None)
        with OutcomeTable(path, {"onnx": "2"}).open() as table:
            assert not any(table.find(job) for job, _ in expected.values())


def test_a_line_of_somebody_else_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    path.write_bytes(
        b'[1]\n{"digest": 1}\n\xff\xfe\nnull\n{"digest": "x", "key": "a", "status": "eaten"}\n\n' + b"[" * 99999
    )
    with OutcomeTable(path, {}).open() as table:
        table.add(Job("a", double), Outcome("a", JobStatus.DONE))
    with OutcomeTable(path, {}).open() as table:
        assert table.find(Job("a", double)) == Outcome("a", JobStatus.DONE)
