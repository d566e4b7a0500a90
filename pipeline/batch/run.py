"""Run a batch: configurations become jobs, and their outcomes become rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Final

from passes.errors import PassError
from pipeline.argument_checks import FLAG, FUNCTION, PATH, expects, several
from pipeline.batch.configs import REPORT, PlannedRun, job_of
from pipeline.batch.rows import Row, batch_text, row_of, row_of_mistake
from pipeline.errors import OnnxlineError
from pipeline.jobs import Job, JobExecutor, JobProgress, Outcome, run_jobs
from pipeline.versions import digest_of_file, own_code_digest, versions
from pipeline.workspace import Workspace, stamp

TABLE: Final = "batch.jsonl"
"""The outcomes of jobs, for the next batch."""

TEXT: Final = "batch.txt"
"""The same for people."""


@expects(planned=several(PlannedRun, "what read_configs gives"), out=PATH, observer=FUNCTION, again=FLAG)
def run_batch(
    planned: Sequence[PlannedRun],
    out: str | PathLike[str],
    executor: JobExecutor,
    observer: Callable[[JobProgress], None] = lambda _: None,
    again: bool = False,
) -> tuple[Row, ...]:
    """Run each configuration into `out`/<name>, unless it was done before, and write both tables into `out`.

    A run that fails does not stop the others.

    Args:
        planned: from `read_configs`.
        executor: runs the jobs.
        observer: called with each run that has ended.
        again: also repeat runs that are done; each still reuses the unchanged stages in its folder.

    Returns:
        A row for each configuration, in their order.

    Raises:
        UsageError: `out` cannot be written, or another batch writes to it.
    """
    out = Path(out)
    mistakes, jobs = _jobs(planned, out)
    known: set[str] = set()

    def observe(progress: JobProgress) -> None:
        if progress.known:
            known.add(progress.outcome.key)
        observer(progress)

    def is_current(outcome: Outcome) -> bool:
        """Whether its report is unchanged, and the code of its model too."""
        same_code = all(digest_of_file(Path(file)) == digest for file, digest in outcome.value["code"].items())
        return not again and same_code and list(stamp(out / outcome.key / REPORT)) == outcome.value["report"]

    stamps = {"code of onnxline": own_code_digest(), **versions()}
    outcomes = {outcome.key: outcome for outcome in run_jobs(jobs, executor, out / TABLE, stamps, observe, is_current)}
    rows = tuple(
        mistakes[run.path]
        if run.path in mistakes
        else row_of(run, outcomes[run.name], out / run.name, run.name in known)
        for run in planned
    )
    Workspace(out).write_text(TEXT, batch_text(rows))
    return rows


def _jobs(planned: Sequence[PlannedRun], out: Path) -> tuple[dict[Path, Row], list[Job]]:
    """Rows for the configurations that cannot be run, and a job for each of the others."""
    mistakes: dict[Path, Row] = {}
    jobs = []
    for run in planned:
        try:
            if run.mistake is not None:
                raise run.mistake
            jobs.append(job_of(run, out))
        except (OnnxlineError, PassError) as error:
            mistakes[run.path] = row_of_mistake(run, error)
    return mistakes, jobs
