"""The metric of the task: built-in ones against numbers made by hand, the user's functions, bounds and suggestions."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from passes.weights.detached import DetachedModel, attach
from pipeline.baseline import changes
from pipeline.cli import app
from pipeline.config import QuantSimConfig, RunConfig, SuggestConfig
from pipeline.config.quantsim import MetricConfig
from pipeline.errors import CheckFailed, MissingExtra, SourceError, UsageError
from pipeline.quantsim.metric import MetricResult, TaskMetric, check_metric
from tests.pipeline.quantsim.pictures_of_qdq import model_of


def identity(rank: int) -> DetachedModel:
    """A model whose output is its input, so that a sample says what the model gives."""
    return model_of(
        f"g (float[{', '.join('abcd'[:rank])}] x) => (float[{', '.join('abcd'[:rank])}] y) {{ y = Identity(x) }}"
    )


def rate(use: str, samples: list[dict[str, np.ndarray]], target: tuple[str, ...] = ()) -> float:
    settings = MetricConfig(use=use, target=target)
    return TaskMetric(settings, identity(samples[0]["x"].ndim), lambda: samples).float_value


def test_top_1_counts_true_classes_and_no_row_without_one() -> None:
    scores = np.eye(4, dtype=np.float32)
    labels = np.array([0, 1, 3, -100])
    assert rate("top-1", [{"x": scores, "label": labels}], ("label",)) == pytest.approx(2 / 3)
    assert rate("top-1", [{"x": scores}]) == 1.0  # against the float model itself


def test_perplexity_is_that_of_the_next_token_without_padding() -> None:
    logits = np.log(np.array([[[0.5, 0.5], [0.25, 0.75], [0.1, 0.9], [0.9, 0.1]]], np.float32))
    ids = np.array([[0, 1, 0, 1]])
    wanted = math.exp(-(math.log(0.5) + math.log(0.25) + math.log(0.9)) / 3)
    assert rate("perplexity", [{"x": logits, "ids": ids}], ("ids",)) == pytest.approx(wanted, rel=1e-6)
    sample = {"x": logits, "input_ids": ids, "attention_mask": np.array([[1, 1, 1, 0]])}
    assert rate("perplexity", [sample]) == pytest.approx(math.exp(-(math.log(0.5) + math.log(0.25)) / 2), rel=1e-6)


def test_a_perplexity_that_rises_is_a_loss() -> None:
    logits, ids = np.zeros((1, 3, 2), np.float32), np.array([[0, 1, 0]])  # a perplexity of 2
    metric = TaskMetric(MetricConfig(use="perplexity"), identity(3), lambda: [{"x": logits, "input_ids": ids}])
    assert metric.loss(2.5) == pytest.approx(0.5) and metric.loss(1.5) == pytest.approx(-0.5)
    assert metric.is_within(1.5, 0.0) and not metric.is_within(2.5, 0.2)


def test_mean_iou_is_the_mean_of_the_classes_that_occur() -> None:
    truth = np.array([[[0, 0], [1, 255]]])
    scores = np.zeros((1, 3, 2, 2), np.float32)
    for (row, column), kind in {(0, 0): 0, (0, 1): 1, (1, 0): 1, (1, 1): 2}.items():
        scores[0, kind, row, column] = 1
    assert rate("mean-iou", [{"x": scores, "mask": truth}], ("mask",)) == pytest.approx((1 / 2 + 1 / 2) / 2)


def test_retrieval_finds_rows_of_one_label() -> None:
    rows = np.array([[1, 0], [1, 0.1], [0, 1], [0.9, -0.1]], np.float32)
    sample = {"x": rows, "kind": np.array([0, 0, 0, 1])}
    assert rate("retrieval-agreement", [sample], ("kind",)) == pytest.approx(3 / 4)
    assert rate("retrieval-agreement", [{"x": rows[:2]}, {"x": rows[2:]}]) == 1.0
    with pytest.raises(UsageError, match="found one row, expected two at least"):
        rate("retrieval-agreement", [{"x": rows[:1]}])


DETECTOR = """g (float[n, 4] b, float[n] s, int64[n] l) => (float[n, 4] boxes, float[n] scores, int64[n] labels) {
    boxes = Identity(b) scores = Identity(s) labels = Identity(l)
}"""


def detect(boxes: list[list[float]], scores: list[float], labels: list[int], **truth: Any) -> dict[str, np.ndarray]:
    """A sample of a detector that finds these boxes, with the true ones."""
    found = {
        "b": np.array(boxes, np.float32).reshape(-1, 4),
        "s": np.array(scores, np.float32),
        "l": np.array(labels, np.int64),
    }
    return {**found, **{name: np.array(value) for name, value in truth.items()}}


def test_map_is_the_mean_over_the_overlaps_that_count() -> None:
    """Ten overlaps count, 0.5, 0.55 … 0.95; a box that shares 5/8 of its union is found at the first three of them."""
    pytest.importorskip("torchmetrics")
    pytest.importorskip("torchvision")

    def rate_boxes(samples: list[dict[str, np.ndarray]], *target: str) -> float:
        return TaskMetric(MetricConfig(use="map", target=target), model_of(DETECTOR), lambda: samples).float_value

    one = detect([[0, 0, 10, 10]], [0.9], [1], box=[[0, 0, 10, 16]], kind=[1])
    assert rate_boxes([one], "box", "kind") == pytest.approx(0.3)
    exact = detect([[0, 0, 10, 16], [50, 50, 60, 60]], [0.9, 0.1], [1, 1], box=[[0, 0, 10, 16]], kind=[1])
    assert rate_boxes([exact], "box", "kind") == pytest.approx(1.0)  # a false one below the true one costs nothing
    none = detect([], [], [], box=[[0, 0, 10, 16]], kind=[1])
    assert rate_boxes([exact, none], "box", "kind") == pytest.approx(0.505, abs=0.01)
    assert rate_boxes([exact, none]) == pytest.approx(1.0)  # against the boxes of the float model that are sure


def test_map_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.detection", None)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    sample = detect([[0, 0, 1, 1]], [0.9], [1])
    with pytest.raises(MissingExtra, match=r"map needs torchmetrics.* pip install 'onnxline\[metrics\]'"):
        TaskMetric(MetricConfig(use="map"), model_of(DETECTOR), lambda: [sample])
    with pytest.raises(MissingExtra, match="map needs torchmetrics"):  # before a model is loaded
        check_metric(MetricConfig(use="map"))
    with pytest.raises(UsageError, match=r"map reads the outputs boxes, scores and labels of one image; found y \[1\]"):
        rate("map", [{"x": np.zeros(1, np.float32)}])


def test_what_does_not_suit_is_named() -> None:
    with pytest.raises(UsageError, match="no metric 'top-2'; did you mean 'top-1'"):
        check_metric(MetricConfig(use="top-2"))
    with pytest.raises(UsageError, match=r"mean-iou reads scores with the classes along axis 1; found y \[3\]"):
        rate("mean-iou", [{"x": np.zeros(3, np.float32)}])
    with pytest.raises(UsageError, match="found 4 classes and 2 true ones"):
        rate("top-1", [{"x": np.eye(4, dtype=np.float32), "label": np.zeros(2, int)}], ("label",))
    with pytest.raises(ValidationError, match=r"suggest.metric_drop without metric"):
        QuantSimConfig(suggest=SuggestConfig(metric_drop=0.1))
    with pytest.raises(ValidationError, match="found suggest next to shard_mib"):
        QuantSimConfig(suggest=SuggestConfig(size=0.1), shard_mib=1)


EVALUATE = """
def evaluate(model, samples):
    found = [model(sample)["y"].argmax(-1) == sample["label"] for sample in [*samples, *samples]]
    return sum(rows.mean() for rows in found) / (2 * len(samples))

