"""Run jobs on a Ray cluster, through a driver process that forwards the outcomes.

Ray runs in a process of its own so that its output, warnings and signal handlers do not disturb the progress bar. When
that process ends, the cluster stops its jobs.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import Final

from passes.errors import StepCrashed, StepFailed
from passes.worker.client import Worker
from pipeline.errors import InternalError, UsageError
from pipeline.jobs.job import Job, Outcome
from pipeline.jobs.ray_driver import drive


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
