"""A whole run of an encoder and a decoder, as a user makes it: one YAML, one file of weights, the chain, and text."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.encoder_decoder import FAMILIES, configuration, make_model
from benchmarks.generation import by_genai
from passes.encodings.aimet import read_aimet
from passes.weights.detached import read_model
from pipeline import Pipeline, RunConfig
from pipeline.config import ModelConfig
from pipeline.parts import PartsResult
from pipeline.parts.chain import generate_after_encoder
from pipeline.parts.first_call import make_first_call, prove_first_call
from pipeline.parts.seq2seq import Seq2SeqReader
from pipeline.parts.sessions import step_opener
from pipeline.quantsim import QuantSim
from pipeline.quantsim.parts import PartsQuantSimResult
from pipeline.quantsim.sites import find_sites


@pytest.mark.parametrize("family", ["T5", "Whisper"])
def test_a_run_of_a_model_with_an_encoder(family: str, tmp_path: Path, command_line) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "source")
    settings = configuration(family, tmp_path / "source", name="small")
    settings["passes"] |= {"recipe": ["onnxscript"], "contrib": "refuse"}  # as quantsim has it
    settings["export"] = {"opset": 21}
    settings["parts"] = {"decoder": {"passes": {"recipe": ["onnxscript", "default"]}}}
    result = Pipeline(RunConfig.from_mapping(settings), tmp_path / "out").run()
    assert isinstance(result, PartsResult) and [*result.parts] == ["encoder", "decoder"]
    assert [(chain.tokens, chain.equal) for chain in result.chain] == [(64, 64)]
    assert "decoder_model.onnx gives what encoder and decoder give: 9 outputs" in result.chain[0].why
    assert all(verdict.kept for verdict in result.structures) and len(result.structures) >= 4
    assert {file.name for file in result.models.iterdir()} == {
        *(
            "encoder.onnx",
            "decoder.onnx",
            "decoder_model.onnx",
            "weights.data",
            "config.json",
            "generation_config.json",
        ),
        *(["genai_config.json"] if family == "Whisper" else []),
    }
    protos = {part: onnx.load(result.models / f"{part}.onnx", load_external_data=False) for part in result.parts}
    if family == "T5":  # both parts read one table of tokens, which is stored once
        places = [{str(tensor.external_data) for tensor in proto.graph.initializer} for proto in protos.values()]
        assert any("offset" in place for place in places[0] & places[1])
    check_first_call(result.models)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [*report["parts"]] == ["encoder", "decoder"] and report["exit_code"] == 0
    text = generate_after_encoder(model, ModelConfig.model_validate(settings["model"]), 5, 1)
    np.savez(tmp_path / "inputs.npz", **text.inputs)
    words = ["--inputs", tmp_path / "inputs.npz", "--max-new-tokens", "3", "--start", str(text.prompt[0])]
    code, out, _ = command_line("generate", tmp_path / "out", *words)
    assert code == 0 and out.splitlines()[0] == ",".join(map(str, text.tokens[:3]))
    code, _, said = command_line("generate", tmp_path / "out", "--inputs", tmp_path / "nowhere.npz")
    assert code == 2 and "--inputs" in said and "expected an .npz file" in said
    code, _, said = command_line("generate", tmp_path / "out")
    assert code == 2 and "expected one of --ids 1,2,3, --prompt TEXT and --inputs FILE.npz" in said
    if family == "Whisper":
        quantize_both_parts(settings, tmp_path)
    else:
        quantize_relative_positions(settings, tmp_path)


def check_first_call(models: Path) -> None:
    """The decoder of the first call gives, from hidden states, what the decoder gives from the encoder's cache."""
    encoder, decoder, first = (
        onnxruntime.InferenceSession(str(models / f"{name}.onnx")) for name in ("encoder", "decoder", "decoder_model")
    )
    ids, generator = np.array([[3, 5, 7], [8, 2, 4]]), np.random.default_rng(0)
    given = {value.name: value.shape for value in encoder.get_inputs()}
    features = {name: generator.random([2, *shape[1:]], np.float32) for name, shape in given.items() if len(shape) > 2}
    mask = {"attention_mask": np.array([[1, 1, 1, 1], [1, 1, 1, 0]])} if "attention_mask" in given else {}
    computed = run(encoder, features or {"input_ids": generator.integers(0, 89, (2, 4)), **mask})
    feeds = {"input_ids": ids, "encoder_attention_mask": mask.get("attention_mask")}
    feeds |= {name.replace("present", "past_key_values"): array for name, array in computed.items()}
    for value in decoder.get_inputs():
        if ".decoder." in value.name:
            feeds[value.name] = np.zeros((2, value.shape[1], 0, value.shape[3]), np.float32)
    expected = {**run(decoder, feeds), **computed}
    found = run(first, {**feeds, "encoder_hidden_states": expected.pop("last_hidden_state")})
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], atol=1e-4, err_msg=name)  # float32, other orders of sums
    check_that_a_wrong_first_call_is_found(shutil.copytree(models, models.parent / "other"))
    whole = {name: read_model(models / f"{name}.onnx") for name in ("encoder", "decoder")}
    other = whole["encoder"].copy_proto()
    other.opset_import[0].version = 18
    assert make_first_call(whole["encoder"].with_proto(other), whole["decoder"]) is None


