"""An IR as an SVG that needs no other program: values flow downwards, modules are frames around their nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from passes.visible import visible_markup
from pipeline.errors import UsageError
from pipeline.ir import Graph, Role
from pipeline.report import Box, BoxKind, Drawing, Wire
from pipeline.report.html.figures import lay_out
from pipeline.torch_ir.ir import IR, an_ir
from pipeline.torch_ir.picture import STORED, ModuleBox, parts_of, refuse_other_counts, short, sizes

BAR: Final = 22.0
"""Height of a frame's title."""

MOST_LETTERS: Final = 40

PORT: Final = (5.0, 5.0)
"""Size of the point at which values enter or leave a frame."""


def ir_to_svg(ir: IR, max_nodes: int = 150, include_weights: bool = True) -> str:
    """The graph as SVG: at most `max_nodes` boxes, with modules folded as far as that takes.

    Args:
        ir: the IR.
        max_nodes: how many boxes there are at most.
        include_weights: whether parameters and constants have boxes.

    Raises:
        UsageError: it is no IR, or `max_nodes` is no integer of 0 or more.
    """
    refuse_other_counts("max_nodes", max_nodes)
    graph = an_ir(ir, UsageError).graph
    items, left = parts_of(graph, max_nodes)
    made = _Frame(graph, include_weights).draw(items, top=True)
    note = f'<text x="12" y="{made.height + 14:.0f}" class="note">… and {left} more nodes</text>' if left else ""
    width, height = made.width, made.height + (24 if left else 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img"><title>{visible_markup(ir.model_name)}</title><style>{STYLE}</style>'
        f'<rect class="paper" width="100%" height="100%"/>\n{made.body}{note}</svg>\n'
    )


@dataclass(frozen=True, slots=True)
class _Drawn:
    width: float
    height: float
    body: str


@dataclass(frozen=True, slots=True)
class _Frame:
    """Draws what is inside of one module, or of the graph."""

    graph: Graph
    weights: bool

    def draw(self, items: Sequence[int | ModuleBox], top: bool = False) -> _Drawn:
        inner = {
            at: self.draw(item.items) for at, item in enumerate(items) if isinstance(item, ModuleBox) and _open(item)
        }
        boxes = [self._box(item) for item in items]
        # A frame is as wide as what it holds, and as its title.
        extents = {at: _extent(box) for at, box in enumerate(boxes)} | {
            at: (max(drawn.width, 7.2 * len(_frame_title(items[at])) + 24), drawn.height + BAR)
            for at, drawn in inner.items()
        }
        wires = self._wires(items, boxes, extents, top)
        laid = lay_out(Drawing(tuple(boxes), tuple(dict.fromkeys(wires))), extents)
        parts = [f'<path d="{path}"><title>{visible_markup(shape)}</title></path>\n' for path, shape in laid.paths]
        for at, placed in enumerate(laid.boxes):
            drawn, item = inner.get(at), items[at] if at < len(items) else None
            parts.append(f'<g transform="translate({placed.x:.1f} {placed.y:.1f})">')
            if drawn is not None and isinstance(item, ModuleBox):
                parts.append(
                    f'<rect class="frame" width="{placed.width:.1f}" height="{placed.height:.1f}" rx="8"/>'
                    f'<text class="title" x="10" y="15">{visible_markup(_frame_title(item))}</text>'
                    f'<g transform="translate({(placed.width - drawn.width) / 2:.1f} {BAR})">\n{drawn.body}</g>'
                )
            elif extents.get(at) == PORT:
                parts.append('<circle class="port" cx="2.5" cy="2.5" r="2.5"/>')
            else:
                kind = "folded" if isinstance(item, ModuleBox) else str(placed.box.kind)
                parts += _box_svg(placed.box, placed.width, placed.height, kind)
            parts.append("</g>\n")
        return _Drawn(laid.width, laid.height, "".join(parts))

    def _box(self, item: int | ModuleBox) -> Box:
        if isinstance(item, ModuleBox):
            return Box(BoxKind.NODE, _shorten_text(item.name), _shorten_text(item.detail), name=item.path)
        op, values = self.graph.ops[item], self.graph.values
        made = sizes(values[op.outputs[0]].spec.shape) if op.outputs else ""
        stored = [values[vid] for vid in op.inputs if values[vid].role in STORED]
        read = ", ".join(sizes(value.spec.shape) or "scalar" for value in stored) if self.weights else ""
        module = op.origin.rpartition(".")[2]
        name = f"{short(op.kind)} {module}" if any(value.role is not Role.CONST for value in stored) else short(op.kind)
        lines = [op.name, op.origin, op.line, *(value.name for value in stored)]
        return Box(
            BoxKind.NODE,
            _shorten_text(name),
            _shorten_text(f"{read} → {made}" if read else f"→ {made}"),
            name="\n".join(lines),
        )

    def _wires(
        self, items: Sequence[int | ModuleBox], boxes: list[Box], extents: dict[int, tuple[float, float]], top: bool
    ) -> list[Wire]:
        """The wires between items, and from and to the outside.

        Adds boxes for inputs and outputs of the graph, and a point for those of an inner module.
        """
        values, wires = self.graph.values, list[Wire]()
        home = {
            op: at for at, item in enumerate(items) for op in (item.ops if isinstance(item, ModuleBox) else (item,))
        }
        sources: dict[int, int] = {}

        def add(box: Box, size: tuple[float, float]) -> int:
            boxes.append(box)
            extents[len(boxes) - 1] = size
            return len(boxes) - 1

        for op, at in home.items():
            for value in (values[vid] for vid in self.graph.ops[op].inputs):
                shape = f"{value.name} {sizes(value.spec.shape)}"
                if value.role in STORED or (value.producer is not None and home.get(value.producer) == at):
                    continue
                if value.producer in home:
                    wires.append(Wire(home[value.producer], at, shape))
                    continue
                key = value.vid if top else -1
                if key not in sources:
                    box = Box(BoxKind.INPUT, _shorten_text(value.name), sizes(value.spec.shape), name=value.name)
                    sources[key] = add(box, _extent(box) if top else PORT)
                wires.append(Wire(sources[key], at, shape))
        ends = [vid for op in home for vid in self.graph.ops[op].outputs if self._leaves(vid, home)]
        end = add(Box(BoxKind.OUTPUT, ""), PORT) if ends and not top else -1
        for vid in ends:
            value = values[vid]
            shape = f"{value.name} {sizes(value.spec.shape)}"
            box = Box(BoxKind.OUTPUT, "output", sizes(value.spec.shape), name=value.name)
            if not top:
                wires.append(Wire(home[value.producer or 0], end, shape))
            elif vid in self.graph.outputs:
                wires.append(Wire(home[value.producer or 0], add(box, _extent(box)), shape))
        return wires

    def _leaves(self, vid: int, home: dict[int, int]) -> bool:
        return vid in self.graph.outputs or any(user not in home for user in self.graph.values[vid].users)


