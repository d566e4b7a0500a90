"""A whole run in parts, as a user makes it: one YAML, the folder of models, the report, and text by the folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

from benchmarks.generation import by_genai, configuration, make_model
from passes.encodings.aimet import read_aimet
from passes.errors import PolicyError
from pipeline import Pipeline, RunConfig
from pipeline.baseline import baseline_of
from pipeline.errors import CheckFailed, UsageError
from pipeline.events import Event, StageEnded, StageStarted
from pipeline.parts import PartsResult, TextGenerator
from pipeline.parts.chain import generate_by_torch
from pipeline.quantsim import QuantSim
from pipeline.quantsim.parts import PartsQuantSimResult
from pipeline.report import ChainReport

STAGES = ("export", "passes", "runtime")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model as save_pretrained writes it, and a configuration."""
    folder = tmp_path_factory.mktemp("parts")
    make_model("Llama").save_pretrained(folder / "source")
    settings = configuration(Path("source"), name="llama", parts={"decoder": {"passes": {"skip": ["rewrite_where"]}}})
    settings["passes"]["recipe"] = ["onnxscript", "rewrite_where"]
    (folder / "llama.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture(scope="module")
def result(place: Path) -> PartsResult:
    events = list[Event]()
    found = Pipeline(RunConfig.from_yaml(place / "llama.yaml"), place / "out", events.append).run()
    assert isinstance(found, PartsResult)
    started, ended = (
        [event.name for event in events if isinstance(event, kind)] for kind in (StageStarted, StageEnded)
    )
    assert started == ended and started[-2:] == ["models", "chain"]
    return found


def test_the_folder_of_models(result: PartsResult) -> None:
    models = result.folder / "models"
    names = {"decoder.onnx", "weights.data", "genai_config.json", "config.json"}
    assert {file.name for file in models.iterdir()} == names
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


def test_text_is_as_torch_generates(place: Path, result: PartsResult, command_line) -> None:
    text = generate_by_torch(make_model("Llama"), 5, 1)
    assert result.generate(text.prompt, max_new_tokens=8, stop=()).tokens == text.tokens[:8]
    words = ["--ids", ",".join(map(str, text.prompt)), "--max-new-tokens", "4", "--backend", "plan", "--seed", "0"]
    code, out, _ = command_line("generate", place / "out", *words)
    assert code == 0
    tokens, speed = out.splitlines()
    assert tokens == ",".join(map(str, text.tokens[:4]))
    assert speed.endswith("tokens per second") and "on plan" in speed


def test_a_tokenizer_of_the_source_reads_a_prompt(result: PartsResult, tmp_path: Path) -> None:
    """As if the source had come with one: its files lie in `models`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = shutil.copytree(result.models, tmp_path / "models")
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(89)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}')
    found = TextGenerator(tmp_path).generate(prompt="w5 w17 w3", max_new_tokens=4, stop=())
    assert found.prompt == (5, 17, 3)
    assert found.tokens == result.generate([5, 17, 3], max_new_tokens=4, stop=()).tokens
    assert found.text.split() == [f"w{token}" for token in found.tokens]


@pytest.mark.skipif(
    not os.environ.get("GENAI_PYTHON"), reason="GENAI_PYTHON names no interpreter with onnxruntime-genai"
)
def test_onnxruntime_genai_generates_the_same_tokens(result: PartsResult) -> None:
    text = generate_by_torch(make_model("Llama"), 5, 1)
    assert by_genai(os.environ["GENAI_PYTHON"], result.models, text.prompt, text.tokens) == "32 of 32"


@pytest.fixture(scope="module")
def static(place: Path) -> PartsResult:
    """A run over a cache of fixed length, of which one prompt of the chain takes two chunks."""
    found = Pipeline(RunConfig.from_mapping(static_settings(), place), place / "static").run()
    assert isinstance(found, PartsResult)
    return found


def static_settings(**sections: Any) -> dict[str, Any]:
    cache = {"kind": "static", "length": 42, "chunk": 8}
    settings = configuration(Path("source"), cache=cache, name="static", runtime={"backends": ["plan"]}, **sections)
    settings["passes"] |= {"recipe": ["onnxscript"], "contrib": "refuse"}  # as quantsim has it
    return settings | {"export": {"opset": 21}}


def test_prefill_and_decode_lie_over_one_file_of_weights(static: PartsResult) -> None:
    models = static.folder / "models"
    names = {"prefill.onnx", "decode.onnx", "weights.data", "config.json", "kv_mapping.json"}
    assert {file.name for file in models.iterdir()} == names
    protos = {name: onnx.load(models / f"{name}.onnx", load_external_data=False) for name in static.parts}
    ranges = [
        {str(tensor.external_data) for tensor in proto.graph.initializer if tensor.external_data}
        for proto in protos.values()
    ]
    shared = {entry.value for proto in protos.values() for entry in places_of(proto)}
    assert len(ranges[0] & ranges[1]) >= 14 and shared == {"weights.data"}  # the matrices and embeddings of both
    size = sum(parameter.numel() * 4 for parameter in make_model("Llama").parameters())
    assert (models / "weights.data").stat().st_size < 1.3 * size + 64 * 4096  # each tensor begins at a page
    for name, tokens in (("prefill", 8), ("decode", 1)):
        onnx.checker.check_model(models / f"{name}.onnx", full_check=True)
        shapes = {
            value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*protos[name].graph.input, *protos[name].graph.output)
        }
        assert shapes["input_ids"] == [1, tokens] and shapes["cache_position"] == [tokens]
        assert shapes["past_key_values.1.value"] == shapes["present.1.value"] == [1, 2, 42, 8]
    rows = json.loads((models / "kv_mapping.json").read_text())["layers"]
    assert [row["decode_key_input"] for row in rows] == ["past_key_values.0.key", "past_key_values.1.key"]


def places_of(proto: onnx.ModelProto) -> list[Any]:
    return [entry for tensor in proto.graph.initializer for entry in tensor.external_data if entry.key == "location"]


def test_the_chain_of_prefill_and_decode_is_torch_s_text(static: PartsResult) -> None:
    report = json.loads((static.folder / "report.json").read_text())
    assert set(report["parts"]) == {"prefill", "decode"}
    assert {chain["backend"]: (chain["equal"], chain["tokens"]) for chain in report["chain"]} == {
        "onnxruntime": (64, 64),
        "plan": (64, 64),
    }
    for name, part in static.parts.items():
        assert [verdict.kept for verdict in part.structures] == [True, True], name
        assert {backend.status for backend in part.runtime.backends} == {"ran"}, name
    text = generate_by_torch(make_model("Llama"), 11, 1, 42)
    for backend in ("onnxruntime", "plan"):
        assert static.generate(text.prompt, max_new_tokens=32, stop=(), backend=backend).tokens == text.tokens


def test_scales_of_tokens_are_states_of_a_cache_in_int8(place: Path) -> None:
    settings = static_settings()
    settings["model"]["cache"] |= {"dtype": "int8", "scales": "token"}
    result = Pipeline(RunConfig.from_mapping(settings, place), place / "int8").run()
    assert isinstance(result, PartsResult)
    report = json.loads((result.folder / "report.json").read_text())
    assert {chain["backend"]: chain["equal"] for chain in report["chain"]} == {"onnxruntime": 64, "plan": 64}
    assert all("of 64 tokens are those of a cache that is not rounded" in chain["why"] for chain in report["chain"])
    row = json.loads((result.models / "kv_mapping.json").read_text())["layers"][1]
    assert (row["prefill_key_scale_output"], row["decode_value_scale_input"]) == (
        "present.1.key_scale",
        "past_key_values.1.value_scale",
    )


def test_commands_take_a_part_by_its_name(static: PartsResult, command_line) -> None:
    named = ["--part", "decode"]
    assert command_line("diff", static.folder, static.folder, *named)[:2] == (0, "no difference\n")
    node = onnx.load(static.models / "decode.onnx", load_external_data=False).graph.node[0].name
    code, out, _ = command_line("why", static.folder, node, *named)
    assert code == 0 and "made by" in out
    code, out, _ = command_line("bisect", static.folder, "--lost", "qkv", "--recipe", "eliminate_identity", *named)
    assert code == 1 and "all 2 qkv stand" in out
    assert command_line("diff", static.folder, static.folder)[0] == 0  # all parts
    for words in (["why", static.folder, node], ["bisect", static.folder, "--lost", "qkv"]):
        for more, found in (([], "no --part"), (["--part", "encode"], "--part encode")):
            code, _, error = command_line(*words, *more)
            assert code == 2 and f"found {found}; expected --part decode or --part prefill" in error


def test_quantized_parts_have_one_set_of_encodings(place: Path, static: PartsResult) -> None:
    """Calibrated on prompts of a file, of which decode reads what prefill has cached."""
    prompts = np.random.default_rng(3).integers(0, 89, (3, 11))
    np.savez(place / "prompts.npz", input_ids=prompts)
    quantsim = {"profile": "qnn-htp", "calibration": {"data": [str(place / "prompts.npz")], "samples": 6}}
    config = RunConfig.from_mapping(static_settings(quantsim=quantsim), place)
    result = QuantSim(config, place / "static", progress=False).run()
    assert isinstance(result, PartsQuantSimResult) and result.chain is not None
    noise = result.chain.noise
    assert noise.tokens == 64 and noise.equal > 60 and noise.sqnr_db > 20
    encodings = [read_aimet(part.folder / "model.encodings")[0] for part in result.parts.values()]
    shared = encodings[0].keys() & encodings[1].keys()
    assert shared >= {"past_key_values.0.key", "present.1.value", "logits"} and len(shared) > 80
    assert sum(encodings[0][name].axis is not None for name in shared) >= 14  # the matrices, by channel
    together = read_aimet(place / "static" / "model.encodings")[0]
    for name in shared:
        scales = [found[name].scale.tolist() for found in (*encodings, together)]
        assert scales[0] == scales[1] == scales[2], name
    assert together["past_key_values.0.key"].scale == together["present.0.key"].scale
    text = TextGenerator(place / "static" / "quantized").generate(prompts[0].tolist(), max_new_tokens=4, stop=())
    assert len(text.tokens) == 4
    worst = result.chain.layers[0]
    page = (place / "static" / "report.html").read_text()
    assert noise.sentence in page and f"<td>{worst.part}</td><td>{worst.layer}</td>" in page
    copy = shutil.copytree(place / "static", place / "copy", symlinks=True)
    (copy / "models" / "kv_mapping.json").unlink()  # as if the models had changed
    Pipeline(config, copy).run()
    assert not {"quantized", "quantsim.json", "model.encodings"} & {file.name for file in copy.iterdir()}
    assert "Quantization" not in (copy / "report.html").read_text()


def test_a_chain_in_bfloat16_is_proven_on_a_plan_where_nobody_named_a_backend(tmp_path: Path) -> None:
    """onnxruntime has no kernel for the alibi of Falcon, which is bfloat16 in a model in float32."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    falcon = {**sizes, "alibi": True, "new_decoder_architecture": False}
    settings = {
        "name": "falcon",
        "model": {
            "transformers": {"class": "FalconForCausalLM", "config": falcon},
            "seed": 0,
            "task": "text-generation",
        },
        "passes": {"recipe": []},
    }
    result = Pipeline(RunConfig.from_mapping(settings, tmp_path), tmp_path / "out").run()
    assert isinstance(result, PartsResult)
    (chain,) = result.chain
    assert isinstance(chain, ChainReport)
    assert (chain.backend, chain.equal, chain.tokens) == ("plan", 64, 64)
    assert "not on onnxruntime" in chain.why and "no Mul of opset 14 for bfloat16" in chain.why
    named = RunConfig.from_mapping({**settings, "runtime": {"backends": ["onnxruntime"]}}, tmp_path)
    with pytest.raises(CheckFailed, match=r"does not run on onnxruntime: .* for bfloat16"):
        Pipeline(named, tmp_path / "out").run()


def test_a_part_that_fails_leaves_the_others(place: Path, static: PartsResult) -> None:
    settings = static_settings(parts={"decode": {"passes": {"keep": ["op:Conv"]}}})
    with pytest.raises(PolicyError, match=r"part decode: .*op:Conv.*the other parts are in parts/prefill"):
        Pipeline(RunConfig.from_mapping(settings, place), place / "static").run()
    report = json.loads((place / "static" / "parts" / "prefill" / "report.json").read_text())
    assert report["exit_code"] == 0 and set(report["cached"]) == set(STAGES)


def test_a_part_is_a_run_by_itself(place: Path, result: PartsResult) -> None:
    assert RunConfig.from_yaml(result.folder / "parts" / "decoder" / "run.yaml").model.part == "decoder"
    assert RunConfig.from_yaml(result.folder / "run.yaml").model.part_names == ("decoder",)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model.cache": {"kind": "paged"}}, "model.cache.kind: found 'paged', expected one of 'dynamic' or 'static'"),
    ({"model.cache": {"kind": "static"}}, "found no 'length' with kind: static"),
    ({"model.cache": {"kind": "dynamic", "length": 8}}, "found 'length' with kind: dynamic"),
    ({"model.cache": {"kind": "static", "length": 8, "chunk": 9}}, "found chunk 9 with length 8"),
    ({"model.cache": {"kind": "static", "length": 8, "scales": "head"}}, "found 'scales' without dtype: int8"),
    ({"model.cache": {"dtype": "int8"}}, "found 'dtype' with kind: dynamic"),
    (
        {"model.cache": {"kind": "static", "length": 8, "dtype": "int8", "scales": "token", "data": ["p.npz"]}},
        "found 'data' with scales: token",
    ),
    ({"model.cache": {"kind": "static", "length": 8}}, "found the part 'decoder', expected one of prefill, decode"),
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
    shutil.copytree(place / "source", tmp_path / "source")
    (tmp_path / "source" / remove).unlink()
    config = RunConfig.from_mapping(configuration(tmp_path / "source"), title="broken")
    with pytest.raises(UsageError, match=sentence):
        Pipeline(config, tmp_path / "out").run()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["exit_code"] == 2 and sentence in report["failure"]
