"""Jobs, somebody who does them, and a table: what is done already is not done again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pipeline.spread.job import Job, Outcome, Spread
from pipeline.spread.table import Table

__all__ = ["Ended", "run_jobs"]


@dataclass(frozen=True, slots=True)
class Ended:
    """A job has ended, as the `done`-th of `total`; `known` if that was in an earlier run."""

    outcome: Outcome
    done: int
    total: int
    known: bool


def run_jobs(
    jobs: Sequence[Job],
    spread: Spread,
    path: Path,
    versions: Mapping[str, str],
    observer: Callable[[Ended], None] = lambda _: None,
    stands: Callable[[Outcome], bool] = lambda _: True,
) -> tuple[Outcome, ...]:
    """Do what the table at `path` does not know as done, and write it there as it ends.

    Args:
        jobs: each with a key of its own.
        spread: who does them. It is not called if there is nothing to do.
        path: of the table; see `pipeline.spread.table`.
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
    with Table(path, versions).opened() as table:
        found = {job.key: known for job in jobs if (known := table.known(job)) is not None and stands(known)}
        for done, outcome in enumerate(found.values(), 1):
            observer(Ended(outcome, done, len(jobs), known=True))
        missing = [job for job in jobs if job.key not in found]
        with _outcomes(spread, missing) as outcomes:
            for outcome in outcomes:
                table.add(by_key[outcome.key], outcome)
                found[outcome.key] = outcome
                observer(Ended(outcome, len(found), len(jobs), known=False))
    return tuple(found[job.key] for job in jobs)


@contextmanager
def _outcomes(spread: Spread, jobs: Sequence[Job]) -> Iterator[Iterator[Outcome]]:
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
