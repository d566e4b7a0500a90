"""The page of a run in parts: a row and a tab for each part, and the errors of the chain of all parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from passes.proof.numbers import only_compared
from passes.visible import visible
from pipeline.report.chain import ChainQuantization
from pipeline.report.html.page import environment, favicon_of, read_asset
from pipeline.report.html.timeline import seconds_text
from pipeline.report.model import Report


@dataclass(frozen=True, slots=True)
class PartView:
    """One row of the table; `page` is the address of the part's own page."""

    name: str
    page: str
    verdict: str
    tone: str
    nodes: str
    kept: str
    worst: str
    seconds: str


def render_parts(report: Report, quantized: ChainQuantization | None = None) -> str:
    """The page as one text; it shows the pages of the parts in frames.

    Args:
        quantized: the chain of the quantized parts, where `onnxline quantsim` has made one.
    """
    tone = "bad" if report.failure else "good"
    shown = {"parts": list(_views(report)), "tone": tone, "style": read_asset("page.css"), "favicon": favicon_of(tone)}
    return visible(environment().get_template("parts.html.j2").render(report=report, quantized=quantized, **shown))


def _views(report: Report) -> Iterator[PartView]:
    for name, part in report.parts.items():
        errors = [
            error.max_abs
            for backend in (part.runtime.backends if part.runtime else ())
            for error in only_compared(backend.errors).values()
        ]
        kept = sum(verdict.kept for verdict in part.structures)
        before = part.export.nodes if part.export else 0
        after = sum(part.marks[-1].ops.values()) if part.marks else before
        yield PartView(
            name=name,
            page=f"parts/{quote(name)}/report.html",
            verdict="failed" if part.failure else "done",
            tone="bad" if part.failure else "good",
            nodes=f"{before:,} → {after:,}",
            kept=f"{kept} of {len(part.structures)}" if part.structures else "–",
            worst=f"{max(errors):.1e}" if errors else "–",
            seconds=seconds_text(report.seconds.get(name, 0.0)),
        )
