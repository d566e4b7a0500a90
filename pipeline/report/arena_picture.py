"""The arena of a plan over time as SVG: calls from left to right, bytes upwards, one bar for each storage class.

Colours are those of the report's page where it has them, and fixed ones in a file of its own. Labels along the calls
are the blocks of the torch module, each at its first place; other plots along the model have them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from passes.suggest import bytes_text, plural
from passes.visible import visible_markup
from pipeline.argument_checks import a, a_mapping, expects
from pipeline.lowering import KernelCall
from pipeline.ops import Kind
from pipeline.planning import ExecutionPlan, Occupant, alive_bytes, occupants

MOST_LABELS: Final = 16

LONGEST_LABEL: Final = 16
"""Characters of a slanted label of 11 px that fit left of the first point."""


def block_labels(modules: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """(index, label) of the first place of each block, so far apart that at most `MOST_LABELS` fit.

    Args:
        modules: the module path of each place, in the order of the axis; an empty path has no label.
    """
    first: dict[str, int] = {}
    for index, module in enumerate(modules):
        if module:
            first.setdefault(_block(module), index)
    labels: list[tuple[int, str]] = []
    for block, index in first.items():
        if not labels or index - labels[-1][0] >= len(modules) / MOST_LABELS:
            labels.append((index, shorten_label(block)))
    return tuple(labels)


def shorten_label(text: str) -> str:
    """`text`, or its end after an ellipsis if `text` is longer than `LONGEST_LABEL`."""
    return text if len(text) <= LONGEST_LABEL else "…" + text[1 - LONGEST_LABEL :]


def _block(module: str) -> str:
    """`encoder.layer.3` of `encoder.layer.3.attention.self`: up to the first number; without one, the first part."""
    parts = module.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[: numbered + 1])


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
    """By call; a line over the bars."""


@expects(
    plan=a(ExecutionPlan, "an ExecutionPlan, as decode_plans gives"),
    modules=a_mapping("a mapping of the names of values to modules").or_none(),
)
def draw_arena(plan: ExecutionPlan, modules: Mapping[str, str] | None = None) -> str:
    """The picture of `plan`: a panel for the arena, and one for each region of its memory map.

    Args:
        modules: {name of a value: path of the module that makes it}, for labels along the calls.
    """
    everyone = occupants(plan)
    panels = [_arena_panel(plan, list(everyone.values())), *_region_panels(plan, everyone)]
    labels = block_labels([_module(plan, call, modules) for call in plan.calls]) if modules else ()
    tall = TOP + HEIGHT + BOTTOM + (LABELS if labels else 0)
    height = len(panels) * tall
    body = "".join(
        f'<g transform="translate(0 {at * tall})">{"".join(_panel(panel, len(plan.calls), labels))}</g>'
        for at, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" role="img" '
        f'aria-label="{visible_markup(panels[0].title)}" font-family="sans-serif" font-size="11" '
        f'fill="var(--soft, #5f636b)">{body}</svg>'
    )


def _module(plan: ExecutionPlan, call: KernelCall, modules: Mapping[str, str]) -> str:
    return next((module for vid in call.out_vids if (module := modules.get(plan.slots[vid].name))), "")


def _arena_panel(plan: ExecutionPlan, everyone: Sequence[Occupant]) -> _MemoryPanel:
    alive = alive_bytes(everyone, len(plan.calls))
    bars = [
        _ArenaBar(value.root, value.life.first, value.life.last, value.offset, value.nbytes, _name(plan, value))
        for value in everyone
    ]
    title = f"arena: {bytes_text(plan.arena_bytes)}, of which {bytes_text(plan.live_bytes)} are alive at once at most"
    return _MemoryPanel(title, plan.arena_bytes, bars, alive)


def _region_panels(plan: ExecutionPlan, everyone: dict[int, Occupant]) -> Iterator[_MemoryPanel]:
    if plan.memory is None:
        return
    moves = plan.memory.moves()
    for at, region in enumerate(plan.memory.regions):
        bars = [
            _ArenaBar(
                stay.root,
                stay.first,
                stay.last,
                stay.offset,
                everyone[stay.root].nbytes,
                _name(plan, everyone[stay.root]),
            )
            for stay in plan.memory.residences
            if stay.region == at
        ]
        used = max((bar.offset + bar.nbytes for bar in bars), default=0)
        arriving = sum(move.target.region == at for move in moves)
        room = "" if region.nbytes is None else f" of {bytes_text(region.nbytes)}"
        title = f"{region.name}: {bytes_text(used)}{room}, {plural(arriving, 'copy', 'copies')} into it"
        yield _MemoryPanel(title, region.nbytes or used, bars)


def _name(plan: ExecutionPlan, one: Occupant) -> str:
    slot = plan.slots[one.root]
    maker = Kind(plan.calls[one.life.first].kind_id).name
    return f"{slot.name}: {slot.spec.dtype}{list(slot.spec.shape)}, {bytes_text(one.nbytes)}, made by {maker}"


def _panel(panel: _MemoryPanel, calls: int, labels: Sequence[tuple[int, str]]) -> Iterator[str]:
    shown = sorted(panel.bars, key=lambda bar: -bar.nbytes)[:MOST_BARS]
    left_out = len(panel.bars) - len(shown)
    note = f", the {plural(left_out, 'smallest value')} left out" if left_out else ""
    yield f'<text x="{LEFT}" y="16" font-weight="600">{visible_markup(panel.title + note)}</text>'
    across, up = (WIDTH - LEFT - RIGHT) / max(calls, 1), HEIGHT / max(panel.size, 1)
    floor = TOP + HEIGHT
    for share in (0, 0.5, 1):
        y = floor - share * HEIGHT
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:g}" y2="{y:g}" stroke="var(--line, #e4e3de)"/>'
        size = bytes_text(int(share * panel.size))
        yield f'<text x="{LEFT - 6}" y="{y + 4:g}" text-anchor="end">{size}</text>'
    for bar in shown:
        x, width = LEFT + bar.first * across, (min(bar.last, calls - 1) - bar.first + 1) * across
        y, height = floor - (bar.offset + bar.nbytes) * up, bar.nbytes * up
        number = bar.root % len(COLOURS)
        yield (
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.5):.2f}" height="{max(height, 0.5):.2f}" '
            f'fill="var(--t{number + 1}, {COLOURS[number]})" fill-opacity=".75" '
            f'stroke="var(--card, #fff)" stroke-width=".5">'
            f"<title>{visible_markup(bar.text)}, bytes {bar.offset} to {bar.offset + bar.nbytes}, "
            f"calls {bar.first} to {min(bar.last, calls - 1)}</title></rect>"
        )
    if panel.alive:
        points = " ".join(
            f"{LEFT + edge * across:.2f},{floor - alive * up:.2f}"
            for at, alive in enumerate(panel.alive)
            for edge in (at, at + 1)
        )
        yield f'<polyline points="{points}" fill="none" stroke="var(--ink, #1d1f23)" stroke-width="1.2"/>'
    yield f'<text x="{LEFT}" y="{floor + 16}">call 0</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{floor + 16}" text-anchor="end">call {max(calls - 1, 0)}</text>'
    for call, label in labels:
        x = LEFT + (call + 0.5) * across
        yield f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{floor}" y2="{floor + 4}" stroke="var(--line-strong, #cfcec8)"/>'
        turned = f"translate({x:.2f} {floor + 32}) rotate(-35)"
        yield f'<text transform="{turned}" text-anchor="end">{visible_markup(label)}</text>'
