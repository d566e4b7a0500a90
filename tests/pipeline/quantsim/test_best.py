"""`--best`: the table of trials, the winner by held-out samples, and a configuration that is no file of the user's."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from passes.weights.detached import attach
from pipeline.cli import app
from pipeline.config import QuantSimConfig, RunConfig
from pipeline.errors import CheckFailed, UsageError
from pipeline.quantsim import best
from pipeline.quantsim.best import TITLE, Combination, find_best, seconds_of, trials_of
from tests.pipeline.quantsim.pictures_of_qdq import mlp

CONFIG = """
model: {onnx: mlp.onnx}
passes: {recipe: []}
runtime: {backends: [onnxruntime]}
quantsim:
  profile: weight-only
  rules: {"op:*": {weights: int8}, "tensor:second": {weights: float}}
  calibration: {data: x.npy}
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    onnx.save(attach(mlp()), tmp_path / "mlp.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(4, 2, 4)).astype(np.float32))
    (tmp_path / "mlp.yaml").write_text(CONFIG)
    return RunConfig.from_yaml(tmp_path / "mlp.yaml")


def test_a_trial_is_a_simulation_and_its_configuration_is_no_file_of_the_users(
    config: RunConfig, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "best.yaml").write_text("model: mine\n")
    found = find_best(config, 1000, out, trials=[Combination("int6/channel")])
    assert found.winner.sqnr_db is not None and found.winner.sqnr_db > 30
    assert found.config == out / "best-2.yaml"
    assert (out / "best.yaml").read_text() == "model: mine\n"
    assert found.config.read_text().startswith(TITLE)
    again = RunConfig.from_yaml(found.config).quantsim
    assert again is not None
    weights = {name: rule.weights for name, rule in again.rules.items()}
    assert weights == {"op:*": "int6/channel", "tensor:second": "float"}
    assert f"int6/channel, rounding to nearest, {found.winner.sqnr_db:.2f} dB" in list(found.lines())[-1]


def test_the_highest_ratio_wins_and_a_trial_without_one_has_its_reason(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = {"int4/channel": 20.0, "int6/channel": 30.0, "int2/channel": None}
    ran: list[str] = []

    def run_trial(trial: Combination, *_: object) -> tuple[Combination, object]:
        ran.append(trial.weights)
        return replace(trial, sqnr_db=ratios[trial.weights], seconds=10.0, why="no kernel"), SimpleNamespace(
            folder=tmp_path
        )

    monkeypatch.setattr(best, "run_trial", run_trial)
    found = find_best(config, 1000, trials=[Combination(weights) for weights in ratios])
    assert found.winner.weights == "int6/channel"
    assert ran == [*ratios, "int6/channel"], "its files are those in the folder"
    rows = [line.split()[:5] for line in found.lines()]
    assert rows[3] == ["int2/channel", "rounding", "to", "nearest", "no"]
    short = find_best(config, 9, trials=[Combination(weights) for weights in ratios])
    assert [trial.why for trial in short.trials] == ["no kernel", "no time left", "no time left"]
    with pytest.raises(CheckFailed, match="none of 1 trial came to its end:\n  int2/channel, rounding to nearest: no"):
        find_best(config, 1000, trials=[Combination("int2/channel")])


def offered(settings: dict[str, Any], *installed: str) -> list[tuple[str, str]]:
    return [(trial.weights, trial.row()[1]) for trial in trials_of(QuantSimConfig.model_validate(settings), installed)]


def test_libraries_add_their_steps() -> None:
    def steps(*installed: str) -> set[str]:
        return {name for _, names in offered({}, *installed) for name in re.split(r", (?![^{]*})", names)}

    own = steps("onnxsim")
    preparing = {"awq {add_nodes: true}", "smooth-quant {add_nodes: true}", "cross-layer-equalization"}
    fitted = {"gptq {act_order: true}", "gptq {mse: true}", "gptq {act_order: true, mse: true}"}
    rounding = {"gptq", *fitted, "bias-correction"}
    assert own == {"rounding to nearest", *rounding, *preparing}
    assert steps("onnxsim", "aimet_onnx") - own == {"seq-mse", "ada-round"}
    assert steps("onnxsim", "nncf") - own == {"scale-estimation"}
    assert ("uint4/block32", "scale-estimation") in offered({}, "onnxsim", "nncf")


def test_the_steps_of_the_configuration_come_first_and_their_interpreter_serves_the_library() -> None:
    seq_mse = {"seq-mse": {"python": sys.executable, "candidates": 5}}
    rules = {"op:*": {"weights": "int4/block16"}}
    settings = QuantSimConfig.model_validate({"optimize": [seq_mse, "gptq"], "rules": rules})
    first, *others = trials_of(settings, ["onnxsim"])
    assert first == Combination("int4/block16", optimize=(seq_mse, "gptq"))
    assert Combination("int4/channel", optimize=({"seq-mse": {"python": sys.executable}},)) in others
    assert Combination("int4/channel", optimize=({"ada-round": {"python": sys.executable}},)) in others
    config = RunConfig.model_validate({"model": {"onnx": "m.onnx"}, "quantsim": settings})
    assert first.config(config).quantsim == settings and first.row()[1] == "seq-mse {candidates: 5}, gptq"


def test_steps_that_are_tried_anyway_are_tried_once() -> None:
    rules = {"op:*": {"weights": "int8/channel"}}  # more than 4 bits, so not as it is
    found = offered({"optimize": ["gptq"], "rules": rules}, "onnxsim")
    assert found[0] == ("int4/block32", "gptq") and found.count(found[0]) == 1


def test_a_budget_without_trials_is_refused(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["quantsim", str(tmp_path / "m.onnx"), "--budget", "20m"])
    assert "--budget: found '20m' without --best, expected --best 4bit" in str(shown.exception)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400)])
def test_a_budget_is_a_time(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["20", "m", "0m", "-1m", "20 minutes"])
def test_another_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--budget: found '.*', expected a time such as 90s, 20m or 1.5h"):
        seconds_of(text)


def test_equal_results_of_all_trials_are_said_with_a_reason(tmp_path: Path) -> None:
    left = "gptq leaves w: Conv is no product of computed rows with a matrix"
    first = Combination("int4/block32", sqnr_db=20.0, weight_bytes=900, left="")
    other = replace(first, optimize=("gptq",), left=left)
    failed = Combination("int4/channel", why="no time left")

    def said(*trials: Combination) -> str:
        found = best.Best(trials, first, tmp_path / "best.yaml", SimpleNamespace())  # type: ignore[arg-type]
        return " ".join(found.lines())

    assert f"all 2 trials have one result, so no step and no format makes a difference to this model: {left}" in said(
        first, other, failed
    )
    assert "one result" not in said(first, replace(other, sqnr_db=20.5))
    assert "one result" not in said(first, failed)
    assert "900 B" in said(first)
