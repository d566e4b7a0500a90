"""Run many configurations: find those that patterns name, run each as a job, and make rows of their outcomes.

Rows are data, and a table for people.
"""

from __future__ import annotations

import contextlib
import glob
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from passes.advisories.known import quarantined_by_entry
from passes.errors import PassError
from passes.proof.numbers import only_compared
from passes.recipe.recipe import names_of
from passes.recipe.user_passes import code_digest
from pipeline.argument_checks import FLAG, FUNCTION, NAMES, PATH, expects, several
from pipeline.config import RunConfig, is_reference
from pipeline.config.paths import locate, split_factory
from pipeline.errors import OnnxlineError, UsageError
from pipeline.jobs import Job, JobExecutor, JobProgress, JobStatus, Outcome, run_jobs
from pipeline.jobs.job import here
from pipeline.parts import PartsResult
from pipeline.result import RunResult
from pipeline.run import Pipeline
from pipeline.terminal.screen import Screen
from pipeline.verify.user_inputs import input_files
from pipeline.workspace import Workspace, digest_of_file, own_code_digest, stamp, versions


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A configuration or a model that a pattern names. `config` is None if it cannot be read; `mistake` says why."""

    path: Path
    name: str
    config: RunConfig | None
    mistake: OnnxlineError | PassError | None = None


@expects(patterns=NAMES, overrides=NAMES)
def read_configs(patterns: Sequence[str], overrides: Sequence[str] = ()) -> tuple[PlannedRun, ...]:
    """The configurations that `patterns` name, in their order; the matches of a glob are sorted; no duplicates.

    A model, `model.onnx` or `file.py:make`, has a configuration with all else by default.

    Raises:
        UsageError: a pattern names no file, or two configurations have one name, and so one folder.
    """
    planned = tuple(_read(path, overrides) for path in _files(patterns))
    first: dict[str, PlannedRun] = {}
    for run in planned:
        other = first.setdefault(run.name, run) if run.config is not None else run
        if other is not run:
            raise UsageError(
                f"{other.path} and {run.path} are both named {run.name!r}, so they would write into one folder; "
                "give each a `name` of its own, or run one of them with another --out"
            )
    return planned


def _read(path: Path, overrides: Sequence[str]) -> PlannedRun:
    try:
        config = RunConfig.from_source(path, overrides)
    except (OnnxlineError, PassError) as error:
        return PlannedRun(path, path.stem, None, error)
    return PlannedRun(path, config.name, config)


def _files(patterns: Sequence[str]) -> tuple[Path, ...]:
    files: dict[Path, Path] = {}
    for pattern in patterns:
        matches = list(_matches(pattern))
        if not matches:
            raise UsageError(f"{pattern!r} names no file; expected configurations or models, such as 'configs/*.yaml'")
        for path in matches:
            files.setdefault(path.resolve(), path)
    return tuple(files.values())


def _matches(pattern: str) -> Iterator[Path]:
    if is_reference(pattern) or Path(pattern).is_file():  # its name may hold brackets
        yield Path(pattern)
        return
    matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - the pattern may be absolute
    yield from (path for path in map(Path, matches) if path.is_file())


def job_of(planned: PlannedRun, out: Path) -> Job:
    """The run of a configuration that could be read, into `out`/<name>.

    The arguments hold all that the run depends on, so it is a new job when the settings, the files of the model, the
    code of the user's passes, or the passes that tables call unsafe change.

    Raises:
        PolicyError: a user's pass cannot be loaded, or a table is missing.
        ModelError: a table cannot be read.
    """
    assert planned.config is not None
    settings = planned.config.passes
    arguments = {
        "settings": planned.config.to_mapping(),
        "folder": str((out / planned.name).resolve()),
        "files": {file: stamp(locate(file)) for file in _model_files(planned.config) if _is_there(file)},
        "passes": code_digest(names_of(settings.recipe)),
        "unsafe": quarantined_by_entry(settings.skip),
    }
    return Job(planned.name, run_one, arguments)


def run_one(
    settings: Mapping[str, Any],
    folder: str,
    files: Mapping[str, Sequence[int]],
    passes: str,
    unsafe: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Run a configuration, and return its figures; it raises the same errors as `onnxline run`.

    Args:
        settings: a resolved configuration.
        folder: where its artifacts go.
        files: path → size and time of each file of the model, on the machine where the batch was started.
        passes: a digest of the user's own passes; only there so that it is a new job when they change.
        unsafe: the passes that tables of audits leave out; there for the same reason.

    Raises:
        UsageError: this machine does not have the same files at the same paths.
    """
    config = RunConfig.from_mapping(settings)
    _refuse_other_files(files)
    return _summary(Pipeline(config, Path(folder)).run())


