"""The script of the huge model, in small: its files, its own check from those files, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import extract_kimi_k25_text_ir as script

NAMES = {f"kimi_k25_text_{kind}.json" for kind in ("prefill_ir", "decode_ir", "kv_mapping")}


@pytest.mark.parametrize("layers", [2, 4])
def test_verify_runs_the_saved_files(layers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four layers: a dense one, two that are traced, and one that is stamped."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kimi_k25_text_prefill_ir.json.zst").touch()  # of a run with --compress: no pair of the mapping
    sizes = ("--prefill-len", "7", "--max-cache-len", "22")
    assert script.main(["--output-dir", str(tmp_path / "out"), "--verify", "--layers", str(layers), *sizes]) == 0
    assert "every token is the eager model's" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == NAMES
    mapping = json.loads((tmp_path / "out" / "kimi_k25_text_kv_mapping.json").read_text())
    assert [row["layer"] for row in mapping["layers"]] == list(range(layers))
    decode = json.loads((tmp_path / "out" / "kimi_k25_text_decode_ir.json").read_text())
    assert decode["model_name"] == "KimiK25_Text_Decode"
    assert {len(meta["shape"]) == 4 and meta["shape"][2] for meta in decode["graph_inputs"]} == {False, 1, 22}
    ops = {name: node["op_type"] for node in decode["nodes"] for name in (meta["name"] for meta in node["outputs"])}
    assert {ops[row["decode_key_output"]] for row in mapping["layers"]} == {"aten.index_copy.default"}


def test_verify_fails_when_a_state_goes_to_the_wrong_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline.export.parts import states
    from pipeline.export.parts.pair import masked

    monkeypatch.setattr(states.FixedLength, "update", masked.FreshLayer.update)  # the new states alone, no cache
    assert script.main(["--output-dir", str(tmp_path), "--verify", "--layers", "2"]) != 0
    assert capsys.readouterr().err


def test_mistakes_are_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(script.CONFIG.read_text())
    (tmp_path / "file").touch()
    out = str(tmp_path)
    for given, words, said in (
        (None, ("--verify",), "given.json cannot be read as the JSON of a text_config"),
        ([], (), "found [], expected an object"),
        ({"text_config": [1]}, (), "text_config: found [1], expected an object"),
        ({"text_config": whole | {"num_hidden_layers": "a"}}, (), "num_hidden_layers: found 'a', expected a whole"),
        (whole | {"rope_scaling": 64}, (), "rope_scaling: found 64, expected an object"),
        (whole | {"dtype": "bfloat"}, (), "has no dtype"),
        (whole | {"n_routed_experts": 7}, (), "num_experts_per_tok is 8, and n_routed_experts 7; expected"),
        (whole, ("--layers", "0"), "--layers: found 0, expected at least 1"),
        (whole, ("--layers", "0", "--verify"), "--layers: found 0, expected at least 1"),
        (whole, ("--output-dir", f"{out}/file"), "expected a folder"),
        (whole, ("--verify", "--max-cache-len", "20"), "expected at least 23, for a prompt of 7 and 16 steps"),
    ):
        (tmp_path / "given.json").write_text("none" if given is None else json.dumps(given))
        words = ("--output-dir", out, "--config", f"{out}/given.json", *words)
        assert script.main(words) == 2, words
        assert said in capsys.readouterr().err, words
