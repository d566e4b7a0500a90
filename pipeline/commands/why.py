"""`onnxline why MODEL NODE`: which torch module a node comes from, and which pass made it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import passes
from passes.why import Origin, file_of

__all__ = ["FORMAT_VERSION", "register"]

FORMAT_VERSION: Final = 1
"""Of what `--json` writes."""

REPORT: Final = "report.json"

NO_TORCH: Final = "unknown (the source is an ONNX file without torch metadata)"


def register(app: typer.Typer) -> None:
    app.command("why")(why)


def why(
    model: Annotated[Path, typer.Argument(help="An ONNX file, or the folder of a run.")],
    node: Annotated[str, typer.Argument(help="A node, a value that it makes, or a glob over both.")],
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> None:
    """Say which torch module a node comes from, which line of it, and which pass made the node.

    Where the report of the run lies beside the model, the pass is shown with its status and its errors.
    """
    found = passes.why(model, node)
    rows = _rows_beside(file_of(model))
    if as_json:
        nodes = [{**dataclasses.asdict(one), "steps": _steps(one, rows)} for one in found]
        typer.echo(json.dumps({"format_version": FORMAT_VERSION, "nodes": nodes}, indent=2, ensure_ascii=False))
        return
    for number, one in enumerate(found):
        if number:
            typer.echo()
        for line in _lines(one, _steps(one, rows)):
            typer.echo(line)


def _rows_beside(model: Path) -> list[dict[str, Any]]:
    """The pass rows of the report that lies beside the model; none if there is none that can be read."""
    try:
        rows = json.loads((model.parent / REPORT).read_text(encoding="utf-8"))["passes"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _steps(origin: Origin, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of the run that made or changed the node. A pass may have run more than once."""
    authors = (origin.made_by, *origin.changed_by)
    return [row for row in rows if row.get("name") in authors and row.get("changed") and row.get("status") == "ran"]


def _lines(origin: Origin, steps: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{origin.op} {origin.name or '(no name)'}"
    told = {
        "inside of": " › ".join(origin.within),
        "inputs": ", ".join(name or "(none)" for name in origin.inputs),
        "outputs": ", ".join(name or "(none)" for name in origin.outputs),
        "module": _module(origin),
        "code": origin.code,
        "made by": _maker(origin),
        "changed by": ", ".join(origin.changed_by),
    }
    for what, text in told.items():
        if text:
            yield f"  {what:<10}  {text}"
    for row in steps:
        yield f"  {'step':<10}  {_step(row)}"


def _module(origin: Origin) -> str:
    if origin.module is None:
        return NO_TORCH
    kinds = " › ".join(one.rpartition(".")[2] for one in origin.classes)
    if not origin.module:
        return f"{kinds or 'the model'} (the model itself)"
    return f"{origin.module} ({kinds})" if kinds else origin.module


def _maker(origin: Origin) -> str:
    if not origin.made_by:
        return "no pass: it comes from the " + ("source" if origin.module is None else "export")
    if not origin.replaced:
        return f"{origin.made_by}, between other nodes"
    more = origin.replaced_count - len(origin.replaced)
    return f"{origin.made_by}, in place of {', '.join(origin.replaced)}" + (f" and {more} more" if more else "")


def _step(row: dict[str, Any]) -> str:
    """One line, such as `onnxsim ran, without fuse_qkv: 295 → 99 nodes, max error 1.2e-07 in logits`."""
    reason = f", {row['reason']}" if row.get("reason") else ""
    text = f"{row['name']} {row['status']}{reason}: {row.get('nodes_before')} → {row.get('nodes_after')} nodes"
    errors = {name: float(one["max_abs"]) for name, one in row.get("errors", {}).items() if "max_abs" in one}
    if not errors:
        return text
    worst = max(errors, key=lambda name: errors[name])
    return f"{text}, max error {errors[worst]:.1e} in {worst}"
