"""Structures by kind, with drawings; equal drawings share a figure, such as those of twelve layers.

Each box of a drawing has a position in layers from top to bottom, so that wires run downwards and rarely cross. This
is Sugiyama's method, in a small form: longest paths make the layers, a wire across several layers gets a bend in each,
each layer is sorted by where its neighbours are (the barycenter), and boxes then move towards their neighbours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from passes.run.result import PassRow, StructureVerdict, author_of_loss
from pipeline.report.model import Box, BoxKind, Drawing, Pictures, StructurePicture, Wire

LETTER: Final = 6.9
"""Width of a letter, in the units of the drawing; a box is wide enough for its longer line."""

NAMED: Final = 18
"""Letters reserved for a value's name; a drawing is shared by values of different names."""

LONGEST: Final = 36
"""The most letters of a label; the page compresses longer ones."""

NARROWEST: Final = 66.0
BEND: Final = 12.0
GAP: Final = 14.0
HEIGHT: Final = 38.0
LOW: Final = 26.0
"""Height of a box of one line."""

ROW: Final = 62.0
SWEEPS: Final = 8
MARGIN: Final = 6.0


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box with its upper left corner and its size."""

    box: Box
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class DrawingLayout:
    """`paths` are SVG paths, one for each wire, with the shape that flows there."""

    width: float
    height: float
    boxes: tuple[PlacedBox, ...]
    paths: tuple[tuple[str, str], ...]


def lay_out(drawing: Drawing, sizes: Mapping[int, tuple[float, float]] | None = None) -> DrawingLayout:
    """Place the boxes and wires of a drawing. `sizes` are width and height of boxes with other content, by index."""
    layers = _layers(drawing)
    ways = [_way(number, wire, layers) for number, wire in enumerate(drawing.wires)]
    extents = [(sizes or {}).get(index, (_width(box), _height(box))) for index, box in enumerate(drawing.boxes)]
    grid = _Grid.of([width for width, _ in extents], layers, ways)
    grid.sort()
    grid.settle()
    grid.straighten(ways)
    left = min((grid.x[key] - grid.width[key] / 2 for key in grid.x), default=0.0)
    right = max((grid.x[key] + grid.width[key] / 2 for key in grid.x), default=0.0)
    x = {key: value - left + MARGIN for key, value in grid.x.items()}
    bands = _bands(layers, extents)
    placed = tuple(_place_box(box, x[at], bands[layers[at]], *extents[at]) for at, box in enumerate(drawing.boxes))
    paths = tuple(
        (_path(way, x, placed, [bands[layers[key]] for key in way]), wire.shape)
        for way, wire in zip(ways, drawing.wires, strict=True)
    )
    return DrawingLayout(right - left + 2 * MARGIN, max((end for _, end in bands), default=0.0) + MARGIN, placed, paths)


def _bands(layers: Mapping[Key, int], extents: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Top and bottom of each layer, which is as high as its highest box."""
    tallest = [0.0] * (max(layers.values(), default=-1) + 1)
    for index, (_, height) in enumerate(extents):
        tallest[layers[index]] = max(tallest[layers[index]], height)
    bands: list[tuple[float, float]] = []
    for height in tallest:
        top = bands[-1][1] + ROW - HEIGHT if bands else MARGIN
        bands.append((top, top + height))
    return bands


Key = int | tuple[int, int]
"""A box by its index, or the bend of a wire in a layer: (wire, layer)."""


def _layers(drawing: Drawing) -> dict[Key, int]:
    """Layer of each box: below all that it reads; a box without inputs is right above its first consumer."""
    layers: dict[Key, int] = dict.fromkeys(range(len(drawing.boxes)), 0)
    for _ in drawing.boxes:
        for wire in drawing.wires:
            layers[wire.end] = max(layers[wire.end], layers[wire.start] + 1)
    fed = {wire.end for wire in drawing.wires}
    for index in range(len(drawing.boxes)):
        readers = [layers[wire.end] for wire in drawing.wires if wire.start == index]
        if index not in fed and readers:
            layers[index] = min(readers) - 1
    return layers


