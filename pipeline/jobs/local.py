"""Run jobs in processes of this machine. A process that dies costs one attempt of one job, and is replaced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Final, cast

from passes.errors import StepCrashed, StepFailed
from passes.worker.client import Worker
from passes.worker.platforms import available_cores
from pipeline.argument_checks import COUNT, expects
from pipeline.errors import InternalError
from pipeline.jobs.job import Job, JobStatus, Outcome, here, perform

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
        self._shares = [cores[place :: self.count] or [cores[place % len(cores)]] for place in range(self.count)]

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        waiting = deque(_LocalAttempt(job, number=1) for job in jobs)
        with ExitStack() as stack:
            idle = [stack.enter_context(Worker(cores=share)) for share in self._shares[: len(jobs)]]
            busy: dict[int, tuple[Worker, _LocalAttempt]] = {}
            while waiting or busy:
                while waiting and idle:
                    worker, attempt = idle.pop(), waiting.popleft()
                    attempt.begin(worker)
                    busy[worker.fileno()] = worker, attempt
                for handle in wait(list(busy)):
                    worker, attempt = busy.pop(cast(int, handle))
                    outcome = attempt.collect(worker)
                    idle.append(worker)
                    if outcome.status is JobStatus.LOST and attempt.number < self.attempts:
                        waiting.append(
                            _LocalAttempt(attempt.job, attempt.number + 1)
                        )  # last: it may be what kills the others
                    else:
                        yield outcome


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
