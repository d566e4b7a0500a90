"""`onnxline audit`: is this release of an optimizer safe? Tables to review, reproducers to report, a gate for CI."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer

from passes.advisories import KINDS, UNSAFE, AuditTable, own_tables, table_text, tables_in
from passes.advisories.known import News, file_name, find_news
from passes.advisories.table import to_one_line
from passes.audit.cases import case_names
from passes.audit.job import AuditPlan, chosen_targets, parse_heading, reproduce, reproductions_of, run_job, unread_of
from passes.audit.trial import missing_steps, targets_of, with_inner
from passes.context import open_context
from passes.suggest import join_first
from passes.weights.files import replace_when_done, write_errors
from passes.worker.platforms import available_cores
from pipeline.commands.github import Format, annotate, check_form
from pipeline.commands.shared import FORMAT_VERSION, add_command
from pipeline.errors import InternalError, UsageError
from pipeline.jobs import Job, JobExecutor, JobStatus, choose_executor, run_jobs
from pipeline.jobs.console import JobsConsole
from pipeline.terminal import print_json, print_line, print_text
from pipeline.terminal.screen import Screen
from pipeline.workspace import disk_errors, key_of, own_code_digest, stamp, versions

NEW: Final = 1
"""Exit code of `--gate` when a finding is not accepted."""


def register(app: typer.Typer) -> None:
    add_command(app, "audit", audit)


def audit(
    models: Path | None = None,
    only: list[str] | None = None,
    cases: list[str] | None = None,
    every: bool = False,
    gate: bool = False,
    accepted: Path | None = None,
    out: Path = Path("runs/audit"),
    jobs: int | None = None,
    ray: str | None = None,
    timeout_s: float = 60.0,
    form: Format = "text",
    as_json: bool = False,
) -> None:
    """Try every pass on many small models, and say what it breaks: is this release of an optimizer safe?

    Stopped or killed, the same command goes on where it was.
    """
    check_form(form, json=as_json)
    spread = choose_executor(ray, jobs or (None if ray else len(available_cores())))
    against = _read_accepted(accepted)
    if models is not None and not models.is_dir():
        raise UsageError(f"--models: {models} is no folder; expected one with .onnx files")
    with open_context() as context:
        found = targets_of(context, every=every or any("/" in target for target in only or ()))
        missing = missing_steps(context)
        targets = with_inner(chosen_targets(found, only or (), missing), context)
    for why in () if only else missing.values():
        print_line(why, err=True)
    plan = AuditPlan(targets, case_names(models, cases or ()), models, timeout_s)
    stamps = _stamps(models)
    values = _finish_jobs([Job(key, run_job, what) for key, what in plan.jobs()], out, spread, stamps)
    tables, unread = plan.tables(values), unread_of(values)
    for table in tables:
        write_table(table, out)
    for value in _finish_jobs(_reproductions(plan, tables), out, spread, stamps):
        write_reproducer(value, out / "reproducers")
    remove_stale(out / "reproducers", tables)
    unknown = find_news(tables, against)
    if form == "github":
        rows = [(news.entry.name, str(news.entry.kind), _details(news)) for news in unknown]
        annotate("onnxline audit", ("pass", "finding", "where"), rows)
    elif as_json:
        print_json(audit_as_data(tables, unread, unknown, out))
    else:
        print_text(summary_text(tables))
        print_text(unread_text(unread))
        print_text(news_text(unknown, out))
    if unread:
        raise UsageError(f"{len(unread)} of the models cannot be read, as said above; mend or remove them")
    if gate and unknown:
        raise typer.Exit(NEW)


def _read_accepted(folder: Path | None) -> Sequence[AuditTable]:
    if folder is None:
        return own_tables()
    tables = tables_in(folder)
    if not tables:
        raise UsageError(f"--accepted: no table of an audit in {folder}; `onnxline audit --out {folder}` writes them")
    return tables


def _reproductions(plan: AuditPlan, tables: Sequence[AuditTable]) -> list[Job]:
    models = str(plan.models.resolve()) if plan.models else None
    settings = {"models": models, "timeout_s": plan.timeout_s, "memory_gib": plan.memory_gib}
    return [
        Job(f"{finding['name']}: {finding['kind']}, {finding['case']}", reproduce, {**finding, **settings})
        for finding in reproductions_of(tables, plan.targets)
    ]


def _stamps(models: Path | None) -> dict[str, str]:
    """Everything that can change the result of a job: libraries, our own code, and the user's models."""
    files = sorted(path for path in models.rglob("*") if path.is_file()) if models else []
    seen = key_of([(str(path), *stamp(path)) for path in files])
    return {**versions(), "onnxline's code": own_code_digest(), "models": seen}


