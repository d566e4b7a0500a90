"""Jobs over a Ray cluster. What ran on a node or in a process that died is begun again, where there is room.

The nodes run this very checkout, from the same path, with the same libraries; a node that has others says so, and does
nothing. Ray itself would try again too, but without telling how often.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pipeline.errors import InternalError, UserMistake
from pipeline.spread.job import Job, Outcome, State
from pipeline.spread.perform import here, perform
from pipeline.versions import own_code, versions

__all__ = ["RayCluster"]


class RayCluster:
    """Does jobs on the nodes of a Ray cluster that runs already.

    Args:
        address: as `ray start` told it: host:port, or auto for the cluster that this machine belongs to.
        cpus: that each job takes from what its node offers; less where no node offers as many.
        attempts: how often a job is begun before it is lost.

    Raises:
        UserMistake: ray is not installed.
    """

    def __init__(self, address: str, cpus: int = 2, attempts: int = 3) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UserMistake("--ray needs ray, which is not installed; pip install 'onnxline[ray]'")
        self.address = address
        self.cpus = cpus
        self.attempts = attempts

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """As `Spread` says.

        Raises:
            UserMistake: no cluster answers at this address.
        """
        import ray

        with _connected(self.address):
            begin = ray.remote(num_cpus=_cpus_of_a_job(self.cpus), max_retries=0)(perform_alike).remote
            expected = _identity()

            def turn(job: Job, attempt: int) -> _Turn:
                reference = begin(job.key, job.call, dict(job.arguments), attempt, expected)
                return _Turn(job, attempt, reference, time.perf_counter())

            busy = {one.reference: one for one in (turn(job, attempt=1) for job in jobs)}
            while busy:
                for reference in ray.wait(list(busy), num_returns=1)[0]:
                    ended = busy.pop(reference)
                    outcome = ended.outcome()
                    if outcome.status is State.LOST and ended.attempt < self.attempts:
                        again = turn(ended.job, ended.attempt + 1)
                        busy[again.reference] = again
                    else:
                        yield outcome


@dataclass(frozen=True, slots=True)
class _Turn:
    """One attempt at a job."""

    job: Job
    attempt: int
    reference: Any
    begun: float

    def outcome(self) -> Outcome:
        """What the job said, or what Ray knows of how it died."""
        from ray import exceptions, get

        try:
            return get(self.reference)
        except (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError) as error:
            state, why = State.FAILED, f"the node could not begin: {error}"
        except exceptions.RayError as error:
            state, why = State.LOST, f"{type(error).__name__}: {error}"
        return Outcome(
            key=self.job.key,
            status=state,
            why=" ".join(why.split())[:LAST_WORDS],
            exit_code=InternalError.exit_code,
            seconds=time.perf_counter() - self.begun,
            attempts=self.attempt,
        )


def perform_alike(
    key: str, call: str, arguments: Mapping[str, Any], attempts: int, expected: Mapping[str, str]
) -> Outcome:
    """`perform`, on a node that has the code and the libraries which are expected of it."""
    import ray

    where = f"{here()}, Ray node {ray.get_runtime_context().get_node_id()[:8]}"
    found = _identity()
    others = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if others:
        told = ", ".join(f"{name} {found.get(name, 'none')} and not {expected.get(name, 'none')}" for name in others)
        why = f"{where} has {told}; install the same on every node, and the same checkout"
        return Outcome(key, State.FAILED, why=why, exit_code=UserMistake.exit_code, where=where, attempts=attempts)
    return replace(perform(key, call, arguments, attempts), where=where)


def _identity() -> dict[str, str]:
    """What two nodes have in common if they come to the same results."""
    return {**versions(), "code of onnxline": own_code()}


@contextmanager
def _connected(address: str) -> Iterator[None]:
    import ray

    checkout = str(Path(__file__).parents[2])
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": checkout}},
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserMistake(
            f"no Ray cluster answers at {address}: {' '.join(str(error).split())}; start one with "
            "`ray start --head`, and add machines with `ray start --address HOST:PORT`"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()  # ends what still runs for us


def _cpus_of_a_job(wanted: int) -> int:
    """What is wanted, or what the largest node has: a job that asks for more would wait for ever."""
    import ray

    largest = max((node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
    return max(1, min(wanted, int(largest)))


LAST_WORDS: Final = 600
"""Characters of what Ray says."""
