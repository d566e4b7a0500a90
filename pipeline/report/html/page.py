"""What `report.html` shows, as data; and as HTML: one text that loads nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from passes.proof.coverage import Coverage, LimitCoverage, TableCoverage
from passes.proof.numbers import DRAWN, Errors
from passes.suggest import bytes_text, milliseconds_text, plural
from passes.visible import visible, visible_data
from pipeline.argument_checks import a, expects
from pipeline.errors import SourceError
from pipeline.planning import decode_plans
from pipeline.report.arena_picture import draw_arena
from pipeline.report.html.curves import LayerPlot, TrainingView, duration_text, layer_plot, training_view
from pipeline.report.html.figures import Group, groups_of
from pipeline.report.html.headline import (
    Headline,
    NameTable,
    QuantizationView,
    headline_of,
    name_tables,
    percent_text,
    quantization_view,
    ratio_text,
    role_of,
)
from pipeline.report.html.timeline import Timeline, error_text, seconds_text, timeline_of, worst_of
from pipeline.report.model import NodeRow, Pictures, Quantization, Report


@dataclass(frozen=True, slots=True)
class Page:
    """`facts` are small tables by title: label → text. `data` is what the page's script reads."""

    headline: Headline
    timeline: Timeline
    groups: tuple[Group, ...]
    nodes: int
    facts: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]
    favicon: str
    data: Mapping[str, Any]
    layers: LayerPlot | None
    quantization: QuantizationView | None
    memory: Markup | None
    """The arena over time as a picture; None where the run has no plan."""
    names: tuple[NameTable, ...] = ()
    training: TrainingView | None = None


def page_of(report: Report, pictures: Pictures, folder: Path, quantization: Quantization | None = None) -> Page:
    """The page of a report. `folder` is that of the run, with the diffs of its passes; missing ones are left out.

    Args:
        quantization: what `onnxline quantsim` has found of the final model.
    """
    timeline = timeline_of(report, folder)
    groups = groups_of(report.structures, report.passes, pictures)
    names = [[row.names for row in group.rows] for group in groups]
    facts = {
        "export": _export(report),
        "coverage": _coverage(report.coverage),
        "backends": _backends(report),
        "time": {stage: seconds_text(seconds) for stage, seconds in report.seconds.items()},
        "versions": report.versions,
    }
    headline = headline_of(report, timeline)
    return Page(
        headline=headline,
        timeline=timeline,
        groups=groups,
        nodes=len(pictures.nodes),
        facts={title: table for title, table in facts.items() if table},
        notes=tuple(dict.fromkeys((*report.notes, *(report.export.notes if report.export else ())))),
        favicon=favicon_of(headline.tone),
        data={"nodes": _pack_nodes(pictures.nodes, pictures.values), "names": names},
        layers=layer_plot(report.layers),
        quantization=quantization_view(quantization),
        names=name_tables(report.names),
        training=training_view(report.training),
        memory=_memory(report, folder, pictures.nodes),
    )


def _memory(report: Report, folder: Path, nodes: Sequence[NodeRow]) -> Markup | None:
    """The picture of the plan that this run has written; none of an earlier one, or of one that was taken away."""
    written = [name for name, _, _ in report.runtime.files] if report.runtime is not None else []
    path = folder / "plan.bin"
    if path.name not in written or not path.is_file():
        return None
    try:
        plans = decode_plans(path.read_bytes()).entries
    except SourceError:
        return None
    modules = {name: node.module for node in nodes if node.module for name in node.outputs}
    return Markup("").join(Markup(draw_arena(plan, modules)) for plan in plans.values())


def favicon_of(tone: str) -> str:
    """A disc in the colour of the verdict, with its sign."""
    colour, sign = FAVICONS[tone]
    return "data:image/svg+xml," + quote(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
        f'<circle cx="16" cy="16" r="15" fill="{colour}"/>'
        f'<path d="{sign}" fill="none" stroke="#fff" stroke-width="4" stroke-linecap="round"/></svg>',
        safe=" ='",
    )


FAVICONS: Final = {
    "good": ("#1b7650", "M9 17l5 5 9-11"),
    "warn": ("#b26b12", "M16 8v10M16 24v.1"),
    "bad": ("#b3352b", "M10 10l12 12M22 10L10 22"),
}


def _export(report: Report) -> dict[str, str]:
    if report.export is None:
        return {}
    worst = worst_of([report.export.errors])
    labels = {
        "origin": report.export.origin,
        "opset": str(report.export.opset),
        "inputs": "; ".join(report.export.inputs),
        "outputs": ", ".join(report.export.outputs),
        "compared on": "; ".join(report.export.draws),
        "error": error_text(worst[1]) if worst else "",
        "tolerances": _tolerances(report.export.errors),
    }
    return {label: text for label, text in labels.items() if text}


def _tolerances(errors: Mapping[str, Errors]) -> str:
    """`of float32: y, z; only dtype and shape, since they depend on random numbers: noise`."""
    names: dict[str, list[str]] = {}
    for name, error in errors.items():
        names.setdefault(error.judged_as, []).append(name)
    random = "only dtype and shape, since they depend on random numbers"
    return "; ".join(
        f"{random if dtype == DRAWN else f'of {dtype}'}: {', '.join(outputs)}"
        for dtype, outputs in names.items()
        if dtype
    )


