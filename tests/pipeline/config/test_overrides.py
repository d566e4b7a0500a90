"""`--set key.path=value` over a loaded file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigError

BASE = """\
model:
  factory: m:f
  inputs: {x: {shape: [2, 3]}}
passes: {skip: [a], keep: [qkv], recipe: [default]}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    return "base.yaml"


def test_values_are_yaml_and_the_last_one_wins(path: str) -> None:
    config = RunConfig.from_yaml(path, ["passes.skip=[fuse_qkv]", "verify.draws=3", "verify.draws=4", "name=other"])
    assert config.passes.skip == ("fuse_qkv",)
    assert config.passes.keep == ("qkv",)
    assert config.verify.draws == 4
    assert config.name == "other"


def test_a_mapping_replaces_a_mapping(path: str) -> None:
    assert RunConfig.from_yaml(path, ["passes={}"]).passes.skip == ()


def test_a_source_can_be_exchanged(path: str, tmp_path: Path) -> None:
    config = RunConfig.from_yaml(path, ["model.factory=null", "model.onnx=here/m.onnx"])
    assert config.model.factory is None
    assert config.model.onnx == f"{tmp_path}/here/m.onnx"  # relative to the working directory


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("passes.skp=[x]", "--set passes.skp=[x]: unknown key 'skp' in passes; did you mean 'skip'?"),
        (
            "model.inputs.x.sape=3",
            "--set model.inputs.x.sape=3: unknown key 'sape' in model.inputs.x; did you mean 'shape'?",
        ),
        (
            "verify.zzz=1",
            "--set verify.zzz=1: unknown key 'zzz' in verify; "
            "expected one of: proof, draws, inputs, max_inputs, sizes, seed, tolerances",
        ),
        ("verify.draws=x", "--set verify.draws=x: verify.draws: found 'x', expected an integer"),
        ("name.x=1", "--set name.x=1: name: found a mapping, expected text"),
        ("passes.skip", "--set passes.skip: expected key.path=value, such as passes.skip=[fuse_qkv]"),
        ("passes..skip=1", "--set passes..skip=1: expected key.path=value, such as passes.skip=[fuse_qkv]"),
        (
            "passes.recipe.0=x",
            "--set passes.recipe.0=x: passes.recipe is a list, which has no keys; set passes.recipe as a whole",
        ),
        ("passes.skip=[a", "--set passes.skip=[a: not YAML: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_messages(path: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(path, [override])
    assert str(caught.value) == message
