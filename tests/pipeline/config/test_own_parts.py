"""`model.parts`: a source for each part, the keys of one part over those of all, and one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from passes.recipe import DEFAULT_RECIPE, TORCH_RECIPE
from pipeline.config import RunConfig
from pipeline.errors import ConfigError

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
