"""`report.html` without a browser: whole, safe, small, and the same for the same report."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import onnx
import pytest

from passes.diff import diff_as_data
from passes.diff.types import AttributeChange, Diff, NodeLabel, Replacement
from passes.proof.numbers import DRAWN
from passes.run.result import Status, StructureVerdict
from passes.structures import structure_of
from passes.structures.subgraph import subgraph_of
from passes.structures.view import GraphView
from pipeline.report import SOURCE, BoxKind, Drawing, Mark, NodeRow, Pictures, diff_folder
from pipeline.report.html import page_of
from pipeline.report.html.page import environment
from pipeline.report.html.timeline import Timeline, timeline_of
from pipeline.stages.pictures import MOST_NODES, draw, node_rows
from tests.pipeline.report.sample_report import html_of, pictures, report, row
from tests.support.onnx_models import attention, detached, matrix, model_of

HOSTILE = "</script><script>alert(1)</script>"


class Tags(HTMLParser):
    """Every tag with its attributes, and what a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def data(self) -> dict[str, Any]:
        return next(json.loads(text) for text in self.texts if text.startswith('{"'))


def timeline(*rows: object, **more: object) -> Timeline:
    return timeline_of(report(*rows, **more), Path("nowhere"))  # type: ignore[arg-type]


def test_it_needs_nothing_from_outside(tmp_path: Path) -> None:
    html = html_of(report(row("fuse", after=7)), pictures(), tmp_path)
    loaded = [value for _, attributes in Tags(html).tags for key in ("src", "href") if (value := attributes.get(key))]
    assert {value.partition(":")[0] for value in loaded if not value.startswith("#")} == {"data"}
    assert not re.search(r"@import|url\(|https?://", html)
    assert "default-src 'none'" in html, "and a browser holds it to that"


def test_no_name_becomes_markup(tmp_path: Path) -> None:
    shown = Pictures(pictures(name=HOSTILE).structures, (NodeRow(HOSTILE, HOSTILE, (HOSTILE,), HOSTILE, HOSTILE),))
    verdict = StructureVerdict("qkv", HOSTILE, HOSTILE, False, HOSTILE)
    rows = [row(HOSTILE, Status.REVERTED, after=7, reason=HOSTILE, lost=(HOSTILE,), reproducer=HOSTILE)]
    html = html_of(report(*rows, structures=(verdict,), failure=HOSTILE, name=HOSTILE), shown, tmp_path)
    tags = Tags(html)
    assert [sorted(tag) for tag in tags.named("script")] == [["id", "type"], []], "the data and the script, no other"
    assert tags.data()["nodes"]["words"] == [HOSTILE], "and the script reads the very name"
    assert not [name for _, attributes in tags.tags for name in attributes if name.startswith("on")]


def test_a_row_that_changed_nothing_and_remarks_something_stands_by_itself() -> None:
    rows = [row("nop"), row("fuse_qkv", remarks=("would have lost qkv 0, which is kept",)), row("nop"), row("nop")]
    groups = timeline(*rows).groups()
    assert [(quiet, [shown.name for shown in group]) for quiet, group in groups][1:] == [
        (True, ["nop"]),
        (False, ["fuse_qkv"]),
        (True, ["nop", "nop"]),
    ]
    assert groups[2][1][0].is_idle


def test_the_same_report_is_the_same_page(tmp_path: Path) -> None:
    run_report, shown = report(row("fuse", after=7)), pictures(layers=3, nodes=9)
    assert html_of(run_report, shown, tmp_path) == html_of(run_report, shown, tmp_path)


def test_a_large_model_stays_small(tmp_path: Path) -> None:
    """36 layers, 60 passes and 4,000 nodes: below 2 MB, and what looks alike is drawn once."""
    verdicts = tuple(StructureVerdict("qkv", f"layers.{at}", "", True, None) for at in range(36))
    rows = [row(f"pass_{at}", before=60 - at, after=59 - at) for at in range(60)]
    marks = tuple(Mark(at, "0" * 12, 4096, {"MatMul": 59 - at}) for at in range(59))
    shown = pictures(layers=36, nodes=4000, name="encoder.layer.attention.self.query")
    html = html_of(report(*rows, marks=marks, structures=verdicts), shown, tmp_path)
    assert len(html.encode()) < 2_000_000
    assert len(Tags(html).named("figure")) == 3 + 2, "the first is drawn as a reverted pass had made it too"
    assert len([tag for tag in Tags(html).named("button") if tag.get("data-figure") == "1"]) == 35


def test_a_run_that_failed_early_says_why(tmp_path: Path) -> None:
    run_report = report(failure="no ONNX file at <here>", exit_code=2, export=None, structures=(), runtime=None)
    html = html_of(replace(run_report, marks=()), Pictures(), tmp_path)
    text = " ".join(Tags(html).texts)
    assert "no ONNX file at <here>" in text
    assert "exit code 2" in text
    assert {"passes", "structures", "nodes"}.isdisjoint(tag.get("id") for tag in Tags(html).named("section"))