def _summary(result: RunResult) -> dict[str, Any]:
    known = {"report": stamp(result.folder / REPORT), "code": dict(result.code)}
    if not isinstance(result, PartsResult):
        return {**_figures(result), **known}
    parts = {name: _figures(part) for name, part in result.parts.items()}
    errors = [part["worst_error"] for part in parts.values() if part["worst_error"] is not None]
    unsupported = dict.fromkeys(name for part in parts.values() for name in part["unsupported"])
    return {
        **{key: sum(part[key] for part in parts.values()) for key in SUMS},
        "worst_error": max(errors, default=None),
        "unsupported": list(unsupported),
        "parts": parts,
        **known,
    }


def _figures(result: RunResult) -> dict[str, Any]:
    """The figures of one model."""
    backends = result.runtime.backends
    errors = [errors.max_abs for backend in backends for errors in only_compared(backend.errors).values()]
    return {
        "nodes_before": result.export.nodes,
        "nodes_after": result.optimize.nodes,
        "kept": sum(verdict.kept for verdict in result.structures),
        "structures": len(result.structures),
        "reverted": sum(row.status.counts_as_reverted for row in result.passes),
        "worst_error": max(errors, default=None),
        "unsupported": [backend.name for backend in result.runtime.backends if backend.shortfall],
    }


SUMS: Final = ("nodes_before", "nodes_after", "kept", "structures", "reverted")
"""Figures of a run in parts that are sums over its parts."""


def _model_files(config: RunConfig) -> list[str]:
    """The files of the model and of the user's inputs, as the configuration names them."""
    model = config.model
    if model.parts is not None:
        files = [file for name in model.part_names for file in _model_files(config.of_part(name))]
        chain, _ = split_factory(model.chain, "model.chain") if model.chain else ("", "")
        return [*files, chain] if chain.endswith(".py") else files
    factory, _ = split_factory(model.factory) if model.factory else ("", "")
    named = [factory if factory.endswith(".py") else "", model.onnx, model.checkpoint]
    if model.transformers is not None:
        named += [model.transformers.config, model.transformers.checkpoint, *_in_folder(model.transformers.folder)]
    if model.diffusers is not None:
        named += _in_folder(model.diffusers.folder)
    with contextlib.suppress(UsageError):  # the run will report it
        named += [str(file or name.rpartition(":")[0]) for name, file in input_files(config.verify.inputs)]
    return [file for file in named if isinstance(file, str) and file]


def _in_folder(folder: str | None) -> list[str]:
    """The files below a folder: each model of a pipeline has a folder of its own."""
    return sorted(map(str, locate(folder).rglob("*.*"))) if folder and _is_there(folder) else []


def _is_there(file: str) -> bool:
    """Whether the file exists; the run itself reports a missing one."""
    try:
        return locate(file).exists()
    except UsageError:
        return False


