"""`onnxline debug compare`: exit codes, what it prints, and what it takes as MODEL."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from typer.testing import CliRunner, Result

from pipeline.cli import app
from pipeline.config import RunConfig
from pipeline.errors import SourceError, Unsupported, UsageError
from pipeline.importers import from_onnx
from pipeline.ir.json import to_json
from pipeline.verify import backends
from pipeline.verify.backends import OnnxFile, Plan, RunnableModel
from tests.support.paths import ROOT

MODEL = """<ir_version: 10, opset_import: ["": 20]> small
    (float[batch, 4] x) => (float[batch, 4] y) <float[4] w = {1, 2, 3, 4}> {
        scaled = Mul (x, w)
        bent = Neg (scaled)
        y = Tanh (bent)
    }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "small.onnx")
    return tmp_path / "small.onnx"


@pytest.fixture
def _bent_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend `plan` that is at fault: it runs another model, whose `bent` is positive."""
    onnx.save(onnx.parser.parse_model(MODEL.replace("Neg", "Abs")), tmp_path / "bent.onnx")

    class BentPlan(Plan):
        def __init__(self, model: RunnableModel, *settings: Any, **named: Any) -> None:
            super().__init__(OnnxFile(tmp_path / "bent.onnx"), *settings, **named)

    monkeypatch.setitem(backends.BACKENDS, "plan", BentPlan)  # type: ignore[arg-type]


def call(*words: str | Path) -> Result:
    result = CliRunner().invoke(app, ["debug", "compare", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_no_difference(model: Path) -> None:
    shown = call("torch", "plan", model)
    assert shown.exit_code == 0
    assert shown.output.startswith("no difference: torch and plan agree on 3 values")


@pytest.mark.usefixtures("_bent_plan")
def test_the_first_divergence(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.array([[1, -1, 0.5, 0], [0, 0, 0, 2]], np.float32))
    shown = call("onnxruntime", "plan", model, "--first-divergence", "--inputs", tmp_path / "in.npz")
    assert shown.exit_code == 1
    assert shown.output.splitlines() == [
        "bent: float32[2, 4], made by Neg",
        "  largest difference 16 at [1, 3]: -8.0 by onnxruntime, 8.0 by plan",
        "  max abs error 16 is over 0.00081",
        "  onnxruntime  least -8  largest 2  mean -1.0625  deviation 2.78879",
        "  plan         least 0  largest 8  mean 1.5625  deviation 2.54261",
        "  it reads",
        "    tmp scaled: float32[2, 4], least -2  largest 8  mean 1.0625  deviation 2.78879, equal on both",
        "2 values compared, 1 of them differ",
    ]


@pytest.mark.usefixtures("_bent_plan")
def test_every_divergence(model: Path) -> None:
    lines = call("torch", "plan", model, "--most", "1").output.splitlines()
    assert lines[0].startswith("bent: ")
    assert lines[-2:] == ["and 1 value more (--most shows them)", "3 values compared, 2 of them differ"]


@pytest.mark.usefixtures("_bent_plan")
def test_tolerances_and_json(model: Path) -> None:
    assert call("torch", "plan", model, "--atol", "100").exit_code == 0
    data = json.loads(call("torch", "plan", model, "--json").output)
    assert (data["format_version"], data["backends"], data["compared"]) == (1, ["torch", "plan"], 3)
    assert [one["value"] for one in data["divergences"]] == ["bent", "y"]
    assert data["divergences"][0]["inputs"][0]["name"] == "scaled"


@pytest.mark.usefixtures("_bent_plan")
def test_seeds_and_sizes_of_open_dims(model: Path) -> None:
    def first(*words: str) -> dict[str, str]:
        return json.loads(call("torch", "plan", model, "--first-divergence", "--json", *words).output)["divergences"][0]

    assert first("--seed", "3") == first("--seed", "3")
    assert first("--seed", "3")["worst"] != first("--seed", "4")["worst"]
    assert (first()["type"], first("--set", "model.dims.batch=[5]")["type"]) == ("float32[2, 4]", "float32[5, 4]")


def test_a_run_by_its_folder_and_by_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {
        "name": "small",
        "model": {"onnx": "small.onnx", "dims": {"batch": [3]}, "inputs": {"x": {"range": [5, 6]}}},
        "passes": {"recipe": []},
        "runtime": {"backends": ["onnxruntime"]},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(settings))
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "small.onnx")
    with pytest.raises(UsageError, match=r"there is no runs/small/model\.onnx"):
        call("torch", "plan", "small.yaml")
    assert CliRunner().invoke(app, ["run", "small.yaml", "-q"]).exit_code == 0
    for subject in ("small.yaml", "runs/small"):
        shown = json.loads(call("torch", "plan", subject, "--json").output)
        assert (shown["compared"], shown["divergences"]) == (3, [])
    np.savez("in.npz", x=np.zeros((2, 4), np.float64))
    with pytest.raises(SourceError, match=r"--inputs: in\.npz: 'x' is float64"):
        call("torch", "plan", "runs/small", "--inputs", "in.npz")


def test_an_ir(model: Path, tmp_path: Path) -> None:
    import torch

    graph = from_onnx(model, dims={"batch": 2})
    (tmp_path / "ir.json").write_text(json.dumps(to_json(graph)))
    torch.save({"w": torch.tensor([4.0, 3.0, 2.0, 1.0])}, tmp_path / "w.pt")
    shown = call("plan", "torch", tmp_path / "ir.json", "--weights", tmp_path / "w.pt")
    assert (shown.exit_code, "agree on 3 values" in shown.output) == (0, True)
    with pytest.raises(UsageError, match=r"holds no values for w; name a file of its weights by --weights"):
        call("plan", "torch", tmp_path / "ir.json")
    with pytest.raises(UsageError, match=r"onnxruntime runs ONNX files, and .* is none"):
        call("onnxruntime", "torch", tmp_path / "ir.json", "--weights", tmp_path / "w.pt")


def test_an_ir_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = f"{ROOT / 'examples/attention_block.py'}:make"
    assert CliRunner().invoke(app, ["ir", "extract", source, "-o", "block.json"]).exit_code == 0
    import torch

    from pipeline.export.load import load_source

    module = load_source(RunConfig.from_mapping({"model": {"factory": source}}).model).module  # type: ignore[union-attr]
    torch.save(module.state_dict(), "block.pt")
    shown = call("torch", "plan", "block.json", "--weights", "block.pt")
    assert shown.exit_code == 0, shown.output


def test_what_no_plan_can_take_is_a_mistake(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> odd (float[2, 4] x) => (int64[2, n] y) { y = NonZero (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "odd.onnx")
    with pytest.raises(
        Unsupported, match=r"(?s)NonZero.*`onnxline run` takes a model with If, .* in segments"
    ) as error:
        call("onnxruntime", "plan", tmp_path / "odd.onnx")
    assert error.value.operators == ("NonZero",)


def test_nothing_in_common_is_not_called_no_difference(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(onnx.parser.parse_model(re.sub(r"\b(scaled|bent|y)\b", r"\1_", MODEL)), tmp_path / "other.onnx")

    class OtherPlan(Plan):
        def __init__(self, model: RunnableModel, *settings: Any, **named: Any) -> None:
            super().__init__(OnnxFile(tmp_path / "other.onnx"), *settings, **named)

    monkeypatch.setitem(backends.BACKENDS, "plan", OtherPlan)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="torch and plan have no value in common, so nothing was compared"):
        call("torch", "plan", model)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("torch", "plann", "m.onnx"), "no backend 'plann'; did you mean 'plan'?; backends: torch, onnxruntime, plan"),
        (("plan", "plan", "m.onnx"), "found plan twice, which cannot differ from itself; expected two backends"),
        (("plan", "torch", "m.onnx"), "no such file"),
        (("plan", "torch", "m.json"), "there is no file m.json; expected an IR"),
        (("plan", "torch", "m.onnx", "--inputs", "x.npz", "--seed", "1"), "--seed has no effect"),
        (("plan", "torch", "m.onnx", "--first-divergence", "--most", "3"), "--most has no effect"),
        (("plan", "torch", "m.onnx", "--weights", "w.pt"), "--weights is for an IR"),
        (
            ("plan", "torch", "m.json", "--set", "runtime.native=true"),
            "--set is for a configuration, a run or an ONNX file",
        ),
        (("plan", "torch", "m.json", "--out", "runs/m"), "--out is for a configuration, a run or an ONNX file"),
    ],
)
def test_mistakes(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as error:
        call(*words)
    assert said in str(error.value)
    assert error.value.exit_code == 2
