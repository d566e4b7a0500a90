"""Jobs, somebody who does them, and a table: what is done already is not done again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

from pydantic import TypeAdapter, ValidationError

from passes.worker.platforms import lock
from pipeline.errors import UsageError
from pipeline.jobs.job import Job, JobExecutor, JobStatus, Outcome
from pipeline.jobs.local import LocalProcesses
from pipeline.workspace import disk_errors, key_of, make_folder

__all__ = ["JobProgress", "OutcomeTable", "choose_executor", "run_jobs"]


@dataclass(frozen=True, slots=True)
class JobProgress:
    """A job has ended, as the `done`-th of `total`; `known` if that was in an earlier run."""

    outcome: Outcome
    done: int
    total: int
    known: bool


def run_jobs(
    jobs: Sequence[Job],
    spread: JobExecutor,
    path: Path,
    versions: Mapping[str, str],
    observer: Callable[[JobProgress], None] = lambda _: None,
    stands: Callable[[Outcome], bool] = lambda _: True,
) -> tuple[Outcome, ...]:
    """Do what the table at `path` does not know as done, and write it there as it ends.

    Args:
        jobs: each with a key of its own.
        spread: who does them. It is not called if there is nothing to do.
        path: of the table; see `pipeline.jobs.run`.
        versions: of everything that decides what comes of a job, such as `pipeline.versions.versions()`.
        observer: is told of each job that has ended: first of those that were known.
        stands: whether what came of a job in an earlier run still holds; if files that it made were removed, say, it
            does not, and the job is done again.

    Returns:
        The outcome of each job, in the order of the jobs.

    Raises:
        ValueError: two jobs have the same key.
        UsageError: the table cannot be written, or another process writes to it.
    """
    _refuse_doubles(jobs)
    by_key = {job.key: job for job in jobs}
    with OutcomeTable(path, versions).open() as table:
        found = {job.key: known for job in jobs if (known := table.find(job)) is not None and stands(known)}
        for done, outcome in enumerate(found.values(), 1):
            observer(JobProgress(outcome, done, len(jobs), known=True))
        missing = [job for job in jobs if job.key not in found]
        with _outcomes(spread, missing) as outcomes:
            for outcome in outcomes:
                table.add(by_key[outcome.key], outcome)
                found[outcome.key] = outcome
                observer(JobProgress(outcome, len(found), len(jobs), known=False))
    return tuple(found[job.key] for job in jobs)


@contextmanager
def _outcomes(spread: JobExecutor, jobs: Sequence[Job]) -> Iterator[Iterator[Outcome]]:
    """What still runs is stopped at the end, also after Ctrl-C in our own code."""
    if not jobs:
        yield iter(())
        return
    with closing(cast(Any, spread.run(jobs))) as outcomes:
        yield outcomes


def _refuse_doubles(jobs: Sequence[Job]) -> None:
    double = [key for key, count in Counter(job.key for job in jobs).items() if count > 1]
    if double:
        raise ValueError(f"jobs need a key each, and these have one together: {', '.join(double)}")


class OutcomeTable:
    """Outcomes in a file to which lines are only ever added.

    A line counts for a job if it has the job's key, and the digest of the call, its arguments and the versions: a job
    that was changed is another one. Of several lines the last counts. One that is not whole is passed over, since the
    writer may have been killed on the way.

    Args:
        path: of the file; made, with its folder, when it is opened.
        versions: everything beside the arguments that decides what comes of a job.
    """

    def __init__(self, path: Path, versions: Mapping[str, str]) -> None:
        self.path = path
        self._versions = dict(versions)
        self._known: dict[tuple[str, str], Outcome] = {}
        self._file: IO[bytes] | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[Self]:
        """Read what is known, and stand ready for more.

        Raises:
            UsageError: another process writes to the file, or it cannot be written.
        """
        with disk_errors(self.path):
            make_folder(self.path.parent)
            with self.path.open("a+b") as file:
                _lock(file, self.path)
                file.seek(0)
                text = file.read()
                self._known = dict(filter(None, map(_read, text.split(b"\n"))))
                if text and not text.endswith(b"\n"):
                    file.write(b"\n")
                self._file = file
                try:
                    yield self
                finally:
                    self._file = None

    def find(self, job: Job) -> Outcome | None:
        """What came of this very job; None if that is not known, or if it was not done."""
        found = self._known.get((job.key, self._digest(job)))
        return found if found is not None and found.status is JobStatus.DONE else None

    def add(self, job: Job, outcome: Outcome) -> None:
        """Write a line, at once."""
        if self._file is None:
            raise ValueError("the table is not open")
        digest = self._digest(job)
        line = json.dumps({"digest": digest, **dataclasses.asdict(outcome)})
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        self._known[job.key, digest] = outcome

    def _digest(self, job: Job) -> str:
        return key_of(job.call, job.arguments, self._versions)[:DIGITS]


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        lock(file.fileno(), wait=False)  # the system drops it with the process
    except BlockingIOError as error:
        raise UsageError(f"another onnxline writes to {path}; wait for it, or choose another folder") from error


def _read(line: bytes) -> tuple[tuple[str, str], Outcome] | None:
    try:
        data = json.loads(line)
        digest = data.pop("digest")
        outcome = OUTCOME.validate_python(data)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, ValidationError):
        return None
    return (outcome.key, digest), outcome


OUTCOME = TypeAdapter(Outcome)

DIGITS = 32
"""Of a digest, in hexadecimal."""


def choose_executor(ray: str | None = None, processes: int | None = None) -> JobExecutor:
    """A Ray cluster, if its address is given; else processes of this machine.

    Raises:
        UsageError: both are given, or ray is not installed.
    """
    if ray is None:
        return LocalProcesses(processes)
    if processes is not None:
        raise UsageError("--jobs is for processes of this machine; on a Ray cluster its nodes say what they can take")
    from pipeline.jobs.on_ray import RayCluster  # ray is an extra, and takes seconds to import

    return RayCluster(ray)
