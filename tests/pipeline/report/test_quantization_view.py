"""The section on quantization: what it says dominates, and its rows."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

from pipeline.report import Mark
from pipeline.report.html import page_of, render
from pipeline.report.html.quantization import quantization_view
from pipeline.report.model import Quantization, QuantizedLayer, QuantizedOutput, QuantizedStructure, QuantizedTensor
from pipeline.stages.report import save_quantization, write_page
from pipeline.workspace import Workspace
from tests.pipeline.report.sample_report import html_of, pictures, report

FOUND = Quantization(
    rows=(
        QuantizedTensor("h", "MatMul", "layers.0.q", "qkv layers.0 q", "uint8", 40.0, 30.0),
        QuantizedTensor("s", "Add", "layers.0", "", "uint8", 12.0, 11.0),
        QuantizedTensor("y", "Relu", "", "", "uint8", math.inf, 20.0),
    ),
    layers=(
        QuantizedLayer("h", "MatMul", "layers.0.q", "qkv layers.0 q", 20.0, 0.6),
        QuantizedLayer("d", "Gemm", "head", "", 22.0, 0.35),
        QuantizedLayer("e", "Gemm", "", "", 35.0, 0.05),
    ),
    outputs=(QuantizedOutput("y", 17.5, 0.25, 17.0),),
    structures=(QuantizedStructure("gelu", "layers.0.act", "y", "s", 12.0, math.inf),),
    left_in_float={"the rule 'op:Relu' says float": 2},
    weight_bytes=4 << 20,
    quantized_weight_bytes=1 << 20,
    quantized_tensors=7,
    tensors=9,
)


def test_the_layers_that_make_most_of_the_noise_are_named() -> None:
    view = quantization_view(FOUND)
    assert view is not None
    assert view.sentence == (
        "2 layers of 3 make 95% of what all layers add to the noise of the outputs; the most is layers.0.q with 60%."
    )
    assert [card.value for card in view.cards] == ["17.5 dB", "4.0 → 1.0 MiB", "7 of 9"]


def page_text(tmp_path: Path, data: Quantization = FOUND) -> str:
    return render(page_of(report(), pictures(), tmp_path, data))


def test_layers_are_bars_of_the_greatest_share(tmp_path: Path) -> None:
    bar = re.compile(
        r"<b>([^<]*)</b> <small[^>]*>([^<]*)</small>.*?width:([\d.]+)%.*?cell\">([^<]*)</span>.*?>([^<]*)<"
    )
    section = page_text(tmp_path).partition("What dominates")[2]
    assert bar.findall(section)[:3] == [
        ("layers.0.q", "Q", "100.0", "60%", "20.0 dB"),
        ("head", "Gemm d", "58.33", "35%", "22.0 dB"),
        ("e", "Gemm", "8.33", "5%", "35.0 dB"),
    ]


def cells(*texts: str) -> str:
    return "".join(f"<td>{text}</td>" for text in texts)


def test_a_structure_has_its_worst_step_and_its_result(tmp_path: Path) -> None:
    assert cells("gelu", "layers.0.act", "s", "12.0 dB", "exact") in page_text(tmp_path)


def test_a_step_that_is_no_layer_is_named_where_layers_do_not_explain_the_noise() -> None:
    view = quantization_view(replace(FOUND, outputs=(QuantizedOutput("y", 1.0, 2.5, None),)))
    assert view is not None
    assert view.sentence == (
        "The layers below do not explain the noise: together they leave 17.8 dB, and the outputs have 1.0 dB. "
        "The worst step is Add layers.0, with 12.0 dB alone."
    )


def test_what_is_not_known_is_said() -> None:
    view = quantization_view(replace(FOUND, layers=(), not_estimated="no gradient goes through CumSum"))
    assert view is not None
    assert view.sentence == "The part of each layer is not estimated: no gradient goes through CumSum."
    assert quantization_view(None) is None


def test_parts_are_rows_of_their_own_and_tensors_are_worst_first(tmp_path: Path) -> None:
    html = page_text(tmp_path)
    assert cells("qkv layers.0", "Q", "uint8", "40.0 dB", "30.0 dB", "20.0 dB") in html
    rows = (
        cells("layers.0", "Add", "uint8", "12.0 dB", "11.0 dB"),
        cells("layers.0.q", "MatMul", "uint8", "40.0 dB", "30.0 dB"),
        cells("y", "Relu", "uint8", "exact", "20.0 dB"),
    )
    places = [html.index(text) for text in rows]
    assert places == sorted(places)
    view = quantization_view(FOUND)
    assert view is not None
    alone, in_all = view.curves
    assert [tick.text for tick in alone.ticks] == ["10 dB", "20 dB", "30 dB", "40 dB", "equal"]
    assert alone.points[2][1] == 0.0
    assert [x for x, _ in alone.points] == [x for x, _ in in_all.points]


def test_the_section_is_saved_with_infinite_ratios(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.stages.mkdir()
    save_quantization(FOUND, report(), workspace)
    write_page(report(), pictures(), workspace)
    assert "What dominates" in (tmp_path / "report.html").read_text()
    write_page(report(marks=(Mark(-1, "another", 0, {}),)), pictures(), workspace)
    assert "What dominates" not in (tmp_path / "report.html").read_text()


def test_only_a_simulation_adds_the_section(tmp_path: Path) -> None:
    assert 'id="quantization"' not in html_of(report(), pictures(), tmp_path)
    html = render(page_of(report(), pictures(), tmp_path, FOUND))
    assert 'id="quantization"' in html
    assert "What dominates" in html


def test_notes_stand_on_the_page(tmp_path: Path) -> None:
    noted = replace(FOUND, notes=("the rule 'op:*' says int8/channel of 5 activations: each has one scale",))
    for data, is_there in ((noted, True), (FOUND, False)):
        text = render(page_of(report(), pictures(), tmp_path, data))
        assert ("1 note on formats and runs" in text) is is_there
        assert ("int8/channel of 5 activations: each has one scale" in text) is is_there
