"""Questions about models.

`onnxline diff A.onnx B.onnx` says how the second model differs, by structure and by numbers. `onnxline why MODEL NAME`
says which torch module a node or a weight comes from, and which pass made it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

from passes.context import limit_runs, open_context
from passes.diff import (
    Diff,
    LayerErrors,
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
    summarize,
)
from passes.errors import PassError, PolicyError
from passes.load import load_model
from passes.proof.numbers import DRAWN, only_compared
from passes.provenance.annotations import MISSING, is_stripped
from passes.suggest import plural
from passes.tools.comparison import compare_matching
from passes.visible import text_table, visible_line
from passes.weights.detached import read_model
from passes.why import MergedNode, Origin, WeightOrigin, file_of, why_merged, why_weights
from passes.why import why as why_nodes
from pipeline.commands.github import Format, annotate, check_form
from pipeline.commands.shared import (
    FORMAT_VERSION,
    PARTS,
    add_command,
    folder_of_part,
    locate_parts,
    part_names,
    print_styled,
)
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
    Two runs in parts are compared part by part; --part names a single part.
    """
    if structure_only and (layers or values or draws is not None):
        raise UsageError("--structure-only runs no model, and --layers, --values and --draws need runs; leave them out")
    if most is not None and (everything or as_json):
        option = "--all" if everything else "--json"
        raise UsageError(f"{option} writes out every entry, so --most has no effect; leave one of them out")
    check_form(form, json=as_json, names=names, most=most is not None, all=everything)
    wish = DiffWish(layers, values, structure_only, draws)
    sides = [part_names(path) for path in (before, after)]
    if part is None and all(sides):
        found: FileDiff | PartsDiff = PartsDiff.of(before, after, wish)
    else:
        first, second = locate_parts((before, after), part)
        found = FileDiff.of(first, second, wish)
    if form == "github":
        annotate("onnxline diff", ("section", "what differs"), list(found.rows()), file=after)
    elif as_json:
        print_json({"format_version": FORMAT_VERSION, **found.as_data()})
    else:
        print_styled(found.text(names, None if everything else most or MOST), STYLES)
    if found.is_different:
        raise typer.Exit(DIFFERENT)


@dataclass(frozen=True, slots=True)
class DiffWish:
    """What is compared besides the structure; see the options of the command."""

    layers: bool = False
    values: bool = False
    structure_only: bool = False
    draws: int | None = None


@dataclass(frozen=True, slots=True)
class FileDiff:
    """How the second of two files differs from the first.

    Args:
        found: the differences of the structure.
        nodes: how many nodes each file has.
        numbers: the differences of the outputs; None where nothing was run.
        table: the differences layer by layer, where `--layers` asks for them.
        why: why the models could not be compared by numbers.
    """

    found: Diff
    nodes: tuple[int, int]
    numbers: Numbers | None = None
    table: Sequence[LayerErrors] | None = None
    why: str = ""

    @classmethod
    def of(cls, before: Path, after: Path, wish: DiffWish) -> FileDiff:
        """Compare two files, or the models of two runs."""
        first, second = (read_model(file_of(path)) for path in (before, after))
        matched = match_models(first, second)
        found, nodes = compare_matched(matched), (len(first.proto.graph.node), len(second.proto.graph.node))
        # The same operators on the same values compute the same.
        if not (wish.layers or wish.values) and (wish.structure_only or found.is_empty):
            return cls(found, nodes)
        try:
            with open_context() as context, limit_runs(context, first):
                drawn = draw_inputs(matched, context, wish.draws)
                if wish.layers:
                    compared = compare_matching(matched, drawn, context, values=wish.values)
                    return cls(found, nodes, compared.numbers, compared.layers)
                return cls(found, nodes, compare_numbers(matched, drawn, context, values=wish.values))
        except PassError as error:
            return cls(found, nodes, why=str(error))

    @property
    def is_different(self) -> bool:
        return not self.found.is_empty

    def text(self, names: bool, most: int | None) -> str:
        text = diff_text(self.found, names=names, most=most) + numbers_text(self.numbers, self.why, most=most)
        return text + (layers_text(self.table, most=most and most * ROWS) if self.table is not None else "")

    def as_data(self) -> dict[str, Any]:
        layers = {} if self.table is None else {"layers": layers_as_data(self.table)}
        return {**diff_as_data(self.found), **numbers_as_data(self.numbers, self.why), **layers}

    def rows(self) -> Iterator[tuple[str, str]]:
        """The differences, and the outputs that are out of tolerance, by section."""
        for name, entries in self.found.sections().items():
            yield from ((name, str(entry)) for entry in entries)
        for name, errors in self.numbers.outputs.items() if self.numbers is not None else ():
            if not errors.ok:
                yield "output", f"{name}: {errors.why}"


@dataclass(frozen=True, slots=True)
class PartsDiff:
    """How the parts of two runs differ; `alone`: a part that only one of both has → the folder of that run."""

    parts: Mapping[str, FileDiff]
    alone: Mapping[str, Path]

    @classmethod
    def of(cls, before: Path, after: Path, wish: DiffWish) -> PartsDiff:
        """Compare each part that both runs have.

        Raises:
            UsageError: they have no part in common.
        """
        first, second = part_names(before), part_names(after)
        both = [name for name in first if name in second]
        if not both:
            listings = ", ".join(first), ", ".join(second)
            raise UsageError(
                f"{before} has the parts {listings[0]}, and {after} has {listings[1]}: expected a part that both have; "
                f"name two models, such as {before / PARTS / first[0]} and {after / PARTS / second[0]}"
            )
        alone = {name: before for name in first if name not in both}
        alone |= {name: after for name in second if name not in both}
        parts = {name: FileDiff.of(before / PARTS / name, after / PARTS / name, wish) for name in both}
        return cls(parts, alone)

    @property
    def is_different(self) -> bool:
        return bool(self.alone) or any(part.is_different for part in self.parts.values())

    def text(self, names: bool, most: int | None) -> str:
        """A row for each part, then each part by itself."""
        rows = [("part", "nodes", "what differs", "max error of an output")]
        for name, part in self.parts.items():
            outputs = only_compared(part.numbers.outputs) if part.numbers is not None else {}
            worst = max((errors.max_abs for errors in outputs.values()), default=None)
            error = "" if worst is None else f"{worst:.3g}"
            rows.append((name, f"{part.nodes[0]} → {part.nodes[1]}", summarize(part.found), error))
        rows += [(name, "", f"only {folder} has this part", "") for name, folder in self.alone.items()]
        sections = [f"\npart {name}: {part.text(names, most)}" for name, part in self.parts.items()]
        return f"{plural(len(rows) - 1, 'part')}\n{text_table(rows)}{''.join(sections)}"

    def as_data(self) -> dict[str, Any]:
        parts = {name: part.as_data() for name, part in self.parts.items()}
        alone = {name: str(folder) for name, folder in self.alone.items()}
        return {"different": self.is_different, "parts": parts, "only_in": alone}

    def rows(self) -> Iterator[tuple[str, str]]:
        for name, folder in self.alone.items():
            yield f"part {name}", f"only {folder} has this part"
        for name, part in self.parts.items():
            yield from ((f"part {name}: {section}", text) for section, text in part.rows())


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
    rows = _rows_next_to(file_of(model))
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


def _rows_next_to(model: Path) -> list[dict[str, Any]]:
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