def _backends(report: Report) -> dict[str, str]:
    if report.runtime is None:
        return {}
    facts: dict[str, str] = {}
    for backend in report.runtime.backends:
        worst = worst_of([backend.errors])
        error = f"error {error_text(worst[1])}, " if worst else ""
        facts[backend.name] = backend.shortfall or f"{error}{milliseconds_text(backend.seconds)} a run"
        if backend.native_calls:
            facts["kernels in C++"] = f"{plural(backend.native_calls, 'call')}, built by the compiler of this machine"
    if report.runtime.ops:
        counts = {"ops": report.runtime.ops, "values": report.runtime.values, "aliases": report.runtime.aliases}
        facts["IR and plan"] = ", ".join(f"{count:,} {what}" for what, count in counts.items())
        facts["arena"] = bytes_text(report.runtime.arena_bytes)
    if report.runtime.packed_bytes:
        facts["packed weights"] = bytes_text(report.runtime.packed_bytes)
    if report.sensitivity is not None and report.sensitivity.blind:
        facts["blind"] = ", ".join(report.sensitivity.blind)
    return facts


HERE: Final = Path(__file__).parent


@expects(page=a(Page, "a Page, as page_of makes"))
def render(page: Page) -> str:
    """Render the page. Every text is escaped; the script's JSON holds no `<` that could end it."""
    template = environment().get_template("page.html.j2")
    return visible(template.render(page=page, style=read_asset("page.css"), script=read_asset("page.js")))


@cache
def environment() -> Environment:
    """Made once, since it keeps the compiled templates: a run writes its page more than once."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"db": ratio_text, "percent": percent_text, "role": role_of, "duration": duration_text}
    environment.globals["infinity"] = math.inf
    environment.policies["json.dumps_function"] = lambda data, **settings: json.dumps(visible_data(data), **settings)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment


def read_asset(name: str) -> Markup:
    """Read a file next to this one, which needs no escaping."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


MOST_NOTES: Final = 12
"""Of what is not covered; `report.json` has all."""


def _coverage(coverage: Coverage | None) -> dict[str, str]:
    """What the draws of the proof have covered."""
    if coverage is None or not coverage.draws:
        return {}
    facts = (
        {"verify.inputs": f"{len(coverage.given)} of {plural(len(coverage.draws), 'draw')}"} if coverage.given else {}
    )
    facts |= {f"size of {name or 'unnamed dims'}": _join_numbers(sizes) for name, sizes in coverage.sizes.items()}
    facts |= {f"mask {name}": ", ".join(kinds) for name, kinds in coverage.masks.items()}
    if coverage.outliers:
        facts["ten times their range"] = ", ".join(coverage.outliers)
    facts |= {f"table {table.name}": _table(table) for table in coverage.tables}
    if coverage.branches:
        taken = sum(branch.then_taken + branch.else_taken for branch in coverage.branches)
        facts["branches of If"] = f"{taken} of {2 * len(coverage.branches)} taken"
    facts |= {f"loop {loop.node}": f"{_join_numbers(sorted(set(loop.turns)))} turns" for loop in coverage.loops}
    facts |= _limits(coverage.limits)
    notes = coverage.not_covered
    more = f"; and {len(notes) - MOST_NOTES} more in report.json" if len(notes) > MOST_NOTES else ""
    facts["not covered"] = "; ".join(notes[:MOST_NOTES]) + more or "nothing that is known"
    return facts


def _join_numbers(numbers: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, numbers))


def _table(table: TableCoverage) -> str:
    if table.read is None:
        return f"{table.rows:,} rows, inside of a body; compared as a weight" if table.compared else "inside of a body"
    rest = "; the others compared as a weight" if table.compared else ""
    return f"{table.read:,} of {table.rows:,} rows read{rest if table.read < table.rows else ''}"


def _limits(limits: tuple[LimitCoverage, ...]) -> dict[str, str]:
    """By operator: how many of its limits were reached."""
    total: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    for limit in limits:
        sides = [side for side in (limit.below, limit.above) if side is not None]
        total[limit.op] += len(sides)
        reached[limit.op] += sum(sides)
    return {f"limits of {op}": f"{reached[op]} of {count} reached" for op, count in total.items()}


def _pack_nodes(nodes: Sequence[NodeRow], values: Mapping[str, str]) -> dict[str, Any]:
    """Pack the nodes for the script: `words` holds every text once, everything else is indices into it.

    A row is name, op, shapes, module, author, list of inputs, list of outputs. An author is empty for a node of the
    source; so is the module where none is known. `values` are pairs: a value that no node makes, its dtype and shape.
    """
    words: dict[str, int] = {}

    def place(text: str) -> int:
        return words.setdefault(text, len(words))

    rows = [
        [
            *(place(text) for text in (node.name, node.op, ", ".join(node.shapes), node.module or "", node.made_by)),
            [place(name) for name in node.inputs],
            [place(name) for name in node.outputs],
        ]
        for node in nodes
    ]
    types = [(place(name), place(shape)) for name, shape in values.items()]
    return {"words": list(words), "rows": rows, "values": types}