def check_that_a_wrong_first_call_is_found(models: Path) -> None:
    """Key and value of the first layer's cross attention change places."""
    wrong = onnx.load(models / "decoder_model.onnx", load_external_data=False)
    names = [f"present.0.encoder.{side}" for side in ("key", "value")]
    other = dict(zip(names, reversed(names), strict=True))
    for node in wrong.graph.node:
        node.input[:] = [other.get(name, name) for name in node.input]
        node.output[:] = [other.get(name, name) for name in node.output]
    onnx.save(wrong, models / "decoder_model.onnx")
    reader = Seq2SeqReader(models, step_opener(models, "onnxruntime"))
    source = np.random.default_rng(0).random([size or 1 for size in reader.shapes[reader.main]]) * 80
    found = prove_first_call(models, step_opener(models, "onnxruntime"), {reader.main: source}, 0)
    assert found is not None and not found[1]
    assert found[0].startswith("decoder_model.onnx has other results than encoder and decoder: present.0.encoder.key (")


def run(session: onnxruntime.InferenceSession, feeds: dict[str, Any]) -> dict[str, np.ndarray]:
    names = [value.name for value in session.get_outputs()]
    known = {value.name for value in session.get_inputs()}
    given = {name: array for name, array in feeds.items() if name in known}
    return dict(zip(names, map(np.asarray, session.run(names, given)), strict=True))


@pytest.mark.skipif(
    not os.environ.get("GENAI_PYTHON"), reason="GENAI_PYTHON names no interpreter with onnxruntime-genai"
)
def test_onnxruntime_genai_writes_what_torch_writes_to_a_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES["Whisper"][2], "max_source_positions", 1500)  # of 3,000 frames, which it asks for
    model = make_model("Whisper")
    model.save_pretrained(tmp_path / "source")
    settings = configuration("Whisper", tmp_path / "source", name="sound", passes={"recipe": ["onnxscript"]})
    result = Pipeline(RunConfig.from_mapping(settings), tmp_path / "out").run()
    assert isinstance(result, PartsResult)
    text = generate_after_encoder(model, ModelConfig.model_validate(settings["model"]), 5, 1)
    np.savez(tmp_path / "sound.npz", input_features=text.inputs["input_features"])
    found = by_genai(os.environ["GENAI_PYTHON"], result.models, text.prompt, text.tokens, str(tmp_path / "sound.npz"))
    assert found == "32 of 32"


def quantize_both_parts(settings: dict[str, Any], folder: Path) -> None:
    """The decoder is calibrated on the states that the encoder has computed, and these have one scale in both."""
    quantsim = {"profile": "qnn-htp", "calibration": {"samples": 32}, "suggest": {"sqnr_db": 30.0}}
    result = QuantSim(RunConfig.from_mapping({**settings, "quantsim": quantsim}), folder / "out", progress=False).run()
    assert isinstance(result, PartsQuantSimResult) and result.chain is not None and result.suggestion is not None
    assert result.chain.noise.equal > 60 and result.chain.noise.sqnr_db > 35 and result.suggestion.is_met
    assert {row.part for row in result.chain.layers} == {"encoder", "decoder"}
    encoder, decoder = (read_aimet(part.folder / "model.encodings")[0] for part in result.parts.values())
    groups = {site.tensor: site.group for site in find_sites(read_model(result.parts["encoder"].folder / "model.onnx"))}
    for name in ("0.encoder.key", "2.encoder.value"):  # the file names a tensor before its Transpose
        handed, read = encoder[groups[f"present.{name}"]], decoder[f"past_key_values.{name}"]
        assert (handed.scale, handed.precision) == (read.scale, read.precision), name
    found = json.loads((folder / "out" / "quantsim.json").read_text())
    assert found["chain"]["layers"][0].keys() >= {"part", "layer", "sqnr_db", "share"}


def quantize_relative_positions(settings: dict[str, Any], folder: Path) -> None:
    """The logarithm of position 0 is -inf, which a Where replaces: it stays in float in both parts.

    All else has 16 bits, since the scores of this random model are large, and softmax makes much of little noise.
    """
    rules = {"op:*": {"weights": "int16/channel", "activations": "uint16"}}
    quantsim = {"profile": "qnn-htp", "calibration": {"samples": 4}, "evaluation": 1, "sensitivity": False}
    quantsim["rules"] = rules
    result = QuantSim(RunConfig.from_mapping({**settings, "quantsim": quantsim}), folder / "out", progress=False).run()
    assert isinstance(result, PartsQuantSimResult) and result.chain is not None and result.chain.noise.sqnr_db > 25
    for part in result.parts.values():
        reasons = {found.tensor: found.reason for found in part.report.left_in_float}
        assert reasons["log"] == "it is infinite or NaN on a sample, and Where drops those elements"
        assert "log" not in {row.tensor for row in part.report.rows}  # infinity has no ratio
