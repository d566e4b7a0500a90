"""The data that `report.html` shows, and the page itself: one HTML text that loads nothing from elsewhere."""

from __future__ import annotations

import json
import math
import os
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from passes.proof.numbers import DRAWN, Errors
from passes.suggest import bytes_text, milliseconds_text, plural
from passes.viewer import render as render_view
from passes.visible import visible, visible_data
from pipeline.argument_checks import a, expects
from pipeline.errors import SourceError
from pipeline.report.html.curves import LayerPlot, TrainingView, duration_text, layer_plot, training_view
from pipeline.report.html.figures import Group, groups_of
from pipeline.report.html.headline import Headline, NameTable, headline_of, name_tables
from pipeline.report.html.quantization import QuantizationView, percent_text, quantization_view, ratio_text, role_of
from pipeline.report.html.timeline import Timeline, error_text, seconds_text, timeline_of, worst_of
from pipeline.report.model import NodeRow, Pictures, Quantization, Report


@dataclass(frozen=True, slots=True)
class Page:
    """`data` is what the page's script reads."""

    report: Report
    headline: Headline
    timeline: Timeline
    groups: tuple[Group, ...]
    nodes: int
    notes: tuple[str, ...]
    favicon: str
    data: Mapping[str, Any]
    layers: LayerPlot | None
    quantization: QuantizationView | None
    view: str
    """The page of the graph viewer, packed by zlib and base64; empty where there is none."""
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
    headline = headline_of(report, timeline)
    return Page(
        report=report,
        headline=headline,
        timeline=timeline,
        groups=groups,
        nodes=len(pictures.nodes),
        view=_pack_viewer(pictures.view),
        notes=tuple(dict.fromkeys((*report.notes, *(report.export.notes if report.export else ())))),
        favicon=favicon_of(headline.tone),
        data={"nodes": _pack_nodes(pictures.nodes, pictures.values), "names": names},
        layers=layer_plot(report.layers),
        quantization=quantization_view(quantization),
        names=name_tables(report.names),
        training=training_view(report.training),
        memory=_memory(report, folder, pictures.nodes),
    )


def _pack_viewer(view: str) -> str:
    """The viewer's page of the models that `view` packs; the script of the report unpacks and shows it when asked."""
    if not view:
        return ""
    page = render_view(json.loads(zlib.decompress(b64decode(view))))
    return b64encode(zlib.compress(page.encode())).decode()


def _memory(report: Report, folder: Path, nodes: Sequence[NodeRow]) -> Markup | None:
    """The picture of the plan that this run has written; no picture of an earlier plan, or of a removed plan."""
    written = [name for name, _, _ in report.runtime.files] if report.runtime is not None else []
    path = folder / "plan.bin"
    if path.name not in written or not path.is_file():
        return None
    from pipeline.planning import decode_plans  # the planner, which a run without a plan does not import
    from pipeline.report.arena_picture import draw_arena

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


def _tolerances(errors: Mapping[str, Errors]) -> str:
    """`of float32: y, z; only dtype and shape, since they depend on random values: noise`."""
    names: dict[str, list[str]] = {}
    for name, error in errors.items():
        names.setdefault(error.judged_as, []).append(name)
    random = "only dtype and shape, since they depend on random values"
    return "; ".join(
        f"{random if dtype == DRAWN else f'of {dtype}'}: {', '.join(outputs)}"
        for dtype, outputs in names.items()
        if dtype
    )


HERE: Final = Path(__file__).parent


@expects(page=a(Page, "a Page, as page_of makes"))
def render(page: Page) -> str:
    """Render the page. Every text is escaped; the script's JSON holds no `<` that could end it."""
    template = environment().get_template("page.html.j2")
    return visible(template.render(page=page, style=read_asset("page.css"), script=read_asset("page.js")))


def _bytecode_cache() -> FileSystemBytecodeCache | None:
    """Compiled templates next to Python's own bytecode, where that is written: to compile them takes 0.1 s a run."""
    folder = Path(cache_from_source(__file__)).parent
    is_kept = not sys.dont_write_bytecode and os.access(folder, os.W_OK)
    return FileSystemBytecodeCache(str(folder)) if is_kept else None


@cache
def environment() -> Environment:
    """Made once, since it keeps the compiled templates: a run writes its page more than once."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        bytecode_cache=_bytecode_cache(),
    )
    environment.filters |= FILTERS
    environment.globals |= {"infinity": math.inf, "plural": plural}
    environment.policies["json.dumps_function"] = lambda data, **settings: json.dumps(visible_data(data), **settings)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment


FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "bytes": bytes_text,
    "db": ratio_text,
    "duration": duration_text,
    "error": error_text,
    "milliseconds": milliseconds_text,
    "percent": percent_text,
    "role": role_of,
    "seconds": seconds_text,
    "tolerances": _tolerances,
    "worst": worst_of,
}
"""The filters by which the templates format values."""


def read_asset(name: str) -> Markup:
    """Read a file next to this one, which needs no escaping."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


def _pack_nodes(nodes: Sequence[NodeRow], values: Mapping[str, str]) -> dict[str, Any]:
    """Pack the nodes for the script: `words` holds every text once, everything else is indices into it.

    A row is name, op, shapes, module, author, list of inputs, list of outputs. An author is empty for a node of the
    source; so is the module where none is known. `values` are pairs: a value that no node makes, its dtype and shape.
    """
    words: dict[str, int] = {}

    def intern(text: str) -> int:
        return words.setdefault(text, len(words))

    rows = [
        [
            *(intern(text) for text in (node.name, node.op, ", ".join(node.shapes), node.module or "", node.made_by)),
            [intern(name) for name in node.inputs],
            [intern(name) for name in node.outputs],
        ]
        for node in nodes
    ]
    types = [(intern(name), intern(shape)) for name, shape in values.items()]
    return {"words": list(words), "rows": rows, "values": types}
