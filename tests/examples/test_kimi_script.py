"""The script of the huge model, in small: its files, its own check from those files, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import extract_kimi_k25_text_ir as script

NAMES = {f"kimi_k25_text_{one}.json" for one in ("prefill_ir", "decode_ir", "kv_mapping")}


def test_verify_runs_the_saved_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pipeline.torch_ir")
    assert script.main(["--output-dir", str(tmp_path / "out"), "--verify", "--layers", "2"]) == 0
    assert "every token is the eager model's" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == NAMES
    mapping = json.loads((tmp_path / "out" / "kimi_k25_text_kv_mapping.json").read_text())
    assert [row["layer"] for row in mapping["layers"]] == [0, 1]
    decode = json.loads((tmp_path / "out" / "kimi_k25_text_decode_ir.json").read_text())
    assert decode["model_name"] == "KimiK25_Text_Decode"
    ops = {name: node["op_type"] for node in decode["nodes"] for name in (one["name"] for one in node["outputs"])}
    assert {ops[row["decode_key_output"]] for row in mapping["layers"]} == {"aten.index_copy.default"}


def test_verify_fails_when_a_state_goes_to_the_wrong_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pipeline.torch_ir")
    from pipeline.export.static_cache import layers

    monkeypatch.setattr(layers.FixedLayer, "update", layers.FreshLayer.update)  # the new states alone, no cache
    assert script.main(["--output-dir", str(tmp_path), "--verify", "--layers", "2"]) != 0
    assert capsys.readouterr().err


def test_mistakes_are_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--output-dir", str(tmp_path), "--config", str(tmp_path / "none.json"), "--verify"]) == 2
    assert "none.json cannot be read as the JSON of a text_config" in capsys.readouterr().err