def test_the_headline_does_not_hide_what_was_lost(tmp_path: Path) -> None:
    lost = (StructureVerdict("qkv", "layers.0", "", False, "onnxsim/fuse_attention"),)
    page = page_of(report(row("onnxsim", after=7), structures=lost), pictures(), tmp_path)
    assert (page.headline.tone, page.headline.verdict) == ("warn", "done, with losses")
    assert [(card.value, card.tone) for card in page.headline.cards if card.title == "structures kept"] == [
        ("0 of 1", "bad")
    ]
    assert "lost to onnxsim/fuse_attention" in [panel.note for panel in page.groups[0].figures[0].panels]


def test_the_step_that_is_left_in_place_is_named_for_a_loss(tmp_path: Path) -> None:
    lost = (StructureVerdict("qkv", "layers.0", "", False, "onnxsim"),)
    reverted = row("onnxsim", Status.REVERTED, lost=("qkv layers.0",))
    left = row("fuse_qkv", after=7, lost=("qkv layers.0",))
    (group,) = page_of(report(reverted, left, structures=lost), pictures(), tmp_path).groups
    assert [entry.broken_by for entry in group.rows] == ["fuse_qkv"]
    assert ("lost to fuse_qkv", "bad") in [(panel.note, panel.tone) for panel in group.figures[0].panels]


def test_a_tab_says_how_the_run_ended(tmp_path: Path) -> None:
    lost = (StructureVerdict("qkv", "layers.0", "", False, "onnxsim/fuse_attention"),)
    ends = [report(), report(structures=lost), report(failure="no", exit_code=2), report(not_compared="no weights")]
    pages = [page_of(end, Pictures(), tmp_path) for end in ends]
    assert [page.headline.title for page in pages] == [
        "✓ proven · made_up",
        "△ proven, with losses · made_up",
        "✗ failed · made_up",
        "✓ proven by structure · made_up",
    ]
    assert len({page.favicon for page in pages}) == 3
    assert unquote(pages[0].favicon).startswith("data:image/svg+xml,<svg xmlns=")


def test_all_notes_are_shown_once(tmp_path: Path) -> None:
    run_report = report(notes=("keep: qkv: partly", "said twice"))
    assert run_report.export is not None
    run_report = replace(run_report, export=replace(run_report.export, notes=("said twice", "torch warns")))
    assert page_of(run_report, Pictures(), tmp_path).notes == ("keep: qkv: partly", "said twice", "torch warns")
    assert "<li>torch warns</li>" in html_of(run_report, Pictures(), tmp_path)


def test_what_random_outputs_are_judged_by(tmp_path: Path) -> None:
    run_report = report()
    assert run_report.export is not None
    errors = {
        name: replace(run_report.export.errors["y"], judged_as=dtype)
        for name, dtype in {"y": "float16", "noise": DRAWN, "z": "float16"}.items()
    }
    html = html_of(replace(run_report, export=replace(run_report.export, errors=errors)), Pictures(), tmp_path)
    random = "only dtype and shape, since they depend on random values"
    assert f"<dt>tolerances</dt><dd>of float16: y, z; {random}: noise</dd>" in html


def test_what_a_reverted_pass_made_of_a_structure_is_drawn_there_alone(tmp_path: Path) -> None:
    verdicts = tuple(StructureVerdict("qkv", f"layers.{at}", "", True, None) for at in range(2))
    (group,) = page_of(report(structures=verdicts), pictures(layers=2), tmp_path).groups
    panels = [[(panel.title, panel.weights) for panel in figure.panels] for figure in group.figures]
    both = [("source", "3 × 8×8"), ("final model", "3 × 8×8")]
    assert panels == [[*both, ("taken back", "8×24")], both]
    assert [row.names[0][1] for row in group.rows] == ["Q_0", "Q_1"]


def test_a_reverted_step_leaves_the_model_as_it_was() -> None:
    shown = timeline(
        row("fuse", after=7),
        row("breaks", Status.REVERTED, before=7, after=3, reason="breaks qkv"),
        row("idle", before=7, after=7),
        marks=(Mark(0, "1" * 12, 2048, {"MatMul": 2, "Add": 5}), Mark(1, "2" * 12, 1024, {"MatMul": 3})),
    )
    assert [(row.name, row.nodes, row.nbytes, sum(part.count for part in row.shares)) for row in shown.rows] == [
        ("source", 9, 4096, 9),
        ("fuse", 7, 2048, 7),
        ("breaks", 3, 1024, 3),
        ("idle", 7, 2048, 7),
    ]
    assert shown.final.name == "fuse"


def test_passes_that_found_nothing_to_do_are_one_line() -> None:
    shown = timeline(row("a"), row("b"), row("c", Status.SKIPPED, reason="skip: c"), row("d"))
    assert [(quiet, [row.name for row in rows]) for quiet, rows in shown.groups()] == [
        (False, ["source"]),
        (True, ["a", "b"]),
        (False, ["c"]),
        (True, ["d"]),
    ]


