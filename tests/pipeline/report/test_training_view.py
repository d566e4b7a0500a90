"""The section on a training: phases, the curve of the loss, and numbers of the trained model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.events import Phase
from pipeline.report import Pictures, report_json
from pipeline.report.html.curves import training_view
from pipeline.report.model import StepRecord, TrainingReport
from tests.pipeline.report.sample_report import html_of, report

FOUND = TrainingReport(
    steps=3,
    last_loss=1.5,
    loss="cross-entropy",
    optimizer="adamw(lr=0.003)",
    parameters=1234,
    ops=74,
    phases=(Phase("Trace", 2.0, "74 ops"), Phase("Replay", 0.5, "3 steps")),
    losses=(StepRecord(1, 2.0, 0.1), StepRecord(2, 1.5, 0.2), StepRecord(3, 1.0, 0.3)),
    metrics={"accuracy": 0.98765},
)


def test_the_curve_has_a_point_for_each_step_on_a_round_axis() -> None:
    view = training_view(FOUND)
    assert view is not None
    assert view.curve is not None
    assert [tick.text for tick in view.curve.ticks] == ["1", "1.2", "1.4", "1.6", "1.8", "2"]
    assert view.curve.points == (
        (64.0, pytest.approx(0.0)),
        (504.0, pytest.approx(60.0)),
        (944.0, pytest.approx(120.0)),
    )
    assert [(label.text, label.position) for label in view.labels] == [("1", 64.0), ("2", 504.0), ("3", 944.0)]


def test_an_axis_begins_at_zero_where_that_is_near() -> None:
    view = training_view(replace(FOUND, losses=(StepRecord(1, 2.3, 0.1), StepRecord(2, 0.4, 0.2))))
    assert view is not None
    assert view.curve is not None
    assert [tick.text for tick in view.curve.ticks] == ["0", "0.5", "1", "1.5", "2", "2.5"]


@pytest.mark.parametrize("loss", [0.0, 0.7, -2.0])
def test_a_loss_that_does_not_move_is_a_line(loss: float) -> None:
    view = training_view(replace(FOUND, losses=tuple(StepRecord(step, loss, 0.1) for step in range(1, 5))))
    assert view is not None
    assert view.curve is not None
    assert len({height for _, height in view.curve.points}) == 1
    assert 0 <= view.curve.points[0][1] <= 120


def test_many_steps_are_points_of_their_means() -> None:
    losses = tuple(StepRecord(step + 1, float(step % 3), 0.1) for step in range(1200))
    view = training_view(replace(FOUND, steps=1200, losses=losses))
    assert view is not None
    assert view.curve is not None
    assert (view.pooled, len(view.curve.points)) == (3, 400)
    assert len({round(height, 6) for _, height in view.curve.points}) == 1  # each is the mean of 0, 1 and 2
    assert [label.text for label in view.labels] == ["1", "241", "481", "720", "960", "1,200"]


def page_text(tmp_path: Path, training: TrainingReport = FOUND) -> str:
    trained = replace(report(), export=None, structures=(), marks=(), runtime=None, training=training)
    return html_of(trained, Pictures(), tmp_path)


def test_phases_are_bars_of_the_longest(tmp_path: Path) -> None:
    bar = re.compile(r"<b>(\w+)</b> <small>[^<]*</small>.*?width:([\d.]+)%.*?cell\"[^>]*>([^<]*)</span>")
    section = page_text(tmp_path).partition("Phases of the train step")[2]
    assert bar.findall(section) == [("Trace", "100.0", "2.00 s"), ("Replay", "25.0", "500 ms")]


def test_a_training_of_one_step_has_no_curve(tmp_path: Path) -> None:
    view = training_view(replace(FOUND, losses=FOUND.losses[:1]))
    assert view is not None
    assert view.curve is None
    assert "No step was done." in page_text(tmp_path, replace(FOUND, steps=0, losses=(), last_loss=None))


def test_the_page_and_the_file_have_the_training(tmp_path: Path) -> None:
    trained = replace(report(), export=None, structures=(), marks=(), runtime=None, training=FOUND)
    html = page_text(tmp_path)
    assert 'id="training"' in html
    assert "3 steps; the loss of the first was 2.0000, the mean of the last is 1.5000." in html
    assert "<title>✓ trained · made_up</title>" in html
    assert 'points="64.0,0.0 504.0,60.0 944.0,120.0"' in html
    for text in ("Trace", "Replay", "adamw(lr=0.003)", "0.9877", "1,234"):
        assert text in html
    data = json.loads(report_json(trained))["training"]
    assert data["losses"][0] == {"step": 1, "loss": 2.0, "seconds": 0.1}
    assert [phase["name"] for phase in data["phases"]] == ["Trace", "Replay"]


def test_a_run_has_no_such_section(tmp_path: Path) -> None:
    assert training_view(None) is None
    assert 'id="training"' not in html_of(report(), Pictures(), tmp_path)
    assert json.loads(report_json(report()))["training"] is None
