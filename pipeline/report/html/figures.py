"""Structures by kind, with drawings; equal drawings share a figure, such as those of twelve layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from passes.run.result import StructureVerdict
from pipeline.report.html.layout import DrawingLayout, lay_out
from pipeline.report.model import Box, BoxKind, Drawing, Pictures, StructurePicture

SMALLEST: Final = 0.8
"""Scale at which a drawing can be read; `page.js` goes no lower."""

PADDING: Final = 28


@dataclass(frozen=True, slots=True)
class Panel:
    """One drawing. `weights` summarizes the matrices it multiplies by: `3 × 768×768`."""

    title: str
    note: str
    tone: str
    weights: str
    drawing: Drawing | None

    @property
    def laid_out(self) -> DrawingLayout | None:
        return lay_out(self.drawing) if self.drawing else None


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels that are compared: drawn to one scale, side by side if they stay readable."""

    panels: tuple[Panel, ...]

    @property
    def width(self) -> int:
        """Pixels that each panel needs to be readable."""
        widest = max((panel.laid_out.width for panel in self.panels if panel.laid_out), default=0)
        return round(max(320, widest * SMALLEST + PADDING))


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """`figure` is the place of its figure, or -1; `names` are those of the boxes there, a list for each panel."""

    name: str
    module: str
    kept: bool
    broken_by: str
    figure: int
    names: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The instances of one kind."""

    kind: str
    kept: int
    rows: tuple[InstanceRow, ...]
    figures: tuple[Figure, ...]


def groups_of(structures: Sequence[StructureVerdict], pictures: Pictures) -> tuple[Group, ...]:
    drawn = {(picture.kind, picture.name): picture for picture in pictures.structures}
    kinds = dict.fromkeys(verdict.kind for verdict in structures)
    return tuple(_group(kind, [verdict for verdict in structures if verdict.kind == kind], drawn) for kind in kinds)


def _group(kind: str, verdicts: Sequence[StructureVerdict], drawn: Mapping[tuple[str, str], StructurePicture]) -> Group:
    pictures = [drawn.get((verdict.kind, verdict.name)) for verdict in verdicts]
    figures: dict[Figure, int] = {}
    rows = []
    for verdict, picture in zip(verdicts, pictures, strict=True):
        place = figures.setdefault(_figure(picture, verdict), len(figures)) if picture else -1
        names = tuple(tuple(box.name for box in drawing.boxes) for drawing in _drawings(picture)) if picture else ()
        rows.append(InstanceRow(verdict.name, verdict.module, verdict.kept, verdict.broken_by or "", place, names))
    return Group(kind, sum(verdict.kept for verdict in verdicts), tuple(rows), tuple(figures))


def _drawings(picture: StructurePicture) -> list[Drawing]:
    return [drawing for drawing in (picture.before, picture.after, picture.broken) if drawing is not None]


def _figure(picture: StructurePicture, verdict: StructureVerdict) -> Figure:
    panels = [_panel("source", "as it was exported", "", picture.before)]
    if picture.after is None:
        panels.append(Panel("final model", "nothing there stands for it", "bad", "", None))
    else:
        tone = "good" if verdict.kept else "bad"
        note = "kept" if verdict.kept else f"lost to {verdict.broken_by}" if verdict.broken_by else "lost"
        panels.append(_panel("final model", note, tone, picture.after))
    if picture.broken is not None:
        panels.append(_panel("taken back", f"{picture.broken_by} had made this", "warn", picture.broken))
    return Figure(tuple(panels))


def _panel(title: str, note: str, tone: str, drawing: Drawing) -> Panel:
    shown = _nameless(drawing)
    return Panel(title, note, tone, _weights(shown), shown)


def _nameless(drawing: Drawing) -> Drawing:
    """The drawing without names, so that it is equal for similar structures; the page fills in the names."""
    return replace(drawing, boxes=tuple(_without_name(box) for box in drawing.boxes))


def _without_name(box: Box) -> Box:
    return replace(box, name="", op="value" if box.kind is BoxKind.INPUT else box.op)


def _weights(drawing: Drawing) -> str:
    """The matrices in the drawing: `3 × 768×768`; empty where there are none."""
    shapes = (box.detail.split(", ")[0] for box in drawing.boxes if box.kind is BoxKind.NODE)
    counts = Counter(shape for shape in shapes if "×" in shape and not shape.startswith("→"))
    return ", ".join(f"{count} × {shape}" if count > 1 else shape for shape, count in counts.items())
