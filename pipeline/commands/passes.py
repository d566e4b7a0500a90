"""`onnxline passes`: what this installation can run. `onnxline passes show NAME`: one of them at work."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import typer

from passes.advisories.known import is_quarantine
from passes.catalog import Entry, catalog
from passes.catalog.shown import find, show
from passes.context import open_context
from passes.errors import PolicyError
from passes.external.installed import library_versions
from passes.policy.known_passes import ALL_GROUPS, DESTROYS, in_group
from passes.recipe.recipe import OWN_STEPS
from passes.structures import STRUCTURES
from passes.suggest import nearest
from pipeline.commands.passes_text import print_entries, print_shown

__all__ = ["FORMAT_VERSION", "register"]

FORMAT_VERSION: Final = 1
"""Of what `--json` writes."""


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Every pass that this installation can run.")
    group.callback(invoke_without_command=True)(list_passes)
    group.command("show")(show_passes)
    app.add_typer(group, name="passes")


def list_passes(
    context: typer.Context,
    source: Annotated[str | None, typer.Option(help="Only those of one library, such as onnxsim.")] = None,
    group: Annotated[str | None, typer.Option(help="Only those that this group of a skip list names.")] = None,
    destroys: Annotated[str | None, typer.Option(help="Only those that may break this kind of structure.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> None:
    """List every pass that this installation can run; `passes show NAME` runs one on a small model."""
    if context.invoked_subcommand is not None:
        return
    if group is not None and not is_quarantine(group):
        _check("group", group, ALL_GROUPS)
    _check("kind of structure", destroys, (*STRUCTURES, *(kind for kinds in DESTROYS.values() for kind in kinds)))
    with open_context() as bench:
        rows = catalog(bench, steps=None if source is None else _steps_from(source))
    _check("source", source, (row.source for row in rows))
    rows = [
        row
        for row in rows
        if (source is None or row.source == source)
        and (group is None or in_group(group, row.name))
        and (destroys is None or destroys in row.destroys)
    ]
    if as_json:
        typer.echo(json.dumps(_as_data(rows), indent=2, ensure_ascii=False))
    else:
        print_entries(rows, library_versions())


def show_passes(
    name: Annotated[str, typer.Argument(help="As the list writes it; fuse_gelu means onnxsim/fuse_gelu, too.")],
) -> None:
    """Say all that is known of a pass, and run it on a small model: the graph before, and after."""
    with open_context() as bench:
        rows = catalog(bench, steps=_steps_around(name))
        found = find(name, rows)
        others = [row.name for row in rows if row.bare == found[0].bare and row not in found]
        for number, entry in enumerate(found):
            if number:
                typer.echo()
            print_shown(show(entry, rows, bench), others)


def _steps_from(source: str) -> list[str]:
    """The steps whose inner passes come from one library: to ask the others takes seconds."""
    return [name for name, make in OWN_STEPS.items() if make().source == source]


def _steps_around(name: str) -> list[str] | None:
    """The step that `name` says it runs in; None for all steps, where it names none."""
    step = name.partition("/")[0]
    return [step] if step != name and step in OWN_STEPS else None


def _check(what: str, name: str | None, known: Iterable[str]) -> None:
    names = list(dict.fromkeys(known))
    if name is not None and name not in names:
        raise PolicyError(f"no {what} named {name!r}{nearest(name, names)}; known: {', '.join(names)}")


def _as_data(rows: Sequence[Entry]) -> dict[str, object]:
    return {
        "format_version": FORMAT_VERSION,
        "versions": library_versions(),
        "passes": [dataclasses.asdict(row) for row in rows],
    }
