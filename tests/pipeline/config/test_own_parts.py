"""`model.parts`: a source for each part, the keys of one part over those of all, and one sentence for each mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from passes.recipe import DEFAULT_RECIPE, TORCH_RECIPE
from pipeline.config import RunConfig, json_schema, locate, split_factory
from pipeline.errors import ConfigError, SourceError, UsageError

TWO = """\
model:
  parts:
    encoder: {factory: net.py:make, inputs: {x: {shape: [2, 4]}}}
    head: {onnx: head.onnx}
export: {opset: 19}
passes: {keep: [qkv]}
parts: {head: {passes: {skip: [fuse_gelu]}}, encoder: {export: {output_names: [y]}}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "two.yaml").write_text(TWO)
    return tmp_path / "two.yaml"


def test_a_part_is_a_configuration_by_itself(file: Path) -> None:
    config = RunConfig.from_yaml(file)
    encoder, head = config.of_part("encoder"), config.of_part("head")
    assert config.model.part_names == ("encoder", "head")
    assert encoder.model.factory == f"{file.parent}/net.py:make" and head.model.onnx == f"{file.parent}/head.onnx"
    assert (encoder.name, head.name) == ("two-encoder", "two-head")
    assert (encoder.passes.recipe, head.passes.recipe) == (TORCH_RECIPE, DEFAULT_RECIPE)
    assert (encoder.passes.skip, head.passes.skip) == ((), ("fuse_gelu",))
    assert encoder.passes.keep == head.passes.keep == ("qkv",)
    assert (encoder.export.opset, encoder.export.output_names) == (19, ("y",))
    assert head.export == RunConfig.from_mapping({"model": {"onnx": "head.onnx"}}).export
    assert encoder.model.part_names == () and encoder.parts == {}


def test_it_is_written_and_read_back(file: Path) -> None:
    config = RunConfig.from_yaml(file)
    again = RunConfig.from_mapping(config.to_mapping())
    assert again == config and "recipe" not in config.to_mapping()["passes"]
    assert [again.of_part(name) for name in again.model.part_names] == [
        config.of_part(name) for name in config.model.part_names
    ]


def test_a_recipe_of_the_whole_run_is_for_all_parts(file: Path) -> None:
    config = RunConfig.from_yaml(file, ["passes.recipe=[default]"])
    assert {config.of_part(name).passes.recipe for name in config.model.part_names} == {("default",)}


