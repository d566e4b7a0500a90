"""The section of `report.html` on names."""

from __future__ import annotations

import json
from pathlib import Path

from passes.provenance.annotations import NameMap
from pipeline.report import report_json
from pipeline.report.html.headline import MOST_ROWS, name_tables
from tests.pipeline.report.sample_report import html_of, pictures, report, row

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
