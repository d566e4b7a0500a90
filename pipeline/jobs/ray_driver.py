"""The process that talks to a Ray cluster. What ran on a node that died is begun again, where there is room.

The nodes run this very checkout, from the same path, with the same libraries; a node that has others says so, and does
nothing. Ray itself would begin a task again too, but without telling how often.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import ray
from ray import exceptions

from pipeline.errors import InternalError, UsageError
from pipeline.jobs.job import Job, Outcome, State, here, perform
from pipeline.versions import own_code_digest, versions

__all__ = ["differences", "drive", "perform_alike"]


def drive(address: str, jobs: Sequence[Job], cpus: int, attempts: int) -> Iterator[Outcome | str]:
    """The outcome of each job, as they end; if the cluster does not answer, only what Ray says of that."""
    try:
        with _connected(address):
            yield from _outcomes(jobs, cpus, attempts)
    except _NoAnswer as error:
        yield str(error)


class _NoAnswer(Exception):
    """There is no cluster at this address; the message is Ray's."""


@contextmanager
def _connected(address: str) -> Iterator[None]:
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
    begin = ray.remote(num_cpus=_cpus_of_a_job(cpus), max_retries=0)(perform_alike).remote
    expected = _identity()

    def turn(job: Job, attempt: int) -> _Turn:
        reference = begin(job.key, job.call, dict(job.arguments), attempt, expected)
        return _Turn(job, attempt, reference, time.perf_counter())

    busy = {one.reference: one for one in (turn(job, attempt=1) for job in jobs)}
    while busy:
        for reference in ray.wait(list(busy), num_returns=1)[0]:
            ended = busy.pop(reference)
            outcome = ended.outcome()
            if outcome.status is State.LOST and ended.attempt < attempts:
                again = turn(ended.job, ended.attempt + 1)
                busy[again.reference] = again
            else:
                yield outcome


@dataclass(frozen=True, slots=True)
class _Turn:
    """One attempt at a job."""

    job: Job
    attempt: int
    reference: ray.ObjectRef
    begun: float

    def outcome(self) -> Outcome:
        """What the job said, or what Ray knows of how it died."""
        try:
            return ray.get(self.reference)
        except (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError) as error:
            state, why = State.FAILED, f"the node could not begin: {_one_line(error)}"
        except exceptions.RayError as error:
            state, why = State.LOST, f"{type(error).__name__}: {_one_line(error)}"
        return Outcome(
            key=self.job.key,
            status=state,
            why=why,
            exit_code=InternalError.exit_code,
            seconds=time.perf_counter() - self.begun,
            attempts=self.attempt,
        )


def perform_alike(
    key: str, call: str, arguments: Mapping[str, object], attempts: int, expected: Mapping[str, str]
) -> Outcome:
    """`perform`, on a node that has the code and the libraries which are expected of it."""
    where = f"{here()}, Ray node {ray.get_runtime_context().get_node_id()[:8]}"
    others = differences(expected, _identity())
    if others:
        why = f"{where} has {others}; every node needs the same checkout at the same path, and the same libraries"
        return Outcome(key, State.FAILED, why=why, exit_code=UsageError.exit_code, where=where, attempts=attempts)
    return replace(perform(key, call, arguments, attempts), where=where)


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """What a node has otherwise, in words; empty if it has the same."""
    others = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    return ", ".join(f"{name} {found.get(name, 'none')} and not {expected.get(name, 'none')}" for name in others)


def _identity() -> dict[str, str]:
    """What two nodes have in common if they come to the same results."""
    return {**versions(), "code of onnxline": own_code_digest()}


def _cpus_of_a_job(wanted: int) -> int:
    """What is wanted, or what the largest node has: a job that asks for more would wait for ever."""
    largest = max((node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
    return max(1, min(wanted, int(largest)))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:LAST_WORDS]


LAST_WORDS: Final = 600
"""Characters of what Ray says."""
