"""The plot of error and SQNR by layer."""

from __future__ import annotations

from pathlib import Path

from passes.diff import LayerErrors
from passes.proof.numbers import NO_ERROR, Errors
from pipeline.report.html.curves import layer_plot
from tests.pipeline.report.sample_report import html_of, pictures, report, row


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
