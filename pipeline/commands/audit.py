"""`onnxline audit`: is this release of an optimizer safe? Tables to review, reproducers to report, a gate for CI."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from passes.advisories import Table, own_tables, tables_in
from passes.advisories.known import news
from passes.audit.cases import case_names
from passes.audit.plan import CALL, Plan, chosen_subjects, unread_of
from passes.audit.reproducers import CALL as REPRODUCE
from passes.audit.reproducers import wanted
from passes.audit.subject import subjects_of, with_inner
from passes.context import open_context
from passes.worker.platforms import available_cores
from pipeline.commands.audit_files import remove_stale, write_reproducer, write_table
from pipeline.commands.audit_text import audit_as_data, news_text, summary_text, unread_text
from pipeline.commands.options import Json
from pipeline.errors import InternalError, UsageError
from pipeline.spread import Job, Spread, State, run_jobs, spread_over
from pipeline.spread.screen import JobsScreen
from pipeline.versions import own_code, versions
from pipeline.workspace import key_of, stamp

__all__ = ["register"]

NEW: Final = 1
"""Exit code of `--gate` when something is found that is not accepted."""


def register(app: typer.Typer) -> None:
    app.command("audit")(audit)


def audit(
    models: Annotated[Path | None, typer.Option(help="A folder of models of your own, tried too.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this library, pass or glob of passes.")] = None,
    cases: Annotated[list[str] | None, typer.Option(help="Only models of this glob, as node/test_if*.")] = None,
    every: Annotated[bool, typer.Option("--all", help="The passes inside of onnxsim and others too.")] = False,
    gate: Annotated[bool, typer.Option("--gate", help="Exit with 1 if what is found is not accepted.")] = False,
    accepted: Annotated[Path | None, typer.Option(help="A folder of accepted tables (default: onnxline's).")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Where the tables and reproducers go.")
    ] = Path("runs/audit"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes on this machine (default: its cores).")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Use this Ray cluster: HOST:PORT, or auto.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds for one call of one pass.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Try every pass on many small models, and say what it breaks: is this release of an optimizer safe?

    Stopped or killed, the same command goes on where it was.
    """
    spread = spread_over(ray, jobs or (None if ray else len(available_cores())))
    against = _accepted(accepted)
    if models is not None and not models.is_dir():
        raise UsageError(f"--models: {models} is no folder; expected one with .onnx files")
    with open_context() as bench:
        found = subjects_of(bench, every=every or any("/" in one for one in only or ()))
        subjects = with_inner(chosen_subjects(found, only or ()), bench)
    plan = Plan(subjects, case_names(models, cases or ()), models, timeout_s)
    stamps = _stamps(models)
    values = _done([Job(key, CALL, what) for key, what in plan.jobs()], out, spread, stamps)
    tables, unread = plan.tables(values), unread_of(values)
    for table in tables:
        write_table(table, out)
    for value in _done(_reproductions(plan, tables), out, spread, stamps):
        write_reproducer(value, out / "reproducers")
    remove_stale(out / "reproducers", tables)
    unknown = news(tables, against)
    if as_json:
        typer.echo(json.dumps(audit_as_data(tables, unread, unknown, out), indent=2, ensure_ascii=False))
    else:
        typer.echo(summary_text(tables), nl=False)
        typer.echo(unread_text(unread), nl=False)
        typer.echo(news_text(unknown, out), nl=False)
    if unread:
        raise UsageError(f"{len(unread)} of the models cannot be read, as said above; mend or remove them")
    if gate and unknown:
        raise typer.Exit(NEW)


def _accepted(folder: Path | None) -> Sequence[Table]:
    if folder is None:
        return own_tables()
    tables = tables_in(folder)
    if not tables:
        raise UsageError(f"--accepted: no table of an audit in {folder}; `onnxline audit --out {folder}` writes them")
    return tables


def _reproductions(plan: Plan, tables: Sequence[Table]) -> list[Job]:
    models = str(plan.models.resolve()) if plan.models else None
    settings = {"models": models, "timeout_s": plan.timeout_s, "memory_gib": plan.memory_gib}
    return [
        Job(f"{one['name']}: {one['kind']}, {one['case']}", REPRODUCE, {**one, **settings})
        for one in wanted(tables, plan.subjects)
    ]


def _stamps(models: Path | None) -> dict[str, str]:
    """Everything that decides what comes of a job: libraries, our own code, and the user's models as they are now."""
    files = sorted(path for path in models.rglob("*") if path.is_file()) if models else []
    seen = key_of([(str(path), *stamp(path)) for path in files])
    return {**versions(), "onnxline's code": own_code(), "models": seen}


def _done(jobs: Sequence[Job], out: Path, spread: Spread, stamps: Mapping[str, str]) -> list[Any]:
    """What each job returned; those that an earlier run has done, under the same stamps, are not done again.

    Raises:
        InternalError: a job failed: what a library does is a finding, so this is a mistake of ours.
    """
    if not jobs:
        return []
    console = Console(stderr=True)
    with JobsScreen(len(jobs), console, quiet=console.is_terminal) as screen:
        outcomes = run_jobs(jobs, spread, out / "jobs.jsonl", stamps, screen.show)
    for outcome in outcomes:
        if outcome.status is not State.DONE:
            raise InternalError(f"{outcome.key}: {outcome.why}\n{outcome.trace}".rstrip())
    return [outcome.value for outcome in outcomes]
