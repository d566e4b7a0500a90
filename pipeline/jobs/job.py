"""A job, its outcome, the order of jobs, and the interface of executors; and an executor that runs jobs in processes of
this machine.

A process that dies costs one attempt of one job, and is replaced.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import wait
from typing import Any, Final, Protocol, cast

from passes.errors import StepCrashed, StepFailed
from passes.worker.client import Worker
from passes.worker.platforms import available_cores
from pipeline.argument_checks import COUNT, FUNCTION, NAMES, TEXT, a_mapping, expects
from pipeline.errors import InternalError, refusal_of


@dataclass(frozen=True, slots=True)
class Job:
    """A call of a function with keyword arguments, in some other process, perhaps on another machine.

    The function stands in a module that can be imported there. The arguments and the result are plain data that JSON
    can hold. `key` names the job in tables and is unique among the jobs that run together. A job may run more than
    once, if its process dies. It begins when the jobs with the keys `after` have ended, in whatever way; if one of
    these jobs was lost, this job is lost too.

    Raises:
        UsageError: an argument is of another type.
    """

    key: str
    function: Callable[..., Any]
    """The function that is called with `arguments`; the other process finds it by its module and name."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The keyword arguments, by name."""
    after: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_job(self.key, self.function, self.arguments, self.after)

    @property
    def address(self) -> str:
        """`package.module:function`."""
        return f"{self.function.__module__}:{self.function.__qualname__}"


@expects(
    "Job: ", key=TEXT, function=FUNCTION, arguments=a_mapping("a mapping of argument names to plain data"), after=NAMES
)
def check_job(key: str, function: Callable[..., Any], arguments: Mapping[str, Any], after: Sequence[str]) -> None:
    """Refuse the arguments of a Job that are of another type."""


class JobStatus(StrEnum):
    """How a job ended."""

    DONE = "done"
    """The function returned."""
    FAILED = "failed"
    """The function raised."""
    LOST = "lost"
    """Its process died, in each of the attempts."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        value: what the function returned; None unless it is done.
        why: the message of the error, or how the process died; empty if it is done.
        trace: the Python traceback of an unexpected error; else empty.
        exit_code: of the error, as in `pipeline.errors`: 0 if done, 3 for a bug and for a job that was lost.
        seconds: of wall time, of the last attempt.
        where: the machine and the process, or the Ray node, that ran it last.
        attempts: how often it was started.
    """

    key: str
    """The key of the job."""
    status: JobStatus
    """How the job ended."""
    value: Any = None
    why: str = ""
    trace: str = ""
    exit_code: int = 0
    seconds: float = 0.0
    where: str = ""
    attempts: int = 1


class JobExecutor(Protocol):
    """Runs jobs in other processes."""

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Yield the outcome of each job, as they end. Closing the iterator stops the running jobs.

        Args:
            jobs: the jobs; a job that comes after others stands after them.
        """
        ...


class JobQueue:
    """Jobs that wait until the jobs that they come after have ended.

    Args:
        jobs: a job stands after the jobs that it comes after; a job that is not in the list has ended already.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._waiting = list(jobs)
        self._running = {job.key for job in jobs}

    def take(self) -> Job | None:
        """Take out the first job that may begin; None where none may, or none is left."""
        ready = next((job for job in self._waiting if self._running.isdisjoint(job.after)), None)
        if ready is not None:
            self._waiting.remove(ready)
        return ready

    def end(self, outcome: Outcome) -> Iterator[Outcome]:
        """Note that a job has ended; yield its outcome and, if it was lost, those of the jobs after it."""
        self._running.discard(outcome.key)
        yield outcome
        if outcome.status is not JobStatus.LOST:
            return
        while (job := next((job for job in self._waiting if outcome.key in job.after), None)) is not None:
            self._waiting.remove(job)
            why = f"it was not begun, since {outcome.key} was lost: {outcome.why}"
            yield from self.end(
                Outcome(job.key, JobStatus.LOST, why=why, exit_code=InternalError.exit_code, attempts=0)
            )


