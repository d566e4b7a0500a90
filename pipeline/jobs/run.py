"""Run jobs with an executor, and record their outcomes in a table. Jobs that are done are not repeated."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any, Self

from pydantic import TypeAdapter, ValidationError

from passes.worker.platforms import lock
from pipeline.argument_checks import COUNT, FUNCTION, PATH, TEXT, Check, a_mapping, expects, several
from pipeline.errors import UsageError
from pipeline.jobs.job import Job, JobExecutor, JobStatus, LocalProcesses, Outcome
from pipeline.workspace import disk_errors, key_of, make_folder


@dataclass(frozen=True, slots=True)
class JobProgress:
    """A job that has ended, as number `done` of `total`; `known` if an earlier run did it."""

    outcome: Outcome
    """The outcome of the job."""
    done: int
    total: int
    known: bool


@expects(
    jobs=several(Job, "a list of Jobs"),
    executor=Check(lambda item: callable(getattr(item, "run", None)), "an executor, such as LocalProcesses()"),
    path=PATH,
    versions=a_mapping("a mapping of names to versions, such as {'onnx': '1.19.0'}"),
    observer=FUNCTION,
    is_current=FUNCTION,
)
def run_jobs(
    jobs: Sequence[Job],
    executor: JobExecutor,
    path: str | PathLike[str],
    versions: Mapping[str, str],
    observer: Callable[[JobProgress], None] = lambda _: None,
    is_current: Callable[[Outcome], bool] = lambda _: True,
) -> tuple[Outcome, ...]:
    """Run the jobs that the table at `path` does not have as done, and add each outcome to it.

    A job that other jobs come after does not run if all of them are done; then it may have no outcome.

    Args:
        jobs: jobs with different keys; a job stands after the jobs that it comes after.
        executor: runs them. It is not called if there is nothing to do.
        path: of the table; see `OutcomeTable`.
        versions: of everything that affects the outcome of a job, such as `pipeline.workspace.versions()`.
        observer: called with each job that has ended, first with those of earlier runs.
        is_current: whether the outcome of an earlier run is still valid; if not, for example because its files were
            removed, the job runs again.

    Returns:
        The outcomes, in the order of the jobs.

    Raises:
        UsageError: two jobs have the same key, one comes after a job that is not before it, the table cannot be
            written, or another process writes to it; or an argument is of another type.
    """
    _check_keys(jobs)
    by_key = {job.key: job for job in jobs}
    with OutcomeTable(Path(path), versions).open() as table:
        outcomes = {job.key: known for job in jobs if (known := table.find(job)) is not None and is_current(known)}
        missing = _find_missing(jobs, outcomes)
        total = len(outcomes) + len(missing)
        for done, outcome in enumerate(outcomes.values(), 1):
            observer(JobProgress(outcome, done, total, known=True))
        running: Any = executor.run(missing) if missing else (outcome for outcome in ())
        with closing(running):  # stops the running jobs, also after Ctrl-C
            for outcome in running:
                table.add(by_key[outcome.key], outcome)
                outcomes[outcome.key] = outcome
                observer(JobProgress(outcome, len(outcomes), total, known=False))
    return tuple(outcomes[job.key] for job in jobs if job.key in outcomes)


def _find_missing(jobs: Sequence[Job], known: Collection[str]) -> list[Job]:
    """The jobs that have to run, in their order."""
    serving = {key for job in jobs for key in job.after}
    missing: list[Job] = []
    for job in reversed(jobs):
        is_wanted = job.key not in serving or any(job.key in later.after for later in missing)
        if is_wanted and job.key not in known:
            missing.append(job)
    return missing[::-1]


def _check_keys(jobs: Sequence[Job]) -> None:
    double = [key for key, count in Counter(job.key for job in jobs).items() if count > 1]
    if double:
        raise UsageError(f"jobs need a key each, and these have one together: {', '.join(double)}")
    before = set[str]()
    for job in jobs:
        if not before.issuperset(job.after):
            raise UsageError(f"the job {job.key} comes after {', '.join(job.after)}, expected jobs before it")
        before.add(job.key)


class OutcomeTable:
    """Outcomes of jobs in an append-only file.

    A line counts for a job if it has the job's key, and the digest of its function's name, its arguments and the
    versions: a changed job is a new one. Of several lines the last counts. Incomplete lines are ignored: a writer may
    have been killed.

    Args:
        path: of the file; created, with its folder, when it is opened.
        versions: everything besides the arguments that affects the outcome of a job.
    """

    def __init__(self, path: Path, versions: Mapping[str, str]) -> None:
        self.path = path
        self._versions = dict(versions)
        self._known: dict[tuple[str, str], Outcome] = {}
        self._file: IO[bytes] | None = None

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Read the known outcomes, and keep the file open for more.

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
        """The outcome of exactly this job; None if it is not known, or the job was not done."""
        outcome = self._known.get((job.key, self._digest(job)))
        return outcome if outcome is not None and outcome.status is JobStatus.DONE else None

    def add(self, job: Job, outcome: Outcome) -> None:
        """Write a line, and flush it."""
        if self._file is None:
            raise ValueError("the table is not open")
        digest = self._digest(job)
        line = json.dumps({"digest": digest, **dataclasses.asdict(outcome)})
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        self._known[job.key, digest] = outcome

    def _digest(self, job: Job) -> str:
        return key_of(job.address, job.arguments, self._versions)[:DIGITS]


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        lock(file.fileno(), wait=False)  # the system releases it with the process
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


@expects(ray=TEXT.or_none(), processes=COUNT.or_none())
def choose_executor(ray: str | None = None, processes: int | None = None) -> JobExecutor:
    """An executor on a Ray cluster if its address is given; else on processes of this machine.

    Args:
        ray: the address of the cluster.
        processes: how many jobs run at the same time.

    Raises:
        UsageError: both are given, ray is not installed, or an argument is of another type.
    """
    if ray is None:
        return LocalProcesses(processes)
    if processes is not None:
        raise UsageError("found --jobs with --ray, where each node says how many jobs it takes; leave one of them out")
    from pipeline.jobs.on_ray import RayCluster  # ray is an extra, and takes seconds to import

    return RayCluster(ray)
