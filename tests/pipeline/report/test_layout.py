"""Where boxes go: apart from each other, and every value downwards."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.diff import LayerErrors
from passes.proof.numbers import NO_ERROR, Errors
from passes.provenance.annotations import NameMap
from pipeline.report import Box, BoxKind, Drawing, Wire, report_json
from pipeline.report.block_labels import block_labels
from pipeline.report.html.curves import layer_plot
from pipeline.report.html.figures import DrawingLayout, lay_out
from pipeline.report.html.headline import MOST_ROWS, name_tables
from tests.pipeline.report.sample_report import attention, html_of, pictures, report, row


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
    for wire, (path, *_) in zip(drawing.wires, laid.paths, strict=True):
        start, end = laid.boxes[wire.start], laid.boxes[wire.end]
        assert start.y < end.y
        *_, x, y = map(float, re.findall(r"[\d.]+", path))
        assert (abs(x - end.x - end.width / 2) < 0.2, y) == (True, pytest.approx(end.y, abs=0.1))
    for box in laid.boxes:
        assert box.x >= 0
        assert box.x + box.width <= laid.width
        assert box.y + box.height <= laid.height


# The plot of error and SQNR by layer.


def layer(name: str, max_abs: float = 0, sqnr_db: float = 0) -> LayerErrors:
    errors = Errors(max_abs, 0.1, 1.0, sqnr_db, 1e-4, 0.1) if max_abs else NO_ERROR
    return LayerErrors(name, "MatMul", "a", "b", "float32", errors)


def test_errors_are_drawn_on_a_logarithmic_axis_and_equal_layers_at_its_edge() -> None:
    plot = layer_plot([layer("layers.0"), layer("layers.1", 1e-6, 120), layer("layers.1.up", 1e-4, 80)])
    assert plot is not None
    assert plot.equal == 1
    error, sqnr = plot.curves
    assert [tick.text for tick in error.ticks] == ["equal", "1e-06", "1e-05", "1e-04"]
    assert [tick.text for tick in sqnr.ticks] == ["80", "90", "100", "110", "120", "equal"]
    assert [y for _, y in error.points] == [error.ticks[place].position for place in (0, 1, 3)]
    assert [y for _, y in sqnr.points] == [sqnr.ticks[place].position for place in (5, 4, 0)]
    assert [label.text for label in plot.labels] == ["layers.0", "layers.1"], "numbered layers, if there are any"


def test_one_layer_is_no_curve() -> None:
    alone = layer_plot([layer("head", 1e-3, 40)])
    assert alone is not None
    assert alone.curves == () and [row.layer for row in alone.rows] == ["head"]


def test_layers_of_one_error_and_many_layers() -> None:
    alike = layer_plot([layer("body", 1e-3, 40), layer("head", 1e-3, 40)])
    assert alike is not None
    assert len(alike.curves[0].ticks) >= 2
    many = layer_plot([layer(f"layers.{place}", 1e-3, 40) for place in range(300)])
    assert many is not None
    assert len(many.labels) <= 16


def test_the_page_has_the_plot_only_if_there_is_something_to_draw(tmp_path: Path) -> None:
    def page(*layers: LayerErrors) -> str:
        return html_of(report(row("fuse"), layers=layers), pictures(), tmp_path)

    assert 'id="layers"' not in page()
    equal = page(layer("layers.0"), layer("layers.1"))
    assert "2 of 2 are equal in every bit" in equal
    assert "<polyline" not in equal
    drawn = page(layer("layers.0"), layer("<b>layers.1", 1e-6, 120))
    assert drawn.count("<polyline") == 2
    assert "&lt;b&gt;layers.1: max abs error 1.00e-06, SQNR 120.0 dB" in drawn


# Labels along an axis that follows the model.


def test_each_block_has_a_label_at_its_first_place() -> None:
    modules = ["embeddings.patch", "", "encoder.layer.0.norm", "encoder.layer.0.mlp.fc", "encoder.layer.1.norm", "head"]
    assert block_labels(modules) == ((0, "embeddings"), (2, "encoder.layer.0"), (4, "encoder.layer.1"), (5, "head"))


def test_labels_that_would_touch_are_left_out_and_long_ones_keep_their_end() -> None:
    many = [f"model.language_model.layers.{index}" for index in range(64)]
    assert block_labels(many)[:2] == ((0, "…_model.layers.0"), (4, "…_model.layers.4"))
    assert len(block_labels(many)) == 16


def test_no_modules_no_labels() -> None:
    assert block_labels([]) == () == block_labels(["", ""])


# The section of `report.html` on names.

NAMES = NameMap(nodes={"/gone": (), "/qkv": ("/qkv.q", "/qkv.k")}, weights={"w": ("w.q", "w.k")})


def test_renamed_ones_come_first_and_empty_tables_are_left_out() -> None:
    nodes, weights = name_tables(NAMES)
    assert (nodes.title, nodes.renamed, nodes.gone) == ("nodes", 1, 1)
    assert nodes.rows == (("/qkv", "/qkv.q, /qkv.k"), ("/gone", ""))
    assert (weights.title, weights.rows) == ("weights", (("w", "w.q, w.k"),))
    assert name_tables(None) == name_tables(NameMap()) == ()


def test_a_long_table_is_cut_and_says_so() -> None:
    (table,) = name_tables(NameMap(values={f"v{at}": () for at in range(MOST_ROWS + 7)}))
    assert (len(table.rows), table.more) == (MOST_ROWS, 7)


def test_page_and_json_have_them(tmp_path: Path) -> None:
    run = report(row("split-qkv"), names=NAMES)
    html = html_of(run, pictures(), tmp_path)
    assert "nodes: 1 with other names, 1 gone" in html
    assert "<td>w</td><td>w.q, w.k</td>" in html
    assert 'id="names"' not in html_of(report(row("split-qkv")), pictures(), tmp_path)
    assert json.loads(report_json(run))["names"] == {
        "nodes": {"/gone": [], "/qkv": ["/qkv.q", "/qkv.k"]},
        "values": {},
        "weights": {"w": ["w.q", "w.k"]},
    }