def _refuse_other_files(files: Mapping[str, Sequence[int]]) -> None:
    """Refuse missing files and other sizes. Times may differ, if a package was installed on each machine separately."""
    others = [file for file, (size, _) in files.items() if not _is_there(file) or stamp(locate(file))[0] != size]
    if others:
        raise UsageError(
            f"{', '.join(others)} on {here()}: not there, or not as large as where the batch was started; "
            "every node needs the same files at the same paths, on a disk that they share"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration.

    Attributes:
        name: of the run; the stem of the file if it could not be read.
        state: done, check failed, mistake, bug or lost.
        exit_code: as `onnxline run` would have it.
        why: what was wrong; empty if it is done.
        trace: the Python traceback of a bug.
        folder: of the artifacts; empty if the configuration could not be read.
        found: the figures of the run: `nodes_before`, `nodes_after`, `kept` of `structures`, `reverted` steps,
            `worst_error`, the largest absolute one of the final model on any backend, and `unsupported`, the backends
            that cannot take it; of a run in parts their sums, the worst, and `parts`, the figures of each part; empty
            if it is not done.
        known: whether an earlier batch had done it.
    """

    name: str
    config: str
    state: str
    exit_code: int = 0
    why: str = ""
    trace: str = ""
    folder: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    where: str = ""
    attempts: int = 0
    known: bool = False


def row_of(planned: PlannedRun, outcome: Outcome, folder: Path, known: bool) -> Row:
    """The row of a run. If a run is done but its files are missing here, its node wrote them to a disk of its own."""
    why, code = outcome.why, outcome.exit_code
    if outcome.status is JobStatus.DONE and not (folder / REPORT).is_file():
        code = UsageError.exit_code
        why = f"it was done on {outcome.where}, and its files are not here; nodes need a disk that they share"
    found = {key: value for key, value in (outcome.value or {}).items() if key not in ("report", "code")}
    return Row(
        name=planned.name,
        config=str(planned.path),
        state=JobStatus.LOST if outcome.status is JobStatus.LOST else STATES.get(code, STATES[3]),
        exit_code=code,
        why=why,
        trace=outcome.trace,
        folder=str(folder),
        found=found,
        seconds=outcome.seconds,
        where=outcome.where,
        attempts=outcome.attempts,
        known=known,
    )


def row_of_mistake(planned: PlannedRun, why: Exception) -> Row:
    """The row of a configuration that cannot be run at all."""
    code = getattr(why, "exit_code", UsageError.exit_code)
    return Row(planned.name, str(planned.path), STATES[code], exit_code=code, why=str(why))


STATES: Final[Mapping[int, str]] = {0: "done", 1: "check failed", 2: "mistake", 3: "bug"}
"""By exit code."""


def batch_text(rows: Sequence[Row]) -> str:
    """The output of `print_batch` as plain text."""
    out = StringIO()
    print_batch(rows, Screen(file=out, width=WIDTH, color_system=None))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def print_batch(rows: Sequence[Row], screen: Screen) -> None:
    """The table, a paragraph for each row that is not done, and how many of each there are."""
    screen.print(_table(rows))
    faults = [f"{row.config}: {row.trace}{row.why}" for row in rows if row.exit_code]
    counts = Counter(row.state for row in rows)
    totals = ", ".join(f"{count} {state}" for state, count in counts.items()) + f" of {len(rows)}"
    for text in (*faults, totals):
        for line in text.split("\n"):
            screen.print_line(line)


def _table(rows: Sequence[Row]) -> Table:
    table = Table("run", "state", "nodes", "kept", "reverted", "worst error", "seconds", box=box.SIMPLE_HEAD)
    for row in rows:
        state = f"{row.state} before" if row.known else row.state
        if row.found.get("unsupported"):
            state += f" without {', '.join(row.found['unsupported'])}"
        tried = f", attempt {row.attempts}" if row.attempts > 1 else ""
        seconds = f"{row.seconds:.1f}" if row.attempts else ""
        cells = _result_cells(row.found)
        table.add_row(row.name, Text.assemble((state, STYLES[row.exit_code]), tried), *cells, seconds)
        for name, part in row.found.get("parts", {}).items():
            lacks = f"without {', '.join(part['unsupported'])}" if part["unsupported"] else ""
            table.add_row(f"  part {name}", lacks, *_result_cells(part))
    return table


def _result_cells(found: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if not found:
        return ("", "", "", "")
    error = found["worst_error"]
    return (
        f"{found['nodes_before']} → {found['nodes_after']}",
        f"{found['kept']}/{found['structures']}" if found["structures"] else "",
        str(found["reverted"] or ""),
        "" if error is None else f"{error:.1e}",
    )


STYLES: Final = {0: "green", 1: "yellow", 2: "red", 3: "red"}
"""By exit code."""

WIDTH: Final = 160
"""Width of the table where there is no terminal."""


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


REPORT: Final = "report.json"
