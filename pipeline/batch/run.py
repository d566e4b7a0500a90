"""Run many configurations by an executor of jobs, with a table of what is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Final

from passes.errors import PassError
from pipeline.argument_checks import FLAG, FUNCTION, PATH, expects, several
from pipeline.batch.jobs import REPORT, PlannedRun, jobs_of
from pipeline.batch.rows import Row, batch_text, row_of, row_of_mistake
from pipeline.errors import OnnxlineError
from pipeline.jobs import Job, JobExecutor, JobProgress, LocalProcesses, Outcome, run_jobs
from pipeline.stages.report import has_good_report
from pipeline.workspace import Workspace, digest_of_file, own_code_digest, stamp, versions

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

    A run that fails does not stop the others. Each part of a run in parts is a job, and the work on all parts is one
    more job. With one process, the whole run is one job, so that what its parts share is loaded once.

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
    is_one = isinstance(executor, LocalProcesses) and executor.count == 1
    mistakes, jobs = _jobs(planned, out, by_part=not is_one)
    known: set[str] = set()

    def observe(progress: JobProgress) -> None:
        if progress.known:
            known.add(progress.outcome.key)
        observer(progress)

    def is_current(outcome: Outcome) -> bool:
        """Whether the report of a run and the code of its model are unchanged.

        The report of a part has no stamp, since the run of the whole writes it anew and checks the files of the part.
        """
        same_code = all(digest_of_file(Path(file)) == digest for file, digest in outcome.value["code"].items())
        folder, stamped = out / outcome.key, outcome.value["report"]
        same = has_good_report(Workspace(folder)) if stamped is None else list(stamp(folder / REPORT)) == stamped
        return not again and same_code and same

    stamps = {"code of onnxline": own_code_digest(), **versions()}
    outcomes = {outcome.key: outcome for outcome in run_jobs(jobs, executor, out / TABLE, stamps, observe, is_current)}
    rows = tuple(
        mistakes[run.path] if run.path in mistakes else row_of(run.name, str(run.path), out / run.name, outcomes, known)
        for run in planned
    )
    Workspace(out).write_text(TEXT, batch_text(rows))
    return rows


def _jobs(planned: Sequence[PlannedRun], out: Path, *, by_part: bool) -> tuple[dict[Path, Row], list[Job]]:
    """Rows for the configurations that cannot be run, and the jobs of the others."""
    mistakes: dict[Path, Row] = {}
    jobs: list[Job] = []
    for run in planned:
        try:
            if run.mistake is not None:
                raise run.mistake
            jobs += jobs_of(run, out, by_part=by_part)
        except (OnnxlineError, PassError) as error:
            mistakes[run.path] = row_of_mistake(run, error)
    return mistakes, jobs
