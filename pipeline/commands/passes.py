"""`onnxline passes`: what this installation can run. `onnxline passes show NAME`: one pass on an example model."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import typer

from passes.advisories.known import is_quarantine
from passes.catalog import CatalogEntry, catalog
from passes.catalog.listing import Demo, find_entries, show
from passes.context import open_context
from passes.errors import PolicyError
from passes.graph.formatting import COLUMNS
from passes.policy.policy import ALL_GROUPS, DESTROYS, in_group
from passes.recipe.recipe import OWN_STEPS, SINGLE_PASS_LIBRARY, library_versions
from passes.structures import STRUCTURES
from passes.suggest import nearest
from pipeline.commands.shared import FORMAT_VERSION, add_command, with_options
from pipeline.terminal import PlainScreen, Words, open_screen, print_json, print_line


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Every pass that this installation can run.")
    group.callback(invoke_without_command=True)(with_options(list_passes, "passes"))
    add_command(group, "passes show", show_passes)
    app.add_typer(group, name="passes")


def list_passes(
    invocation: typer.Context,
    source: str | None = None,
    group: str | None = None,
    destroys: str | None = None,
    as_json: bool = False,
) -> None:
    """List every pass that this installation can run; `passes show NAME` runs one on a small model."""
    if invocation.invoked_subcommand is not None:
        return
    if group is not None and not is_quarantine(group):
        _check("group", group, ALL_GROUPS)
    _check("kind of structure", destroys, (*STRUCTURES, *(kind for kinds in DESTROYS.values() for kind in kinds)))
    with open_context() as context:
        rows = catalog(context, steps=None if source is None else _steps_from(source))
    _check("source", source, (row.source for row in rows))
    rows = [
        row
        for row in rows
        if (source is None or row.source == source)
        and (group is None or in_group(group, row.name))
        and (destroys is None or destroys in row.destroys)
    ]
    if as_json:
        print_json(_as_data(rows))
    else:
        print_entries(rows, library_versions())


def show_passes(name: str) -> None:
    """Say all that is known of a pass, and run it on a small model: the graph before, and after."""
    with open_context() as context:
        rows = catalog(context, steps=_steps_around(name))
        found = find_entries(name, rows)
        others = [row.name for row in rows if row.bare == found[0].bare and row not in found]
        for number, entry in enumerate(found):
            if number:
                print_line()
            print_demo(show(entry, rows, context), others)


def _steps_from(source: str) -> list[str]:
    """The steps of one library; asking the others for their inner passes takes seconds."""
    return [name for name, make in OWN_STEPS.items() if make().source == source]


def _steps_around(name: str) -> list[str] | None:
    """The step before the slash of `name`; None, which means all steps, where it has none."""
    step = name.partition("/")[0]
    return [step] if step != name and step in OWN_STEPS else None


def _check(what: str, name: str | None, known: Iterable[str]) -> None:
    names = list(dict.fromkeys(known))
    if name is not None and name not in names:
        raise PolicyError(f"no {what} named {name!r}{nearest(name, names)}; known: {', '.join(names)}")


def _as_data(rows: Sequence[CatalogEntry]) -> dict[str, object]:
    return {
        "format_version": FORMAT_VERSION,
        "versions": library_versions(),
        "passes": [dataclasses.asdict(row) for row in rows],
    }


def print_entries(rows: Iterable[CatalogEntry], versions: Mapping[str, str]) -> None:
    """Print the steps of a recipe, then the passes that a recipe names one by one, then each step's inner passes."""
    page = _PassPage()
    sections: dict[str, list[CatalogEntry]] = {}
    for row in rows:
        sections.setdefault(_section(row), []).append(row)
    if not sections:
        page.line("no pass of this installation is all of that")
    for number, title in enumerate(sorted(sections, key=lambda title: title != STEPS)):
        if number:
            page.line()
        version = "" if title == STEPS else versions.get(sections[title][0].source, "")
        page.line(f"{title} {version}".strip() + f": {_count_passes(sections[title])}", style="bold")
        page.line(f"{'pass':<{NAME}} {'runs':<8} {'reads':<10} groups", style="dim")
        for entry in sections[title]:
            _print_row(entry, page)


