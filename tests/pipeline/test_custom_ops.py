"""A configuration with `custom_ops`: torch's operator is exported as the custom one, and backends run its reference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.parser import parse_model as parse

from passes.custom_ops import declare_ops
from pipeline.cli import main
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.histograms import Method
from pipeline.quantsim.placement import PlacementRule, place
from tests.support.onnx_models import detached
from tests.support.paths import ROOT


def command(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr("sys.argv", ["onnxline", *arguments])
        main()
    return int(end.value.code or 0)


def test_an_operator_is_declared_once_for_export_passes_proof_and_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert (
        command("run", str(ROOT / "configs" / "custom_ops.yaml"), "--out", str(run), "--quiet", "--recipe", "default")
        == 0
    )
    report = json.loads((run / "report.json").read_text())
    backends = {row["name"]: row for row in report["runtime"]["backends"]}
    assert [*backends] == ["onnxruntime", "plan"]
    assert all(row["fallbacks"] == ["com.acme::SwishBeta"] for row in backends.values())
    assert all(row["status"] == "ran" for row in backends.values())
    nodes = onnx.load(run / "model.onnx").graph.node
    (node,) = (node for node in nodes if node.domain == "com.acme")
    assert [(attribute.name, attribute.f) for attribute in node.attribute] == [("beta", 1.5)]

    model, ops = str(run / "model.onnx"), str(ROOT / "examples" / "custom_ops.py")
    assert command("compare", model, model, "--custom-ops", ops) == 0
    assert "equal in every bit" in capsys.readouterr().out


GATE = """
<ir_version: 10, opset_import: ["" : 20, "com.acme" : 1]>
g (float[2, 8] x) => (float[2, 8] y) {
    a = Neg (x)
    i = Identity (a)
    b = BODY
    y = Abs (b)
}
"""
SWISH = "com.acme.SwishBeta <beta = 1.5> (i)"


def test_commands_take_them_from_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(parse(GATE.replace("BODY", SWISH)), tmp_path / "model.onnx")
    config = tmp_path / "gate.yaml"
    config.write_text(
        f"name: gate\ncustom_ops: {ROOT / 'examples' / 'custom_ops.py'}\nmodel: {{onnx: model.onnx}}\n"
        "passes: {recipe: [eliminate_identity]}\nruntime: {backends: [onnxruntime]}\n"
    )
    assert command("bisect", str(config), "--error", "1e-6") == 1  # nothing is wrong
    assert "outputs are off by at most 0" in capsys.readouterr().out
    run = tmp_path / "run"
    assert command("run", str(config), "--out", str(run), "--quiet") == 0
    for model in ([str(config), "--out", str(run)], [str(run)]):
        assert command("debug", "compare", "onnxruntime", "plan", *model) == 0
        assert "no difference" in capsys.readouterr().out
    config.write_text(f"{config.read_text()}quantsim: {{calibration: {{samples: 2}}, sensitivity: false}}\n")
    assert command("quantsim", str(config), "--out", str(run), "--quiet") == 0
    text = (run / "quantsim.json").read_text()
    assert "quantsim.sensitivity is false" in text
    assert command("quantsim", str(config), "--set", "quantsim.suggest.sqnr_db=20") == 2
    assert "found suggest next to sensitivity: false" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse"])
def test_ranges_around_them_are_those_of_the_same_model_in_onnxs_operators(method: Method) -> None:
    plain = "k = Constant <value_float = 1.5> () t = Mul (k, i) s = Sigmoid (t) b = Mul (i, s)"
    samples = [{"x": np.random.default_rng(seed).standard_normal((2, 8), np.float32)} for seed in range(4)]
    found = []
    with declare_ops([ROOT / "examples" / "custom_ops.py"]):
        for text in (GATE.replace("BODY", SWISH), GATE.replace("b = BODY", plain)):
            model = detached(parse(text))
            found.append(
                calibrate(model, place(model, [PlacementRule("op:*", None, parse_precision("uint8"))]), samples, method)
            )
    assert all(found[0][name] == pytest.approx(found[1][name], rel=1e-6) for name in ("a", "b", "y"))