def _extent(box: Box) -> tuple[float, float]:
    """Wide enough for letters of whatever font the reader has."""
    return max(66.0, 8.2 * len(box.op) + 16, 6.8 * len(box.detail) + 16), 38.0 if box.detail else 26.0


def _open(item: int | ModuleBox) -> bool:
    return isinstance(item, ModuleBox) and not item.is_folded


def _frame_title(item: int | ModuleBox) -> str:
    return item.name if isinstance(item, ModuleBox) else ""


def _shorten_text(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


def _box_svg(box: Box, width: float, height: float, kind: str) -> Iterator[str]:
    yield f'<g class="{kind}"><title>{visible_markup(box.name.strip())}</title>'
    if kind == "folded":
        yield f'<rect x="3" y="-3" width="{width:.1f}" height="{height:.1f}" rx="6"/>'
    radius = 6 if kind in ("node", "folded") else height / 2
    yield f'<rect width="{width:.1f}" height="{height:.1f}" rx="{radius:g}"/>'
    for text, y, name in ((box.op, 16 if box.detail else height / 2 + 4, "op"), (box.detail, 30, "shape")):
        if text:
            yield f'<text class="{name}" x="{width / 2:.1f}" y="{y:g}">{visible_markup(text)}</text>'
    yield "</g>"


STYLE: Final = (
    "text{font:12px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1d1f23;text-anchor:middle}"
    ".op{font-weight:550}.shape{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#5f636b}"
    ".title,.note{text-anchor:start;font-weight:600;fill:#5f636b}path{fill:none;stroke:#b9bcc3;stroke-width:1.4}"
    "rect{fill:#fff;stroke:#cfcec8}.paper{fill:#f7f7f5;stroke:none}.frame{fill:#2c5fb3;fill-opacity:.05;stroke:#b8c6df}"
    ".input rect,.output rect{fill:none;stroke-dasharray:3 3}.folded rect{fill:#e9f0fb;stroke:#2c5fb3}"
    ".port{fill:#8a8f98}@media(prefers-color-scheme:dark){text{fill:#e7e8ea}.shape,.title,.note{fill:#a4a9b1}path{stroke:#565d67}"
    "rect{fill:#1b1e22;stroke:#434951}.paper{fill:#131518}.frame{fill:#86b1f5;stroke:#3a4c69}"
    ".folded rect{fill:#1f2c42;stroke:#86b1f5}}"
)
