"""What `report.html` shows, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from passes.proof.numbers import DRAWN, Errors
from pipeline.report.html.coverage import coverage_facts
from pipeline.report.html.figures import Group, groups_of
from pipeline.report.html.headline import Headline, headline_of
from pipeline.report.html.layers import LayerPlot, layer_plot
from pipeline.report.html.nodes import packed
from pipeline.report.html.timeline import Timeline, timeline_of
from pipeline.report.html.words import bytes_text, error_text, seconds_text, worst_of
from pipeline.report.model import Report
from pipeline.report.pictures import Pictures

__all__ = ["Page", "page_of"]


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


def page_of(report: Report, pictures: Pictures, folder: Path) -> Page:
    """Args: folder: of the run, where the diffs of its passes lie; what is missing is left out."""
    timeline = timeline_of(report, folder)
    groups = groups_of(report.structures, pictures)
    names = [[row.names for row in group.rows] for group in groups]
    facts = {
        "export": _export(report),
        "coverage": coverage_facts(report.coverage),
        "notes": {str(place): text for place, text in enumerate(report.notes, 1)},
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
        facts={title: told for title, told in facts.items() if told},
        notes=tuple(dict.fromkeys((*report.notes, *(report.export.notes if report.export else ())))),
        favicon=_favicon(headline.tone),
        data={"nodes": packed(pictures.nodes, pictures.values), "names": names},
        layers=layer_plot(report.layers),
    )


def _favicon(tone: str) -> str:
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
    told = {
        "origin": report.export.origin,
        "opset": str(report.export.opset),
        "inputs": "; ".join(report.export.inputs),
        "outputs": ", ".join(report.export.outputs),
        "compared on": "; ".join(report.export.draws),
        "error": error_text(worst[1]) if worst else "",
        "tolerances": _tolerances(report.export.errors),
    }
    return {label: text for label, text in told.items() if text}


def _tolerances(errors: Mapping[str, Errors]) -> str:
    """`of float32: y, z; only dtype and shape, since they depend on random numbers: noise`."""
    names: dict[str, list[str]] = {}
    for name, one in errors.items():
        names.setdefault(one.judged_as, []).append(name)
    random = "only dtype and shape, since they depend on random numbers"
    return "; ".join(
        f"{random if dtype == DRAWN else f'of {dtype}'}: {', '.join(outputs)}"
        for dtype, outputs in names.items()
        if dtype
    )


def _backends(report: Report) -> dict[str, str]:
    if report.runtime is None:
        return {}
    told = {}
    for one in report.runtime.backends:
        worst = worst_of([one.errors])
        error = f"error {error_text(worst[1])}, " if worst else ""
        told[one.name] = one.shortfall or f"{error}{one.seconds:.3f} s a run"
    if report.runtime.ops:
        counts = {"ops": report.runtime.ops, "values": report.runtime.values, "aliases": report.runtime.aliases}
        told["IR and plan"] = ", ".join(f"{count:,} {what}" for what, count in counts.items())
        told["arena"] = bytes_text(report.runtime.arena_bytes)
    if report.sensitivity is not None and report.sensitivity.blind:
        told["blind"] = ", ".join(report.sensitivity.blind)
    return told