@pytest.mark.parametrize("name", ["encoder", "head"])
def test_one_part_has_its_own_keys_too(file: Path, name: str) -> None:
    alone = RunConfig.from_yaml(file, [f"model.part={name}"])
    part = RunConfig.from_yaml(file).of_part(name)
    assert alone.name == "two" and alone.model_copy(update={"name": part.name}) == part


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no part": ({"parts": {}}, "model.parts: found no part, expected a name and a source of each"),
    "a name": ({"parts": {"a/b": {"onnx": "x"}}}, "found the part 'a/b', expected a name that begins with a letter"),
    "a dot": ({"parts": {"weights.data": {"onnx": "x"}}}, "it names files"),
    "no source": ({"parts": {"a": {"seed": 1}}}, "model.parts.a: found none, expected exactly one of factory"),
    "nothing": ({"parts": {"a": None}}, "model.parts.a: found nothing, expected a mapping"),
    "two sources": ({"parts": {"a": {"onnx": "x", "factory": "m:f"}}}, "model.parts.a: found factory and onnx"),
    "a task": (
        {"parts": {"a": {"onnx": "x"}}, "task": "text-generation"},
        "model: found 'task' next to 'parts': a task says its parts itself; leave out 'task'",
    ),
    "a source": ({"parts": {"a": {"onnx": "x"}}, "onnx": "y"}, "model: found onnx and parts, expected exactly one"),
    "a key": (
        {"parts": {"a": {"onnx": "x"}}, "dims": {"b": [2]}},
        "model: found 'dims' next to 'parts', expected it in a part: parts.a.dims",
    ),
    "no such part": ({"parts": {"a": {"onnx": "x"}}, "part": "b"}, "model: found the part 'b', expected one of a"),
    "parts of parts": (
        {"parts": {"a": {"parts": {"b": {"onnx": "x"}}}}},
        "found 'parts' in the part 'a', expected a source; write all parts in one list",
    ),
    "a whole task": (
        {"parts": {"a": {"transformers": "./t5", "task": "text2text-generation"}}},
        "found the parts encoder, decoder as the part 'a', expected one model: add part: encoder or part: decoder to a",
    ),
    "a chain": ({"onnx": "x", "chain": "m:f"}, "model: found 'chain' next to 'onnx', expected it with 'parts'"),
    "an unknown key": ({"parts": {"a": {"onxn": "x"}}}, "unknown key 'onxn' in model.parts.a; did you mean 'onnx'?"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_sentence(kind: str) -> None:
    model, said = MISTAKES[kind]
    with pytest.raises(ConfigError) as error:
        RunConfig.from_mapping({"model": model})
    assert said in str(error.value)
    assert "\n" not in str(error.value) or kind in ("no source", "an unknown key")


REFUSED = {
    "weights": ({"export": {"weights": "referenced"}}, "found export.weights referenced with model.parts"),
    "weights of one": ({"parts": {"a": {"export": {"weights": "referenced"}}}}, "found export.weights in the part 'a'"),
    "no such part": ({"parts": {"b": {}}}, "found the part 'b', expected one of a"),
    "a key of one": ({"parts": {"a": {"passes": {"kep": []}}}}, "unknown key 'kep' in passes; did you mean 'keep'?"),
    "a key of a file": ({"parts": {"a": {"passes": [1]}}}, "parts.a.passes: found a list, expected a mapping"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_parts_cannot_have(kind: str) -> None:
    sections, said = REFUSED[kind]
    with pytest.raises(ConfigError) as error:
        RunConfig.from_mapping({"model": {"parts": {"a": {"factory": "m:f"}}}, **sections})
    assert said in str(error.value)


def test_one_part_alone_refuses_its_unknown_keys(file: Path) -> None:
    file.write_text(TWO.replace("{passes: {skip", "{pases: {skip"))
    with pytest.raises(ConfigError) as error:
        RunConfig.from_yaml(file, ["model.part=head"])
    assert str(error.value) == f"{file}:7: unknown key 'pases' in parts.head; did you mean 'passes'?"


PLACES = {
    "an unknown key": (
        "parts: {head: {passes: {kep: []}}}",
        "{file}:7: unknown key 'kep' in passes; did you mean 'keep'?",
    ),
    "a value": ("parts:\n  head:\n    passes: {skip: 3}", "{file}:9: passes.skip: found 3, expected a list"),
    "no such part": ("parts:\n  tail: {}", "{file}:8: parts: found the part 'tail', expected one of encoder, head"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_mistake_of_one_part_has_its_line(file: Path, kind: str) -> None:
    text, said = PLACES[kind]
    kept = "".join(line for line in TWO.splitlines(keepends=True) if not line.startswith(("parts", "export")))
    file.write_text(f"{kept}# a line\n{text}\n")
    with pytest.raises(ConfigError) as error:
        RunConfig.from_yaml(file)
    assert said.format(file=file) in str(error.value)


def test_a_mistake_of_one_part_in_an_override_or_in_python_names_it(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--set parts.head.passes.skip=3: passes.skip: found 3, expected a list$"):
        RunConfig.from_yaml(file, ["parts.head.passes.skip=3"])
    with pytest.raises(ConfigError, match=r"^parts.head: passes.skip: found 3, expected a list$"):
        RunConfig.from_mapping(
            {"model": {"parts": {"head": {"onnx": "x"}}}, "parts": {"head": {"passes": {"skip": 3}}}}
        )


def test_a_name_that_only_a_part_has_is_said_with_its_line(file: Path) -> None:
    part = RunConfig.from_yaml(file).of_part("head")
    with pytest.raises(UsageError) as error, part.name_keys():
        raise UsageError("skip: no pass named 'fuse_gelu'")
    assert str(error.value) == f"{file}:7: passes.skip[0]: no pass named 'fuse_gelu'"


# `--set key.path=value` over a loaded file.

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


# `from_mapping`, `resolved`, the JSON Schema and `locate`.


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