def print_demo(demo: Demo, others: Sequence[str]) -> None:
    """Print the facts on one pass and its example; `others` are the passes of the same name in other steps."""
    page = _PassPage()
    entry = demo.entry
    page.line(f"{entry.name}, a pass of {entry.source}", style="bold")
    page.fact("does", entry.does)
    page.fact("runs", _runs(entry))
    if entry.options:
        page.fact("options", ", ".join(f"{name}: {json.dumps(default)}" for name, default in entry.options.items()))
    page.fact("reads", READS[entry.reads] if entry.described else "not known, so it counts as reading values")
    page.fact("groups", ", ".join(entry.groups) or "none")
    page.fact("destroys", _destroys(entry))
    if others:
        page.fact("same name", ", ".join(others))
    if demo.before:
        page.line()
        page.words(_sentence(demo.caption))
        page.graph("before", demo.before)
    if demo.after:
        page.graph("after", demo.after)
    if demo.left_behind:
        page.line()
        page.words(_left_behind(demo.left_behind))
    if demo.why_not:
        page.line()
        page.words(_sentence(demo.why_not))


class _PassPage:
    """Prints lines of at most `COLUMNS` characters, styled on a terminal and plain elsewhere."""

    def __init__(self) -> None:
        self._screen = open_screen()
        self._width = COLUMNS
        if not isinstance(self._screen, PlainScreen) and self._screen.is_terminal:
            self._width = min(self._screen.width, COLUMNS)

    def line(self, text: Words = "", style: str = "") -> None:
        self._screen.print_line(text, style)

    def words(self, text: str, indent: int = 0, hanging: int | None = None) -> None:
        """A paragraph; `hanging` is the indent of every line but the first."""
        more = " " * (indent if hanging is None else hanging)
        lines = textwrap.wrap(
            text, self._width, initial_indent=" " * indent, subsequent_indent=more, break_on_hyphens=False
        )
        for line in lines:
            self.line(line)

    def fact(self, key: str, words: str) -> None:
        self.words(f"{key:<{KEY}}{words}", indent=2, hanging=KEY + 2)

    def graph(self, title: str, text: str) -> None:
        self.line()
        self.line(title, style="bold")
        for line in text.splitlines():
            self.line(f"  {line}")


def _section(entry: CatalogEntry) -> str:
    step, inside, _ = entry.name.rpartition("/")
    if inside:
        return f"{step}/…"
    return entry.source if entry.source == SINGLE_PASS_LIBRARY else STEPS


def _count_passes(entries: Sequence[CatalogEntry]) -> str:
    default = sum(entry.runs == "default" for entry in entries)
    number = "one pass" if len(entries) == 1 else f"{len(entries)} passes"
    return number + (f", {default} by default" if default else "")


def _print_row(entry: CatalogEntry, page: _PassPage) -> None:
    style, groups = STYLES.get(entry.runs, ""), ", ".join(entry.groups)
    row = f"{entry.name:<{NAME}} {entry.runs:<8} {entry.reads:<10}"
    page.line([(f"{row} ", style), (groups, f"{style} cyan".strip())] if groups else row.rstrip(), style)
    words = [_sentence(entry.does)]
    if entry.note:
        words.append(_sentence(entry.note))
    if entry.destroys:
        words.append(f"May destroy: {', '.join(entry.destroys)}.")
    page.words(" ".join(words), indent=4)


def _runs(entry: CatalogEntry) -> str:
    step, inside, bare = entry.name.rpartition("/")
    if entry.runs in ("never", "missing"):
        return entry.note
    if inside and entry.runs == "default":
        return f"each time that {step} runs, unless `skip` names it"
    if inside:
        return f"only where a recipe asks for it: {{{step}: {{extra_optimizers: [{bare}]}}}}"
    if entry.runs == "default":
        word = "wherever a recipe says `default`" if entry.source == SINGLE_PASS_LIBRARY else "in the default recipe"
        return f"{word}, and wherever a recipe names it"
    return "only where a recipe names it"


def _destroys(entry: CatalogEntry) -> str:
    if not entry.destroys:
        return "nothing that onnxline knows of"
    if entry.bare not in DESTROYS:
        return f"{', '.join(entry.destroys)}, each by a pass inside of it: `onnxline passes` lists these"
    return f"{', '.join(entry.destroys)}; to skip it watches these, whatever destroys them under another name"


def _left_behind(count: int) -> str:
    if count == 1:
        return "One operator is left that nothing reads; eliminate_deadend removes it."
    return f"{count} operators are left that nothing reads; eliminate_deadend removes them."


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


STEPS: Final = "steps of a recipe"

NAME: Final = 46
"""Width of the longest name today: onnxsim/fuse_matmul_add_bias_into_gemm_batched."""

KEY: Final = 11
"""Width of the keys that `show` writes before facts."""

STYLES: Final[Mapping[str, str]] = {"default": "green", "never": "dim", "missing": "yellow"}

READS: Final[Mapping[str, str]] = {
    "structure": "structure: operators, attributes, shapes, constants such as axes; never what is in a weight",
    "values": "values: the numbers in weights",
}