def test_operators_beyond_the_colours_are_one() -> None:
    ops = {f"Op{at}": 20 - at for at in range(12)}
    shown = timeline_of(replace(report(), marks=(Mark(SOURCE, "0" * 12, 1, ops),)), Path("nowhere"))
    assert [entry.op for entry in shown.legend] == [*(f"Op{at}" for at in range(8)), "other"]
    assert shown.rows[0].shares[-1].count == 12 + 11 + 10 + 9


def test_long_diffs_are_cut(tmp_path: Path) -> None:
    nodes = [NodeLabel("Identity", f"node_{at}") for at in range(50)]
    model_diff = Diff(
        replaced=tuple(Replacement((node,), (), ("val_27",)) for node in nodes),
        attributes=(AttributeChange(nodes[0], "axis", "0", "1" * 5000),),
    )
    changed_row = row("eliminate", before=59, after=9)
    folder = tmp_path / diff_folder(0, changed_row)
    folder.mkdir(parents=True)
    (folder / "diff.json").write_text(json.dumps(diff_as_data(model_diff)))
    diff = timeline_of(report(changed_row), tmp_path).rows[1].diff
    assert diff is not None
    nodes_section, attributes = diff.sections
    assert (len(nodes_section.entries), nodes_section.more) == (30, 20)
    assert len(attributes.entries[0].text) == 300
    html = html_of(report(changed_row), pictures(), tmp_path)
    assert "<del>Identity node_29</del>" in html
    assert "<ins>stored constant val_27</ins>" in html
    assert "and 20 more" in html
    (folder / "diff.json").write_text("{")
    assert timeline_of(report(changed_row), tmp_path).rows[1].diff is None, "a damaged one is as none"


# Nodes as a drawing.


def drawn(model, kind: str) -> Drawing:
    view = GraphView(detached(model))
    structure = structure_of(kind)
    assert structure is not None
    (instance,) = structure.find(view.model).instances
    return draw(subgraph_of(instance, view), view, instance)


def lines(drawing: Drawing) -> list[str]:
    """Kind, operator, role if it says something else, and detail."""
    told = ((one.kind[0], one.op, one.role.removeprefix(one.op), one.detail) for one in drawing.boxes)
    return [" ".join(filter(None, words)) for words in told]


def test_q_k_and_v_down_to_their_attention() -> None:
    drawing = drawn(attention(), "qkv")
    assert lines(drawing) == [
        "i h 2×8×32",
        *(f"n MatMul {role} 32×32" for role in "QKV"),
        *["n Reshape → 2×8×2×16"] * 3,
        "n Transpose → 2×2×8×16",
        "n Transpose → 2×2×16×8",
        "n Transpose → 2×2×8×16",
        "n MatMul",
        "n Mul",
        "n Softmax",
        "n MatMul",
        "n Transpose → 2×8×2×16",
        "n Reshape → 2×8×32",
        "o MatMul 2×8×32",
    ]
    assert [(wire.start, wire.end, wire.shape) for wire in drawing.wires[:3]] == [
        (0, place, "2×8×32") for place in (1, 2, 3)
    ]


def test_what_only_asks_for_a_shape_or_a_type_is_no_reader() -> None:
    model = model_of(
        """g (float[2, N, 32] x) => (float[2, N, 32] y, int64[3] s) {
            n = LayerNormalization <axis = -1> (x, w)
            s = Shape (n)
            one = Constant <value_float = 1.0> ()
            c = CastLike (one, n)
            y = Mul (n, c)
        }""",
        w=matrix(1, 32, 0)[0],
    )
    drawing = drawn(model, "layernorm")
    assert lines(drawing) == ["i x 2×N×32", "n LayerNormalization 32", "o Mul 2×N×32"]


def test_a_drawing_ends_somewhere() -> None:
    body = "\n".join(f"v{at + 1} = Relu (v{at})" for at in range(40))
    view = GraphView(detached(model_of(f"g (float[2] v0) => (float[2] v40) {{ {body} }}")))
    (instance, *_) = structure_of("op:Relu").find(view.model).instances  # type: ignore[union-attr]
    drawing = draw(view.nodes, view, instance)
    assert (sum(one.kind is BoxKind.NODE for one in drawing.boxes), drawing.omitted) == (MOST_NODES, 8)


def test_a_dim_that_only_inference_has_named() -> None:
    """Else layers that are alike would look different."""
    model = model_of("g (float[N] x) => (float[M, 1] y) { i = NonZero (x)  t = Transpose (i)  y = Cast <to = 1> (t) }")
    assert any(dim.dim_param.startswith("unk__") for info in model.graph.value_info for dim in _dims(info))
    assert [row.shapes for row in node_rows(GraphView(detached(model)))][:2] == [("int64 1×?",), ("int64 ?×1",)]


def _dims(info: onnx.ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension]:
    return list(info.type.tensor_type.shape.dim)


def test_rows_of_nodes() -> None:
    model = model_of("g (float[2, N] x) => (float[2, N] y) { y = Relu (x) }")
    (row,) = node_rows(GraphView(detached(model)))
    assert (row.name, row.op, row.shapes, row.module, row.made_by) == ("y", "Relu", ("float 2×N",), None, "")


def test_compiled_templates_are_kept_as_bytecode_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert environment.__wrapped__().bytecode_cache is None
