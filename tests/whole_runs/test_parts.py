"""A whole run in parts, as a user makes it: one YAML, the folder of models, the report, and text by the folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

from benchmarks.generation import configuration, make_model
from pipeline import Pipeline, RunConfig
from pipeline.baseline import baseline_of
from pipeline.cli import _exit_code
from pipeline.errors import UsageError
from pipeline.parts import PartsResult
from pipeline.parts.chain import generate_by_torch

STAGES = ("export", "passes", "runtime")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model as save_pretrained writes it, and a configuration."""
    folder = tmp_path_factory.mktemp("parts")
    make_model("Llama").save_pretrained(folder / "source")
    settings = configuration(Path("source"), name="llama", parts={"decoder": {"passes": {"skip": ["rewrite_where"]}}})
    (folder / "llama.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture(scope="module")
def result(place: Path) -> PartsResult:
    found = Pipeline(RunConfig.from_yaml(place / "llama.yaml"), place / "out").run()
    assert isinstance(found, PartsResult)
    return found


def test_the_folder_of_models(result: PartsResult) -> None:
    models = result.folder / "models"
    assert {file.name for file in models.iterdir()} == {"decoder.onnx", "weights.data", "genai_config.json"}
    proto = onnx.load(models / "decoder.onnx", load_external_data=False)
    places = {
        entry.value for tensor in proto.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    assert places == {"weights.data"}
    onnx.checker.check_model(models / "decoder.onnx", full_check=True)
    settings = json.loads((models / "genai_config.json").read_text())["model"]
    assert settings["type"] == "llama" and settings["decoder"]["filename"] == "decoder.onnx"
    assert settings["decoder"]["inputs"]["past_key_names"] == "past_key_values.%d.key"
    assert settings["decoder"]["num_key_value_heads"] == 2 and settings["decoder"]["head_size"] == 8


def test_one_report_has_the_part_and_the_chain(result: PartsResult) -> None:
    report = json.loads((result.folder / "report.json").read_text())
    part = report["parts"]["decoder"]
    assert report["exit_code"] == part["exit_code"] == 0
    assert report["structures"] == part["structures"] and report["passes"] == part["passes"]
    assert report["chain"] == [
        {"backend": "onnxruntime", "prompts": 2, "tokens": 64, "equal": 64, "is_right": True, "why": ""}
    ]
    assert any("a padded prompt" in label for label in part["export"]["draws"])
    assert any("past_sequence_length=0" in label for label in part["export"]["draws"])
    page = (result.folder / "report.html").read_text()
    assert 'src="parts/decoder/report.html"' in page and "64 of 64 tokens" in page
    assert (result.folder / "parts" / "decoder" / "report.html").is_file()
    assert json.loads((result.folder / "parts" / "decoder" / "report.json").read_text()).keys() == report.keys() - {
        "parts",
        "chain",
    }


def test_q_k_and_v_are_kept_and_the_part_has_all_that_a_run_has(result: PartsResult) -> None:
    assert [verdict.kept for verdict in result.structures] == [True, True]
    assert {"ir.json", "plan.bin", "passes"} <= {file.name for file in (result.folder / "parts" / "decoder").iterdir()}
    assert {backend.status for backend in result.runtime.backends} == {"ran"}
    skipped = [row.name for row in result.passes if row.status == "skipped"]
    assert "rewrite_where" in skipped  # by parts.decoder


def test_a_second_run_takes_everything_from_the_first(place: Path, result: PartsResult) -> None:
    again = Pipeline(RunConfig.from_yaml(place / "llama.yaml"), place / "out").run()
    assert again.cached == (*(f"decoder: {stage}" for stage in STAGES), "models", "chain")
    assert baseline_of(again.report) == baseline_of(result.report)
    assert baseline_of(result.report)["chain"] == {"onnxruntime": "64 of 64 tokens"}


def test_text_is_as_torch_generates(place: Path, result: PartsResult, monkeypatch, capsys) -> None:
    text = generate_by_torch(make_model("Llama"), 5, 1)
    assert result.generate(text.prompt, max_new_tokens=8, stop=()).tokens == text.tokens[:8]
    words = ["--ids", ",".join(map(str, text.prompt)), "--max-new-tokens", "4", "--backend", "plan", "--seed", "0"]
    monkeypatch.setattr(sys, "argv", ["onnxline", "generate", str(place / "out"), *words])
    assert _exit_code() == 0
    tokens, speed = capsys.readouterr().out.splitlines()
    assert tokens == ",".join(map(str, text.tokens[:4]))
    assert speed.endswith("tokens per second") and "on plan" in speed


def test_a_part_is_a_run_by_itself(place: Path, result: PartsResult) -> None:
    assert RunConfig.from_yaml(result.folder / "parts" / "decoder" / "run.yaml").model.part == "decoder"
    assert RunConfig.from_yaml(result.folder / "run.yaml").model.parts == ("decoder",)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model.cache": {"kind": "paged"}}, "model.cache.kind: found 'paged', expected one of 'dynamic'"),
    ({"model.task": "translation"}, "model.task: found 'translation', expected one of 'text-generation'"),
    ({"model.task": None}, "found 'cache' without 'task'"),
    ({"model.part": "prefill"}, "found the part 'prefill', expected one of decoder"),
    ({"model.inputs": {"x": {"shape": [1]}}}, "found 'inputs' next to 'task'"),
    ({"parts": {"vision": {}}}, "found the part 'vision', expected one of decoder"),
    ({"parts": {"decoder": {"passes": {"skipp": []}}}}, "skipp"),
    ({"model.transformers": "nowhere"}, "no file or folder"),
]


@pytest.mark.parametrize(("change", "sentence"), MISTAKES, ids=[sentence for _, sentence in MISTAKES])
def test_a_mistake_in_the_configuration_is_one_sentence(place: Path, change: dict[str, Any], sentence: str) -> None:
    from pipeline.stages.check import check_settings
    from pipeline.workspace import Workspace

    settings = yaml.safe_load((place / "llama.yaml").read_text())
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        (settings[section] if section else settings)[name] = value
    with pytest.raises(UsageError) as found:
        check_settings(RunConfig.from_mapping(settings, place), Workspace(place / "other"))
    assert sentence in str(found.value)


@pytest.mark.parametrize(
    ("remove", "sentence"), [("config.json", "has no config.json"), ("model.safetensors", "has no weights")]
)
def test_a_folder_that_lacks_something_is_one_sentence(place: Path, tmp_path: Path, remove: str, sentence: str) -> None:
    import shutil

    shutil.copytree(place / "source", tmp_path / "source")
    (tmp_path / "source" / remove).unlink()
    config = RunConfig.from_mapping(configuration(tmp_path / "source"), title="broken")
    with pytest.raises(UsageError, match=sentence):
        Pipeline(config, tmp_path / "out").run()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["exit_code"] == 2 and sentence in report["failure"]
