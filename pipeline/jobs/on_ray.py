"""Jobs over a Ray cluster, seen from our side: a process that talks to the cluster, and tells us what it hears.

Ray in a process of its own prints, warns and takes signals there, and not in the middle of our progress bar. When that
process ends, the cluster stops what it did for us.
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

__all__ = ["RayCluster"]


class RayCluster:
    """Does jobs on the nodes of a Ray cluster that runs already.

    Args:
        address: as `ray start` told it: host:port, or auto for the cluster that this machine belongs to.
        cpus: that each job takes from what its node offers; less where no node offers as many.
        attempts: how often a job is begun before it is lost.

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
        """As `Spread` says.

        Raises:
            UsageError: no cluster answers at this address, or none answers any more.
        """
        _refuse_silence(self.address)
        with Worker() as driver:
            ticket = driver.post(DRIVE, address=self.address, jobs=jobs, cpus=self.cpus, attempts=self.attempts)
            while driver.awaits(ticket):
                wait([driver.fileno()])  # for as long as it takes
                try:
                    told = driver.collect(ticket)
                except StepCrashed as error:
                    raise UsageError(
                        f"the Ray cluster at {self.address} does not answer any more: {error}; "
                        "what is done is kept, run the same command again to go on"
                    ) from error
                except StepFailed as error:
                    raise InternalError(f"the process that talks to Ray failed: {error}") from error
                if isinstance(told, str):
                    raise UsageError(NO_ANSWER.format(address=self.address, why=told))
                if told is not None:
                    yield told


def _refuse_silence(address: str) -> None:
    """Ray itself tries for minutes before it says that nobody listens at an address."""
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

DRIVE: Final = "pipeline.jobs.ray_driver:drive"
