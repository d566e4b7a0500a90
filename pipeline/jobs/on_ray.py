"""Run jobs on a Ray cluster, through a driver process that forwards the outcomes.

Ray runs in a process of its own so that its output, warnings and signal handlers do not disturb the progress bar. When
that process ends, the cluster stops its jobs. Jobs of a node that died are started again, on any node with room. The
nodes run this checkout, from the same path, with the same libraries; on a node with other libraries a job fails and
says so. Ray could restart tasks too, but would not report how often.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Final

from passes.errors import StepCrashed, StepFailed
from passes.worker.client import Worker
from pipeline.errors import InternalError, UsageError
from pipeline.jobs.job import Job, JobQueue, JobStatus, Outcome, here, perform
from pipeline.workspace import own_code_digest, versions

if TYPE_CHECKING:
    import ray


def drive(address: str, jobs: Sequence[Job], cpus: int, attempts: int) -> Iterator[Outcome | str]:
    """Yield the outcome of each job, as they end; if the cluster does not answer, only Ray's message."""
    try:
        with _connect(address):
            yield from _outcomes(jobs, cpus, attempts)
    except _NoAnswer as error:
        yield str(error)


class _NoAnswer(Exception):
    """There is no cluster at this address; the message is Ray's."""


@contextmanager
def _connect(address: str) -> Iterator[None]:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    checkout = str(Path(__file__).parents[2])
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": checkout}},
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _NoAnswer(_one_line(error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _outcomes(jobs: Sequence[Job], cpus: int, attempts: int) -> Iterator[Outcome]:
    import ray

    submit = ray.remote(num_cpus=_cpus_of_a_job(cpus), max_retries=0)(perform_alike).remote
    expected = _identity()

    def begin(job: Job, number: int) -> _RayAttempt:
        reference = submit(job.key, pickle.dumps(job), number, expected)
        return _RayAttempt(job, number, reference, time.perf_counter())

    queue = JobQueue(jobs)
    busy: dict[ray.ObjectRef, _RayAttempt] = {}
    while True:
        while (job := queue.take()) is not None:
            first = begin(job, number=1)
            busy[first.reference] = first
        if not busy:
            return
        for reference in ray.wait(list(busy), num_returns=1)[0]:
            attempt = busy.pop(reference)
            outcome = attempt.collect()
            if outcome.status is JobStatus.LOST and attempt.number < attempts:
                again = begin(attempt.job, attempt.number + 1)
                busy[again.reference] = again
            else:
                yield from queue.end(outcome)


@dataclass(frozen=True, slots=True)
class _RayAttempt:
    """One attempt at a job."""

    job: Job
    number: int
    reference: ray.ObjectRef
    begun: float

    def collect(self) -> Outcome:
        """Fetch the outcome; if the job died, the outcome has Ray's message."""
        import ray
        from ray import exceptions

        try:
            return ray.get(self.reference)
        except (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError) as error:
            state, why = JobStatus.FAILED, f"the node could not begin: {_one_line(error)}"
        except exceptions.RayError as error:
            state, why = JobStatus.LOST, f"{type(error).__name__}: {_one_line(error)}"
        return Outcome(
            key=self.job.key,
            status=state,
            why=why,
            exit_code=InternalError.exit_code,
            seconds=time.perf_counter() - self.begun,
            attempts=self.number,
        )


def perform_alike(key: str, job: bytes, attempts: int, expected: Mapping[str, str]) -> Outcome:
    """Run `perform` if this node has the expected code and libraries; else the job fails.

    Args:
        key: of the job.
        job: pickled, since a node with other code may not be able to read it.
    """
    import ray

    where = f"{here()}, Ray node {ray.get_runtime_context().get_node_id()[:8]}"
    others = differences(expected, _identity())
    if others:
        why = f"{where} has {others}; every node needs the same checkout at the same path, and the same libraries"
        return Outcome(key, JobStatus.FAILED, why=why, exit_code=UsageError.exit_code, where=where, attempts=attempts)
    return replace(perform(pickle.loads(job), attempts), where=where)


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Describe how the versions of a node differ from the expected ones; empty if they do not."""
    others = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    return ", ".join(f"{name} {found.get(name, 'none')} and not {expected.get(name, 'none')}" for name in others)


def _identity() -> dict[str, str]:
    """The versions that two nodes have to share to get the same results."""
    return {**versions(), "code of onnxline": own_code_digest()}


def _cpus_of_a_job(wanted: int) -> int:
    """`wanted`, or the CPUs of the largest node if it has fewer: a job that asks for more would wait forever."""
    import ray

    largest = max((node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
    return max(1, min(wanted, int(largest)))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:LAST_WORDS]


LAST_WORDS: Final = 600
"""The most characters of a message of Ray."""


class RayCluster:
    """Runs jobs on the nodes of a running Ray cluster.

    Args:
        address: as printed by `ray start`, host:port; or auto for the cluster that this machine belongs to.
        cpus: CPUs that each job reserves on its node; fewer if no node has as many.
        attempts: how often a job is started before it counts as lost.

    Raises:
        UsageError: ray is not installed.
    """

    def __init__(self, address: str, cpus: int = 2, attempts: int = 3) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UsageError("--ray needs ray, which is not installed; pip install 'onnxline[ray]'")
        self.address = address
        self.cpus = cpus
        self.attempts = attempts

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Yield the outcome of each job, as they end.

        Raises:
            UsageError: no cluster answers at this address, or it stops answering.
        """
        _refuse_silence(self.address)
        with Worker() as driver:
            ticket = driver.post(drive, address=self.address, jobs=jobs, cpus=self.cpus, attempts=self.attempts)
            while driver.awaits(ticket):
                wait([driver.fileno()])  # for as long as it takes
                try:
                    outcome = driver.collect(ticket)
                except StepCrashed as error:
                    raise UsageError(
                        f"the Ray cluster at {self.address} does not answer any more: {error}; "
                        "what is done is kept, run the same command again to go on"
                    ) from error
                except StepFailed as error:
                    raise InternalError(f"the process that talks to Ray failed: {error}") from error
                if isinstance(outcome, str):
                    raise UsageError(NO_ANSWER.format(address=self.address, why=outcome))
                if outcome is not None:
                    yield outcome


def _refuse_silence(address: str) -> None:
    """Raise if no cluster listens at `address`: Ray itself would try for minutes first."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # auto
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(NO_ANSWER.format(address=address, why=error)) from error


CONNECT_S: Final = 5.0
"""Seconds within which a node of a cluster has to answer."""

NO_ANSWER: Final = (
    "no Ray cluster answers at {address}: {why}; start one with `ray start --head`, "
    "and add machines with `ray start --address HOST:PORT`"
)