def perform(job: Job, attempts: int = 1) -> Outcome:
    """Call the function of `job`; an exception becomes an outcome, except those that end the process."""
    begun = time.perf_counter()
    try:
        value, error = _call_function(job), None
    except Exception as raised:
        value, error = None, refusal_of(raised) or raised
    return Outcome(
        key=job.key,
        status=JobStatus.FAILED if error else JobStatus.DONE,
        value=value,
        why=_sentence(error) if error else "",
        trace="".join(traceback.format_exception(error)) if error and not _is_meant(error) else "",
        exit_code=getattr(error, "exit_code", InternalError.exit_code) if error else 0,
        seconds=time.perf_counter() - begun,
        where=here(),
        attempts=attempts,
    )


def here() -> str:
    """This machine and this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _call_function(job: Job) -> Any:
    value = job.function(**job.arguments)
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise InternalError(f"{job.address} returned what JSON cannot hold: {error}") from error


def _is_meant(error: Exception) -> bool:
    """Whether the error was raised on purpose, and its message is a sentence for the user."""
    return hasattr(error, "exit_code")


def _sentence(error: Exception) -> str:
    return str(error) if _is_meant(error) else f"{type(error).__name__}: {error}"


CORES_PER_JOB: Final = 2
"""A run has a process for the passes and one for the proofs, and onnxruntime has threads in each."""


class LocalProcesses:
    """Runs jobs in child processes, each with its own share of the cores.

    A process is kept between jobs, since importing torch takes seconds. They all end with this process, also on Ctrl-C.

    Args:
        count: of processes; by default one for every two cores that this process may use, and at least one.
        attempts: how often a job is started before it counts as lost.

    Raises:
        UsageError: an argument is no number above 0.
    """

    @expects(count=COUNT.or_none(), attempts=COUNT)
    def __init__(self, count: int | None = None, attempts: int = 3) -> None:
        cores = available_cores()
        self.count = count or max(1, len(cores) // CORES_PER_JOB)
        self.attempts = attempts
        self._shares = [cores[index :: self.count] or [cores[index % len(cores)]] for index in range(self.count)]

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        queue = JobQueue(jobs)
        again = deque[_LocalAttempt]()
        with ExitStack() as stack:
            idle = [stack.enter_context(Worker(cores=share)) for share in self._shares[: len(jobs)]]
            busy: dict[int, tuple[Worker, _LocalAttempt]] = {}
            while True:
                while idle and (attempt := _next_attempt(queue, again)) is not None:
                    worker = idle.pop()
                    attempt.begin(worker)
                    busy[worker.fileno()] = worker, attempt
                if not busy:
                    return
                for handle in wait(list(busy)):
                    worker, attempt = busy.pop(cast(int, handle))
                    outcome = attempt.collect(worker)
                    idle.append(worker)
                    if outcome.status is JobStatus.LOST and attempt.number < self.attempts:
                        again.append(_LocalAttempt(attempt.job, attempt.number + 1))
                    else:
                        yield from queue.end(outcome)


@dataclass(slots=True)
class _LocalAttempt:
    """One attempt at a job."""

    job: Job
    number: int
    ticket: int = 0
    begun: float = 0.0

    def begin(self, worker: Worker) -> None:
        self.begun = time.perf_counter()
        try:
            self.ticket = worker.post(perform, job=self.job, attempts=self.number)
        except StepCrashed:  # it died after its last job, which is not this job's fault: try again in a fresh one
            self.ticket = worker.post(perform, job=self.job, attempts=self.number)

    def collect(self, worker: Worker) -> Outcome:
        """Wait for the outcome; if the worker died, the outcome says how."""
        try:
            return worker.collect(self.ticket)
        except StepCrashed as error:
            state, why = JobStatus.LOST, str(error)
        except StepFailed as error:
            state, why = JobStatus.FAILED, str(error)
        return Outcome(
            key=self.job.key,
            status=state,
            why=f"{why} (attempt {self.number})" if self.number > 1 else why,
            exit_code=InternalError.exit_code,
            seconds=time.perf_counter() - self.begun,
            where=here().partition(":")[0],
            attempts=self.number,
        )


def _next_attempt(queue: JobQueue, again: deque[_LocalAttempt]) -> _LocalAttempt | None:
    """The next job; those of `again` are last, since one of them may be what kills the others."""
    job = queue.take()
    if job is not None:
        return _LocalAttempt(job, number=1)
    return again.popleft() if again else None