def _way(number: int, wire: Wire, layers: dict[Key, int]) -> list[Key]:
    """The path of a wire from box to box, with a bend in each layer between; adds the bends to `layers`."""
    bends: list[Key] = [(number, layer) for layer in range(layers[wire.start] + 1, layers[wire.end])]
    layers.update({(number, layer): layer for layer in range(layers[wire.start] + 1, layers[wire.end])})
    return [wire.start, *bends, wire.end]


@dataclass(slots=True)
class _Grid:
    rows: list[list[Key]]
    above: Mapping[Key, Sequence[Key]]
    below: Mapping[Key, Sequence[Key]]
    width: Mapping[Key, float]
    x: dict[Key, float]
    """Centres."""

    @classmethod
    def of(cls, widths: Sequence[float], layers: Mapping[Key, int], ways: Iterable[Sequence[Key]]) -> _Grid:
        rows: list[list[Key]] = [[] for _ in range(max(layers.values(), default=-1) + 1)]
        for key, layer in layers.items():
            rows[layer].append(key)
        above: dict[Key, list[Key]] = defaultdict(list)
        below: dict[Key, list[Key]] = defaultdict(list)
        for way in ways:
            for upper, lower in pairwise(way):
                above[lower].append(upper)
                below[upper].append(lower)
        width = {key: BEND if isinstance(key, tuple) else widths[key] for key in layers}
        return cls(rows, above, below, width, {})

    def sort(self) -> None:
        """Order each layer by the mean position of the neighbours above, then below, and so on."""
        for sweep in range(SWEEPS):
            downwards = sweep % 2 == 0
            neighbours = self.above if downwards else self.below
            position = {key: index for row in self.rows for index, key in enumerate(row)}
            for row in self.rows if downwards else reversed(self.rows):
                row.sort(
                    key=lambda key: _mean([position[neighbour] for neighbour in neighbours.get(key, ())], position[key])
                )
                position.update({key: index for index, key in enumerate(row)})

    def settle(self) -> None:
        """Place each layer side by side, then move boxes to where their neighbours are, as far as there is room."""
        for row in self.rows:
            total = sum(self.width[key] + GAP for key in row) - GAP
            at = -total / 2
            for key in row:
                self.x[key] = at + self.width[key] / 2
                at += self.width[key] + GAP
        for sweep in range(SWEEPS * 5):
            for row in self.rows if sweep % 2 == 0 else reversed(self.rows):
                self._towards_neighbours(row)

    def _towards_neighbours(self, row: Sequence[Key]) -> None:
        """Move boxes towards their neighbours: the mean of a pass from each side favours no side."""
        target = [
            _mean([self.x[near] for near in (*self.above.get(key, ()), *self.below.get(key, ()))], self.x[key])
            for key in row
        ]
        left, right = list(target), list(target)
        for index in range(1, len(row)):
            left[index] = max(left[index], left[index - 1] + self._min_distance(row, index))
        for index in range(len(row) - 2, -1, -1):
            right[index] = min(right[index], right[index + 1] - self._min_distance(row, index + 1))
        for key, low, high in zip(row, left, right, strict=True):
            self.x[key] = (low + high) / 2

    def straighten(self, ways: Iterable[Sequence[Key]]) -> None:
        """Align the bends of a long wire vertically, if there is room in each layer."""
        for way in ways:
            bends = way[1:-1]
            target = sorted(self.x[bend] for bend in bends)
            for at in (target[len(target) // 2 :: len(target)] + target[:1] + target[-1:]) if len(bends) > 1 else ():
                if all(self._is_free(bend, at) for bend in bends):
                    self.x.update(dict.fromkeys(bends, at))
                    break

    def _is_free(self, key: Key, at: float) -> bool:
        row = next(row for row in self.rows if key in row)
        index = row.index(key)
        left = index == 0 or at - self.x[row[index - 1]] >= self._min_distance(row, index)
        right = index == len(row) - 1 or self.x[row[index + 1]] - at >= self._min_distance(row, index + 1)
        return left and right

    def _min_distance(self, row: Sequence[Key], index: int) -> float:
        return (self.width[row[index - 1]] + self.width[row[index]]) / 2 + GAP


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _width(box: Box) -> float:
    name = NAMED if box.kind is BoxKind.INPUT else len(box.op) + (len(box.role) + 1 if box.role != box.op else 0)
    letters = max(name, len(box.detail) * 0.96)
    return max(NARROWEST, round(min(letters, LONGEST) * LETTER + 18))


def _height(box: Box) -> float:
    return HEIGHT if box.detail or box.kind is not BoxKind.NODE else LOW


def _place_box(box: Box, centre: float, band: tuple[float, float], width: float, height: float) -> PlacedBox:
    return PlacedBox(box, round(centre - width / 2, 1), (band[0] + band[1] - height) / 2, width, height)


def _path(
    way: Sequence[Key], x: Mapping[Key, float], placed: Sequence[PlacedBox], bands: Sequence[tuple[float, float]]
) -> str:
    """An SVG path of curves that leave and arrive vertically."""
    start, end = placed[way[0]], placed[way[-1]]  # type: ignore[index]
    points = [(x[way[0]], start.y + start.height)]
    for bend, (top, bottom) in zip(way[1:-1], bands[1:-1], strict=True):
        points += [(x[bend], top), (x[bend], bottom)]
    points.append((x[way[-1]], end.y))
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        path += f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    return path


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
    """`broken_by` is the step that broke a lost instance and is left in place, or that was reverted to keep this one;
    `figure` is the index of its figure, or -1; `names` are those of the boxes there, a list for each panel."""

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


def groups_of(
    structures: Sequence[StructureVerdict], passes: Sequence[PassRow], pictures: Pictures
) -> tuple[Group, ...]:
    drawn = {(picture.kind, picture.name): picture for picture in pictures.structures}
    kinds = dict.fromkeys(verdict.kind for verdict in structures)
    authors = {
        (verdict.kind, verdict.name): verdict.broken_by or "" if verdict.kept else author_of_loss(verdict, passes)
        for verdict in structures
    }
    return tuple(
        _group(kind, [verdict for verdict in structures if verdict.kind == kind], drawn, authors) for kind in kinds
    )


def _group(
    kind: str,
    verdicts: Sequence[StructureVerdict],
    drawn: Mapping[tuple[str, str], StructurePicture],
    authors: Mapping[tuple[str, str], str],
) -> Group:
    pictures = [drawn.get((verdict.kind, verdict.name)) for verdict in verdicts]
    figures: dict[Figure, int] = {}
    rows = []
    for verdict, picture in zip(verdicts, pictures, strict=True):
        author = authors[kind, verdict.name]
        index = figures.setdefault(_figure(picture, verdict.kept, author), len(figures)) if picture else -1
        names = tuple(tuple(box.name for box in drawing.boxes) for drawing in _drawings(picture)) if picture else ()
        rows.append(InstanceRow(verdict.name, verdict.module, verdict.kept, author, index, names))
    return Group(kind, sum(verdict.kept for verdict in verdicts), tuple(rows), tuple(figures))


def _drawings(picture: StructurePicture) -> list[Drawing]:
    return [drawing for drawing in (picture.before, picture.after, picture.broken) if drawing is not None]


def _figure(picture: StructurePicture, kept: bool, author: str) -> Figure:
    panels = [_panel("source", "as it was exported", "", picture.before)]
    if picture.after is None:
        panels.append(Panel("final model", "nothing there stands for it", "bad", "", None))
    else:
        tone = "good" if kept else "bad"
        note = "kept" if kept else f"lost to {author}" if author else "lost"
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
