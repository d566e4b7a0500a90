"""`from_mapping`, `resolved`, the JSON Schema and `locate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.config import RunConfig, json_schema, locate, split_factory
from pipeline.errors import ConfigError, SourceError


def test_from_mapping_resolves_against_base_dir(tmp_path: Path) -> None:
    data = {"name": "n", "model": {"transformers": {"class": "BertModel", "config": "c.json", "checkpoint": "w.pt"}}}
    config = RunConfig.from_mapping(data, tmp_path)
    assert config.model.transformers is not None
    assert config.model.transformers.config == f"{tmp_path}/c.json"
    assert config.model.transformers.checkpoint == f"{tmp_path}/w.pt"
    assert data["model"] == {"transformers": {"class": "BertModel", "config": "c.json", "checkpoint": "w.pt"}}


def test_from_mapping_names_the_key() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping({"model": {"onnx": "m.onnx", "seeds": 1}})
    assert str(caught.value) == "configuration: unknown key 'seeds' in model; did you mean 'seed'?"


def test_a_text_for_a_list_is_named_as_a_list() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping({"model": {"onnx": "m.onnx"}, "passes": {"keep": "qkv"}})
    assert str(caught.value) == "configuration: passes.keep: found 'qkv', expected a list: [\"qkv\"]"


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"name": 3, "model": {"onnx": "m.onnx"}}, "RunConfig: name: found 3, expected text"),
        ({}, "RunConfig: the key 'model' is missing"),
        ({"model": {"onnx": "m.onnx"}, "modle": 1}, "RunConfig: unknown key 'modle'; did you mean 'model'?"),
        (
            {"model": {"onnx": "m.onnx"}, "verify": {"proof": "structure"}, "runtime": {"backends": ["plan"]}},
            "RunConfig: found runtime.backends plan with verify.proof structure, which runs nothing; "
            "leave runtime.backends out, or prove by numbers",
        ),
        (
            {"model": {"onnx": 1, "seed": -1}},
            "RunConfig has 2 mistakes:\n"
            "  RunConfig: model.onnx: found 1, expected text\n"
            "  RunConfig: model.seed: found -1, expected 0 or more",
        ),
    ],
)
def test_the_class_itself_raises_the_same_sentences(keywords: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**keywords)
    assert str(caught.value) == sentence


def test_what_is_no_configuration_at_all() -> None:
    with pytest.raises(ConfigError, match="configuration: found 3, expected a mapping of sections"):
        RunConfig.from_mapping(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="from_yaml: found 3, expected the path of a YAML configuration"):
        RunConfig.from_yaml(3)  # pyright: ignore[reportArgumentType]


def test_resolved_is_json_and_deterministic() -> None:
    data = {"model": {"factory": "m:f", "args": {"a": [1, {"b": None}]}}}
    first, second = (RunConfig.from_mapping(data).to_mapping() for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert RunConfig.from_mapping(json.loads(json.dumps(first))) == RunConfig.from_mapping(data)


def test_a_config_is_frozen() -> None:
    config = RunConfig.from_mapping({"model": {"factory": "m:f"}})
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_sizes_fall_back_to_two_and_three() -> None:
    model = RunConfig.from_mapping({"model": {"factory": "m:f", "dims": {"seq": [7]}}}).model
    assert model.sizes("seq") == (7,)
    assert model.sizes("batch") == (2, 3)


def test_the_schema_knows_every_section_and_refuses_the_rest() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == {"extends", *RunConfig.model_fields}
    assert schema["$id"] == "urn:onnxline:run-config:1"
    assert schema["required"] == ["model"]
    assert schema["additionalProperties"] is False
    assert "class" in schema["$defs"]["TransformersConfig"]["properties"]
    json.dumps(schema)


def test_locate_finds_a_file_in_a_package_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "never_imported"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "data" / "m.onnx").write_bytes(b"x")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("package:never_imported/data/m.onnx") == package / "data" / "m.onnx"
    assert "never_imported" not in sys.modules
    with pytest.raises(SourceError, match=r"has no such file; its folder has: m\.onnx"):
        locate("package:never_imported/data/n.onnx")
    with pytest.raises(SourceError, match="expected package:<package>/<path inside it>"):
        locate("package:never_imported/../secret")


def test_locate_names_the_extra() -> None:
    with pytest.raises(SourceError) as caught:
        locate("package:not_installed_at_all/m.onnx")
    assert str(caught.value) == (
        "'package:not_installed_at_all/m.onnx': the package 'not_installed_at_all' is not installed; "
        "the packages with trained models are an extra: pip install onnxline[models]"
    )


def test_split_factory() -> None:
    assert split_factory("a/b.py:make") == ("a/b.py", "make")
    assert split_factory("a.b:make") == ("a.b", "make")
    with pytest.raises(ConfigError, match=r"expected path/to/file.py:function or package.module:function"):
        split_factory("a.b.make")


def test_the_folder_of_a_quarantine_is_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("model: {factory: m:f}\npasses: {skip: [unsafe:audit, unsafe, fuse_qkv]}\n", encoding="utf-8")
    assert RunConfig.from_yaml(path).passes.skip == (f"unsafe:{tmp_path / 'audit'}", "unsafe", "fuse_qkv")


def test_a_single_size_of_a_dim_says_how_to_write_it() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping({"model": {"factory": "net.py:make", "dims": {"T": 4}}})
    assert str(caught.value) == "configuration: model.dims.T: found 4, expected a list: [4]"
