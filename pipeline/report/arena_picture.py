"""Draw the arena of a plan over time as SVG: calls from left to right, byte offsets upwards, one bar for each storage.

Inside of `report.html` the bars have the page's colours; an SVG file of its own has fixed colours. The labels below the
calls name the blocks of the torch module, each at the first call of the block. Other plots of the report use the same
labels (`block_labels`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from passes.suggest import bytes_text, plural
from passes.visible import visible_markup
from pipeline.argument_checks import a, a_mapping, expects
from pipeline.lowering import KernelCall
from pipeline.ops import Kind
from pipeline.planning import ExecutionPlan, Occupant, alive_bytes, occupants
from pipeline.report.block_labels import block_labels

WIDTH: Final = 960
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 72, 12, 26, 34, 260
"""Margins of a panel, and the height of its bars."""

LABELS: Final = 66
"""Height of slanted labels below the calls."""

MOST_BARS: Final = 4000
"""Bars of a panel; of more the smallest are left out, and the caption says so."""

COLOURS: Final = ("#4c78a8", "#59a5a0", "#86b36b", "#d8b656", "#e0915a", "#cc6c7a", "#977fb8", "#a58771")


@dataclass(frozen=True, slots=True)
class _ArenaBar:
    root: int
    first: int
    last: int
    offset: int
    nbytes: int
    text: str


@dataclass(frozen=True, slots=True)
class _MemoryPanel:
    """One memory: the arena, or a region of a memory map."""

    title: str
    size: int
    bars: Sequence[_ArenaBar]
    alive: Sequence[int] = ()
    """Bytes alive at each call; drawn as a line over the bars."""

    @property
    def shown(self) -> Sequence[_ArenaBar]:
        """The largest bars."""
        return sorted(self.bars, key=lambda bar: -bar.nbytes)[:MOST_BARS]

    @property
    def note(self) -> str:
        left_out = len(self.bars) - MOST_BARS
        return f", the {plural(left_out, 'smallest value')} left out" if left_out > 0 else ""


@expects(
    plan=a(ExecutionPlan, "an ExecutionPlan, as decode_plans gives"),
    modules=a_mapping("a mapping of the names of values to modules").or_none(),
)
def draw_arena(plan: ExecutionPlan, modules: Mapping[str, str] | None = None) -> str:
    """The picture of `plan`: a panel for the arena, and one for each region of its memory map.

    Args:
        modules: {name of a value: path of the module that makes it}, for labels along the calls.
    """
    stored = occupants(plan)
    panels = [_arena_panel(plan, list(stored.values())), *_region_panels(plan, stored)]
    labels = block_labels([_module(plan, call, modules) for call in plan.calls]) if modules else ()
    return _template().render(
        panels=panels,
        calls=len(plan.calls),
        labels=labels,
        tall=TOP + HEIGHT + BOTTOM + (LABELS if labels else 0),
        width=WIDTH,
        left=LEFT,
        right=WIDTH - RIGHT,
        top=TOP,
        floor=TOP + HEIGHT,
        colours=COLOURS,
    )


def _template() -> Template:
    """The markup, in which `shown` makes a text visible and safe."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("html")), autoescape=False, undefined=StrictUndefined
    )
    environment.filters |= {"shown": visible_markup, "bytes": bytes_text}
    return environment.get_template("arena.svg.j2")


def _module(plan: ExecutionPlan, call: KernelCall, modules: Mapping[str, str]) -> str:
    """The module of the first result of `call` that has one; empty if none has."""
    return next((module for vid in call.out_vids if (module := modules.get(plan.slots[vid].name))), "")


def _arena_panel(plan: ExecutionPlan, stored: Sequence[Occupant]) -> _MemoryPanel:
    alive = alive_bytes(stored, len(plan.calls))
    bars = [
        _ArenaBar(value.root, value.life.first, value.life.last, value.offset, value.nbytes, _name(plan, value))
        for value in stored
    ]
    title = f"arena: {bytes_text(plan.arena_bytes)}, of which {bytes_text(plan.live_bytes)} are alive at once at most"
    return _MemoryPanel(title, plan.arena_bytes, bars, alive)


def _region_panels(plan: ExecutionPlan, stored: dict[int, Occupant]) -> Iterator[_MemoryPanel]:
    if plan.memory is None:
        return
    moves = plan.memory.moves()
    for at, region in enumerate(plan.memory.regions):
        bars = [
            _ArenaBar(
                stay.root, stay.first, stay.last, stay.offset, stored[stay.root].nbytes, _name(plan, stored[stay.root])
            )
            for stay in plan.memory.residences
            if stay.region == at
        ]
        used = max((bar.offset + bar.nbytes for bar in bars), default=0)
        arriving = sum(move.target.region == at for move in moves)
        room = "" if region.nbytes is None else f" of {bytes_text(region.nbytes)}"
        title = f"{region.name}: {bytes_text(used)}{room}, {plural(arriving, 'copy', 'copies')} into it"
        yield _MemoryPanel(title, region.nbytes or used, bars)


def _name(plan: ExecutionPlan, value: Occupant) -> str:
    slot = plan.slots[value.root]
    producer = Kind(plan.calls[value.life.first].kind_id).name
    return f"{slot.name}: {slot.spec.dtype}{list(slot.spec.shape)}, {bytes_text(value.nbytes)}, made by {producer}"
