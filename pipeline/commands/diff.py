"""Questions about models.

`onnxline diff A.onnx B.onnx` says how the second model differs, by structure and by numbers. `onnxline why MODEL NAME`
says which torch module a node or a weight comes from, and which pass made it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer

from passes.context import limit_runs, open_context
from passes.diff import (
    Diff,
    Numbers,
    compare_matched,
    compare_numbers,
    diff_as_data,
    diff_text,
    draw_inputs,
    layers_as_data,
    layers_text,
    match_models,
    numbers_as_data,
    numbers_text,
)
from passes.errors import PassError, PolicyError
from passes.load import load_model
from passes.proof.numbers import DRAWN
from passes.provenance.annotations import MISSING, is_stripped
from passes.suggest import plural
from passes.tools.comparison import compare_matching
from passes.visible import visible_line
from passes.weights.detached import read_model
from passes.why import MergedNode, Origin, WeightOrigin, file_of, why_merged, why_weights
from passes.why import why as why_nodes
from pipeline.commands.github import Format, annotate
from pipeline.commands.shared import FORMAT_VERSION, add_command, folder_of_part, locate_parts, print_styled
from pipeline.errors import UsageError
from pipeline.terminal import print_json

MOST: Final = 20
"""Entries of one kind that are written out by default."""

DIFFERENT: Final = 1
"""Exit code when there is a difference."""


def register(app: typer.Typer) -> None:
    add_command(app, "diff", diff)
    add_command(app, "why", why)


def diff(
    before: Path,
    after: Path,
    layers: bool = False,
    values: bool = False,
    structure_only: bool = False,
    names: bool = False,
    most: int | None = None,
    everything: bool = False,
    draws: int | None = None,
    part: str | None = None,
    form: Format = "text",
    as_json: bool = False,
) -> None:
    """Compare B with A, by structure and by numbers; the exit code is 1 if they differ.

    Nodes are matched by what they compute: other names and another order of independent nodes are no difference.
    """
    if structure_only and (layers or values or draws is not None):
        raise UsageError("--structure-only runs no model, and --layers, --values and --draws need runs; leave them out")
    if most is not None and (everything or as_json):
        option = "--all" if everything else "--json"
        raise UsageError(f"{option} writes out every entry, so --most has no effect; leave one of them out")
    sides = locate_parts((before, after), part)
    first, second = (read_model(file_of(path)) for path in sides)
    matched = match_models(first, second)
    found = compare_matched(matched)
    numbers, table, why = None, None, ""
    # The same operators on the same values compute the same.
    if layers or values or not (structure_only or found.is_empty):
        try:
            with open_context() as context, limit_runs(context, first):
                drawn = draw_inputs(matched, context, draws)
                if layers:
                    compared = compare_matching(matched, drawn, context, values=values)
                    numbers, table = compared.numbers, compared.layers
                else:
                    numbers = compare_numbers(matched, drawn, context, values=values)
        except PassError as error:
            why = str(error)
    if form == "github":
        annotate("onnxline diff", ("section", "what differs"), list(_github_rows(found, numbers)), file=after)
    elif as_json:
        data = {"format_version": FORMAT_VERSION, **diff_as_data(found), **numbers_as_data(numbers, why)}
        if table is not None:
            data["layers"] = layers_as_data(table)
        print_json(data)
    else:
        cut = None if everything else most or MOST
        text = diff_text(found, names=names, most=cut) + numbers_text(numbers, why, most=cut)
        print_styled(text + (layers_text(table, most=cut and cut * ROWS) if table is not None else ""), STYLES)
    if not found.is_empty:
        raise typer.Exit(DIFFERENT)


def _github_rows(found: Diff, numbers: Numbers | None) -> Iterator[tuple[str, str]]:
    """The differences, and the outputs that are out of tolerance, by section."""
    for name, entries in found.sections().items():
        yield from ((name, str(entry)) for entry in entries)
    for name, errors in numbers.outputs.items() if numbers is not None else ():
        if not errors.ok:
            yield "output", f"{name}: {errors.why}"


ROWS: Final = 5
"""Rows of the table of layers for each entry that `--most` allows: a row is short."""

STYLES: Final = {"  added": "green", "  removed": "red", "  ": "", "no difference": "green", "": "bold"}
"""How a line begins → its style on a terminal."""


MODULE: Final = "module:"

REPORT: Final = "report.json"

READERS: Final = 6
"""Readers of a weight that are listed."""

WHY_STYLES: Final = {"  step": "dim", "  ": "", "": "bold"}
"""How a line begins → its style on a terminal."""

UNKNOWN: Final = ("  module", "  made by")
"""How the lines begin that only metadata could fill."""

NO_TORCH: Final = "unknown (the source is an ONNX file without torch metadata)"


def why(model: Path, name: str, part: str | None = None, as_json: bool = False) -> None:
    """Say which torch module a node or a weight comes from, which line of it, and which pass made it.

    Where `report.json` of the run is next to the model, the pass is shown with its status and its errors.
    """
    model = folder_of_part(model, part)
    proto = load_model(file_of(model), may_be_empty=True)
    merged = why_merged(model, name.removeprefix(MODULE)) if name.startswith(MODULE) else ()
    try:
        nodes, weights = why_nodes(proto, name), ()
    except PolicyError:
        nodes, weights = (), why_weights(proto, name)
        if not weights and not merged:
            raise
    stripped = is_stripped(proto)
    rows = _rows_beside(file_of(model))
    if as_json:
        entries = [
            {**dataclasses.asdict(origin), "steps": _steps(_authors(origin), rows)} for origin in (*nodes, *weights)
        ]
        kind = "weights" if weights else "nodes"
        data = {"format_version": FORMAT_VERSION, kind: entries, **({"missing": MISSING} if stripped else {})}
        if merged:
            data["merged"] = [dataclasses.asdict(origin) for origin in merged]
        print_json(data)
        return
    texts = [list(lines) for lines in (*map(_node_lines, nodes), *map(_weight_lines, weights))]
    if stripped:  # no metadata does not mean that a node comes from the source
        texts = [[line for line in lines if not line.startswith(UNKNOWN)] for lines in texts]
    steps = [
        [f"  {'step':<10}  {_step(row)}" for row in _steps(_authors(origin), rows)] for origin in (*nodes, *weights)
    ]
    blocks = ["\n".join(map(visible_line, [*lines, *more])) for lines, more in zip(texts, steps, strict=True)]
    if merged:
        title = f"{plural(len(merged), 'node')} of {name.removeprefix(MODULE)} merged into others, or removed:"
        blocks.append("\n".join(map(visible_line, [title, *map(_merged_line, merged)])))
    blocks += [MISSING] if stripped else []
    print_styled("\n\n".join(blocks) + "\n", WHY_STYLES)


def _rows_beside(model: Path) -> list[dict[str, Any]]:
    """The pass rows of `report.json` next to the model; none where no such file can be read."""
    try:
        rows = json.loads((model.parent / REPORT).read_text(encoding="utf-8"))["passes"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _authors(origin: Origin | WeightOrigin) -> tuple[str, ...]:
    return (origin.made_by, *(origin.changed_by if isinstance(origin, Origin) else ()))


def _steps(authors: Sequence[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of the run that made or changed the node. A pass may have run more than once."""
    return [row for row in rows if row.get("name") in authors and row.get("changed") and row.get("status") == "ran"]


