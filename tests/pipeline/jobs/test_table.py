"""The table, after any history of writers that were killed in the middle of a line."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.jobs import Job, JobStatus, Outcome
from pipeline.jobs.run import OutcomeTable
from tests.pipeline.jobs.sample_jobs import count_calls, double

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
