"""A batch: the configurations that could be read become jobs, and what comes of them becomes rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from passes.errors import PassError
from pipeline.batch.configs import REPORT, PlannedRun, job_of
from pipeline.batch.rows import Row, batch_text, row_of, row_of_mistake
from pipeline.errors import OnnxlineError
from pipeline.jobs import Ended, Job, Outcome, Spread, run_jobs
from pipeline.versions import digest_of_file, own_code_digest, versions
from pipeline.workspace import Workspace, stamp

__all__ = ["TABLE", "TEXT", "run_batch"]

TABLE: Final = "batch.jsonl"
"""What is done, for the next batch."""

TEXT: Final = "batch.txt"
"""The same for people."""


def run_batch(
    planned: Sequence[PlannedRun],
    out: Path,
    spread: Spread,
    observer: Callable[[Ended], None] = lambda _: None,
    again: bool = False,
) -> tuple[Row, ...]:
    """Run each configuration into `out`/<name>, unless that was done, and write both tables into `out`.

    One that fails does not hold up the others.

    Args:
        planned: from `read_configs`.
        spread: who does the runs.
        observer: is told of each run that has ended.
        again: also run what is done; each run still takes from its folder what has not changed.

    Returns:
        A row for each configuration, in their order.

    Raises:
        UsageError: `out` cannot be written, or another batch writes to it.
    """
    mistakes, jobs = _jobs(planned, out)
    known: set[str] = set()

    def observe(ended: Ended) -> None:
        if ended.known:
            known.add(ended.outcome.key)
        observer(ended)

    def stands(outcome: Outcome) -> bool:
        """Nobody has removed or overwritten what it made, or edited the code that made its model."""
        same_code = all(digest_of_file(Path(file)) == digest for file, digest in outcome.value["code"].items())
        return not again and same_code and list(stamp(out / outcome.key / REPORT)) == outcome.value["report"]

    of = {"code of onnxline": own_code_digest(), **versions()}
    ended = {one.key: one for one in run_jobs(jobs, spread, out / TABLE, of, observe, stands)}
    rows = tuple(
        mistakes[one.path] if one.path in mistakes else row_of(one, ended[one.name], out / one.name, one.name in known)
        for one in planned
    )
    Workspace(out).write_text(TEXT, batch_text(rows))
    return rows


def _jobs(planned: Sequence[PlannedRun], out: Path) -> tuple[dict[Path, Row], list[Job]]:
    """What cannot be run, and a job for each of the others."""
    mistakes: dict[Path, Row] = {}
    jobs = []
    for one in planned:
        try:
            if one.mistake is not None:
                raise one.mistake
            jobs.append(job_of(one, out))
        except (OnnxlineError, PassError) as error:
            mistakes[one.path] = row_of_mistake(one, error)
    return mistakes, jobs
