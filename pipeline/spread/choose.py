"""Who does the jobs, by the options of the command line."""

from __future__ import annotations

from pipeline.errors import UsageError
from pipeline.spread.job import Spread
from pipeline.spread.local import LocalProcesses

__all__ = ["spread_over"]


def spread_over(ray: str | None = None, processes: int | None = None) -> Spread:
    """A Ray cluster, if its address is given; else processes of this machine.

    Raises:
        UsageError: both are given, or ray is not installed.
    """
    if ray is None:
        return LocalProcesses(processes)
    if processes is not None:
        raise UsageError("--jobs is for processes of this machine; on a Ray cluster its nodes say what they can take")
    from pipeline.spread.on_ray import RayCluster  # ray is an extra, and takes seconds to import

    return RayCluster(ray)
