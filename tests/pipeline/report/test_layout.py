"""Where boxes go: apart from each other, and every value downwards."""

from __future__ import annotations

import re
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.report import Box, BoxKind, Drawing, Wire
from pipeline.report.html.figures import DrawingLayout, lay_out
from tests.pipeline.report.sample_report import attention


def rows(laid: DrawingLayout) -> list[list[str]]:
    """The layers as one sees them, each from left to right."""
    boxes_by_height: dict[int, list[tuple[float, str]]] = {}
    for box in laid.boxes:
        boxes_by_height.setdefault(round(box.y + box.height / 2), []).append((box.x, box.box.role or box.box.op))
    return [[name for _, name in sorted(boxes_by_height[y])] for y in sorted(boxes_by_height)]


def test_q_k_and_v_stand_side_by_side() -> None:
    laid = lay_out(attention(0))
    assert rows(laid) == [["norm_0"], ["Q", "K", "V"], ["Attention"]]
    centres = {box.box.role or box.box.op: box.x + box.width / 2 for box in laid.boxes}
    assert abs(centres["K"] - centres["Attention"]) < 1, "what joins them stands in the middle"
    assert abs(centres["K"] - centres["norm_0"]) < 1


def test_what_comes_from_outside_stands_where_it_is_read() -> None:
    boxes = [Box(BoxKind.NODE, op) for op in ("Relu", "Exp", "Add")] + [Box(BoxKind.INPUT, "late")]
    laid = lay_out(Drawing(tuple(boxes), (Wire(0, 1), Wire(1, 2), Wire(3, 2))))
    assert rows(laid) == [["Relu"], ["Exp", "late"], ["Add"]]


def test_a_long_way_is_straight() -> None:
    boxes = tuple(Box(BoxKind.NODE, op) for op in "ABCDEF")
    laid = lay_out(Drawing(boxes, (*(Wire(at, at + 1) for at in range(5)), Wire(0, 5))))
    numbers = [float(number) for number in re.findall(r"[\d.]+", laid.paths[-1][0])]
    inner = {x for x, y in zip(numbers[::2], numbers[1::2], strict=True) if 100 < y < 225}
    assert len(inner) == 1


def test_neighbours_pull_from_both_sides() -> None:
    """Swept in one direction only, the boxes drift apart: 693 pixels for the same five boxes."""
    boxes = tuple(Box(BoxKind.NODE, op) for op in "ABCDE")
    laid = lay_out(Drawing(boxes, (Wire(0, 2), Wire(0, 3), Wire(1, 3), Wire(2, 3))))
    assert laid.width < 520


@st.composite
def drawings(draw: st.DrawFn) -> Drawing:
    count = draw(st.integers(0, 14))
    boxes = [
        Box(BoxKind.NODE, "Op" * draw(st.integers(1, 6)), draw(st.sampled_from(["", "8×8"]))) for _ in range(count)
    ]
    pairs = st.tuples(st.integers(0, max(0, count - 1)), st.integers(0, max(0, count - 1)))
    wires = [Wire(*sorted(pair)) for pair in draw(st.lists(pairs, max_size=24)) if pair[0] != pair[1]]
    return Drawing(tuple(boxes), tuple(dict.fromkeys(wires)))


@settings(max_examples=60)
@given(drawings())
def test_no_drawing_is_a_tangle(drawing: Drawing) -> None:
    laid = lay_out(drawing)
    for a, b in combinations(laid.boxes, 2):
        assert a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y
    for wire in drawing.wires:
        assert laid.boxes[wire.start].y < laid.boxes[wire.end].y
    for box in laid.boxes:
        assert box.x >= 0
        assert box.x + box.width <= laid.width
        assert box.y + box.height <= laid.height