def nothing(model, samples):
    return None
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Three products; the second has one large weight in each column, so that few bits cost the task there."""
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(size=(16, 16)).astype(np.float32) / 4 for name in ("first", "second", "third")}
    weights["second"][0] = 25
    model = model_of(
        "g (float[rows, 16] x) => (float[rows, 16] y) { h = MatMul(x, first) r = Relu(h) m = MatMul(r, second) "
        "y = MatMul(m, third) }",
        first=weights["first"],
        second=weights["second"],
        third=weights["third"],
    )
    onnx.save(attach(model), tmp_path / "net.onnx")
    first, second, third = weights.values()
    for number in range(2):
        x = draw.normal(size=(32, 16)).astype(np.float32)
        label = (np.maximum(x @ first, 0) @ second @ third).argmax(-1)
        np.savez(tmp_path / f"{number}.npz", x=x, label=label)
    (tmp_path / "task.py").write_text(EVALUATE)
    path = tmp_path / "net.yaml"
    path.write_text(
        "model: {onnx: net.onnx}\npasses: {recipe: []}\nruntime: {backends: [onnxruntime]}\n"
        "verify: {draws: 1, sizes: [2]}\n"
        'quantsim:\n  profile: weight-only\n  rules: {"op:*": {weights: int3/channel}}\n'
        '  calibration: {data: "*.npz"}\n'
        "  metric: {use: task.py:evaluate, target: label}\n"
    )
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_metric_of_a_function_is_a_gate_a_target_and_names_a_layer(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    metric = ["--set", "quantsim.suggest={metric_drop: 0.3, formats: {weights: int16/channel}}"]
    with pytest.raises(CheckFailed, match=r"evaluate: 1.0000 in float, 0.\d+ quantized .*, expected at least 0.99"):
        run("quantsim", config, *metric, "--set", "quantsim.metric.bound=0.99")
    found = json.loads(Path("runs/net/quantsim.json").read_text())
    assert found["suggestion"]["is_met"] and found["suggestion"]["metric"] >= 0.7 > found["metric"]["value"]
    text = run("bisect", config, "--metric")
    assert " (MatMul) costs it most: 0." in text and text.count(", sensitivity ") == 3
    run("baseline", "accept", config)
    baseline = config.with_suffix(".baseline")
    baseline.write_text(baseline.read_text().replace(", at least 0.", ", at least 1."))
    with pytest.raises(CheckFailed, match="1 entry is not as in"):
        run("baseline", "check", config)


def test_a_function_gives_a_number(config: Path) -> None:
    settings = RunConfig.from_yaml(config, [f"quantsim.metric.use={config.parent}/task.py:nothing"]).quantsim
    assert settings is not None and settings.metric is not None
    sample = {"x": np.zeros((2, 2), np.float32), "label": np.zeros(2)}
    with pytest.raises(SourceError, match="nothing returns None, expected a finite number"):
        TaskMetric(settings.metric, identity(2), lambda: [sample])


def test_a_baseline_holds_a_later_run_to_its_bound() -> None:
    def entry(value: float, lower: bool = False) -> Mapping[str, dict[str, str]]:
        return {"metric": MetricResult("m", 1.0, value, 8, lower).baseline_entry()}

    known = dict(entry(0.9))
    assert known == {"metric": {"m": "0.9, at least 0.891"}}
    assert changes(known, dict(entry(0.895))) == [] == changes(known, dict(entry(0.99)))
    assert changes(known, dict(entry(0.89))) == ["metric › m: 0.9, at least 0.891 → 0.89, at least 0.8811"]
    assert changes(dict(entry(9.0, lower=True)), dict(entry(9.05, lower=True))) == []
    assert changes(dict(entry(9.0, lower=True)), dict(entry(9.1, lower=True))) != []