def _node_lines(origin: Origin) -> list[str]:
    said = {
        "inside of": " › ".join(origin.within),
        "inputs": ", ".join(name or "(none)" for name in origin.inputs),
        "outputs": ", ".join(name or "(none)" for name in origin.outputs),
        "module": _module(origin),
        "code": origin.code,
        "made by": _producer(origin),
        "changed by": ", ".join(origin.changed_by),
    }
    return [f"{origin.op} {origin.name or '(no name)'}", *_lines(said)]


def _merged_line(node: MergedNode) -> str:
    place = f"in {', '.join(node.into)}, by {node.made_by}" if node.into else "no node says that it stands in its place"
    return f"  {node.op} {node.name}: {place}"


def _weight_lines(origin: WeightOrigin) -> list[str]:
    more = origin.source_count - len(origin.sources)
    sources = ", ".join(origin.sources) + (f" and {more} more" if more else "")
    is_own = origin.sources == (origin.name,)
    others = len(origin.readers) - READERS
    made = ", ".join(filter(None, (origin.part and f"part {origin.part}", origin.form))) or "under another name"
    said = {
        "weight": sources if is_own or not sources else f"{sources}, {made}",
        "made by": origin.made_by or "no pass: it is the source's own",
        "read by": ", ".join(origin.readers[:READERS]) + (f" and {others} more" if others > 0 else ""),
    }
    return [f"initializer {origin.name} {origin.type}", *_lines(said)]


def _lines(said: Mapping[str, str]) -> Iterator[str]:
    return (f"  {what:<10}  {text}" for what, text in said.items() if text)


def _module(origin: Origin) -> str:
    if origin.module is None:
        return NO_TORCH
    kinds = " › ".join(name.rpartition(".")[2] for name in origin.classes)
    if not origin.module:
        return f"{kinds or 'the model'} (the model itself)"
    return f"{origin.module} ({kinds})" if kinds else origin.module


def _producer(origin: Origin) -> str:
    if not origin.made_by:
        return "no pass: it comes from the " + ("source" if origin.module is None else "export")
    if not origin.replaced:
        return f"{origin.made_by}, between other nodes"
    more = origin.replaced_count - len(origin.replaced)
    return f"{origin.made_by}, in place of {', '.join(origin.replaced)}" + (f" and {more} more" if more else "")


def _is_compared(errors: dict[str, Any]) -> bool:
    return "max_abs" in errors and errors.get("judged_as") != DRAWN


def _step(row: dict[str, Any]) -> str:
    """One line, such as `onnxsim ran, without fuse_qkv: 295 → 99 nodes, max error 1.2e-07 in logits`."""
    reason = f", {row['reason']}" if row.get("reason") else ""
    text = f"{row['name']} {row['status']}{reason}: {row.get('nodes_before')} → {row.get('nodes_after')} nodes"
    errors = {name: float(error["max_abs"]) for name, error in row.get("errors", {}).items() if _is_compared(error)}
    if not errors:
        return text
    worst = max(errors, key=lambda name: errors[name])
    return f"{text}, max error {errors[worst]:.1e} in {worst}"
