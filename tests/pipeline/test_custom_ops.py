"""A configuration with `custom_ops`: torch's operator is exported as the custom one, and backends run its reference."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from pipeline.cli import main
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