def _finish_jobs(jobs: Sequence[Job], out: Path, spread: JobExecutor, stamps: Mapping[str, str]) -> list[Any]:
    """Run the jobs and return their values; jobs that an earlier run did under the same stamps are not run again.

    Raises:
        InternalError: a job failed. A library's failure is a finding, so this is a bug of ours.
    """
    if not jobs:
        return []
    console = Screen(stderr=True)
    with JobsConsole(len(jobs), console, quiet=console.is_terminal) as screen:
        outcomes = run_jobs(jobs, spread, out / "jobs.jsonl", stamps, screen.show)
    for outcome in outcomes:
        if outcome.status is not JobStatus.DONE:
            raise InternalError(f"{outcome.key}: {outcome.why}\n{outcome.trace}".rstrip())
    return [outcome.value for outcome in outcomes]


def write_table(table: AuditTable, folder: Path) -> None:
    _write(folder / file_name(table.distribution, table.version), table_text(table).encode())


def write_reproducer(value: Mapping[str, str], folder: Path) -> None:
    """Write the model, and next to it a text on how to see the fault."""
    _write(folder / f"{value['name']}.onnx", base64.b64decode(value["model"]))
    _write(folder / f"{value['name']}.txt", value["text"].encode())


def remove_stale(folder: Path, tables: Sequence[AuditTable]) -> None:
    """Remove the reproducers of findings that are gone; those of passes that were not tried this time stay."""
    found = {(entry.name, entry.kind) for table in tables for entry in table.entries}
    for file in sorted(folder.glob("*.txt")):
        with disk_errors(file):
            finding = (
                parse_heading(file.stem, file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else None
            )
            if finding and finding not in found and any(table.covers(finding[0]) for table in tables):
                file.with_suffix(".onnx").unlink(missing_ok=True)
                file.unlink()


def _write(path: Path, content: bytes) -> None:
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_when_done(path) as temporary:
            temporary.write_bytes(content)


SHOWN: Final = 3
"""Cases listed for a new finding."""

MOST: Final = 40
"""New findings that are shown."""


def audit_as_data(
    tables: Sequence[AuditTable], unread: Mapping[str, str], found: Sequence[News], out: Path
) -> dict[str, Any]:
    """All findings as plain data, none left out."""
    return {
        "format_version": FORMAT_VERSION,
        "tables": [
            {
                "library": table.distribution,
                "version": table.version,
                "models": sum(table.cases.values()),
                "found": {name: dict(counts) for name, counts in table.counts().items()},
            }
            for table in tables
        ],
        "not_read": dict(unread),
        "not_accepted": [
            {
                "pass": news.entry.name,
                "kind": news.entry.kind,
                "why": news.entry.why,
                "cases": list(news.cases),
                "accepted": news.accepted,
            }
            for news in found
        ],
        "folder": str(out),
    }


def summary_text(tables: Sequence[AuditTable]) -> str:
    """A line for each library, and one for each of its passes with an unsafe finding."""
    lines = []
    for table in tables:
        total = sum(table.counts().values(), Counter[str]())
        said = ", ".join(f"{total[kind]} {kind}" for kind in KINDS if total[kind]) or "nothing found"
        lines.append(f"{table.distribution} {table.version} on {sum(table.cases.values())} models: {said}")
        for name, counts in table.counts().items():
            unsafe = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if kind in UNSAFE and counts[kind])
            lines += [f"  {name}: {unsafe}"] if unsafe else []
    return "".join(f"{line}\n" for line in lines)


def unread_text(unread: Mapping[str, str]) -> str:
    """A line for each model that cannot be read, with the reason."""
    return "".join(f"not read: {to_one_line(case)}: {to_one_line(unread[case])}\n" for case in sorted(unread))


def news_text(found: Sequence[News], out: Path) -> str:
    """The findings that are not accepted, the worst first, and how to accept them."""
    if not found:
        return f"nothing that is not accepted; tables: {out}/\n"
    order = list(KINDS)
    lines = [f"not accepted: {len(found)}"]
    worst_first = sorted(found, key=lambda news: (order.index(news.entry.kind), news.entry.name))
    lines += [f"  {news.entry.name} {news.entry.kind}: {_details(news)}" for news in worst_first[:MOST]]
    lines += [f"  and {len(found) - MOST} more"] if len(found) > MOST else []
    lines.append(f"reproducers and tables: {out}/; to accept it, keep the tables and name their folder with --accepted")
    return "".join(f"{line}\n" for line in lines)


def _details(news: News) -> str:
    """Where an entry was found, why, and in which accepted table it is not."""
    where = join_first([*map(to_one_line, news.cases)], SHOWN)
    against = f"not in {news.accepted}" if news.accepted else "no table of this library is accepted"
    return "; ".join(filter(None, (where, news.entry.why, against)))
