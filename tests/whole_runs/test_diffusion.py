"""A whole run of a pipeline of diffusers: a folder for each model, the image by the files, and a folder as source."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

pytest.importorskip("diffusers", reason="needs onnxline[diffusion]")

from benchmarks.diffusion import configuration
from pipeline import Pipeline, RunConfig
from pipeline.baseline import baseline_of
from pipeline.errors import UsageError
from pipeline.export.parts import load_for_parts
from pipeline.parts import PartsResult
from pipeline.quantsim import QuantSim
from pipeline.quantsim.parts import PartsQuantSimResult
from pipeline.report import ImageReport


def test_a_run_of_a_pipeline(tmp_path: Path) -> None:
    made = RunConfig.from_mapping(configuration("SD 1.5"), title="made")
    load_for_parts(made.model).module.pipe.save_pretrained(tmp_path / "source")
    index = tmp_path / "source" / "model_index.json"
    names = json.loads(index.read_text()) | {"tokenizer": ["transformers", "CLIPTokenizer"]}
    index.write_text(json.dumps(names))  # whose folder is not there: a proof needs no words
    settings = {
        "name": "sd",
        "model": {"diffusers": {"folder": str(tmp_path / "source"), "height": 16, "width": 16}},
        "export": {"opset": 21},
        "passes": {"recipe": ["onnxscript"], "keep": ["qkv"], "contrib": "refuse"},  # as quantsim has it
        "runtime": {"backends": ["onnxruntime"]},
    }
    config = RunConfig.from_mapping(settings)
    result = Pipeline(config, tmp_path / "out").run()
    assert isinstance(result, PartsResult)
    [image] = result.chain
    assert isinstance(image, ImageReport) and image.is_right and image.steps == 4 and 0 < image.max_abs < 1e-4
    parts = ["text_encoder", "unet", "vae_encoder", "vae_decoder"]
    assert [*result.parts] == parts and result.model == result.models / "text_encoder" / "model.onnx"
    for part in parts:
        names = {file.name for file in (result.models / part).iterdir()}
        assert names == {"model.onnx", "model.onnx_data", "config.json"}, part
    assert (result.models / "scheduler" / "scheduler_config.json").is_file()
    assert (result.models / "model_index.json").is_file()
    session = onnxruntime.InferenceSession(str(result.models / "unet" / "model.onnx"))
    assert [value.name for value in session.get_inputs()] == ["sample", "timestep", "encoder_hidden_states"]
    feeds = {"sample": np.zeros((3, 4, 8, 8), np.float32), "timestep": np.array([7]), "encoder_hidden_states": None}
    feeds["encoder_hidden_states"] = np.ones((3, 24, 32), np.float32)
    assert session.run(["out_sample"], feeds)[0].shape == (3, 4, 8, 8)  # type: ignore[union-attr]
    recorded = (tmp_path / "out" / ".stages" / "calls.pt").stat().st_mtime_ns
    again = Pipeline(config, tmp_path / "out").run()
    assert "chain" in again.cached and "models" in again.cached
    assert set(parts) == {name.partition(": ")[0] for name in again.cached if name.endswith(": runtime")}
    assert (tmp_path / "out" / ".stages" / "calls.pt").stat().st_mtime_ns == recorded  # the pipeline did not run again
    run_one_part_twice(settings, tmp_path / "unet")
    assert baseline_of(again.report)["chain"] == {"onnxruntime": "image of 4 steps as diffusers makes it"}
    quantize_the_pipeline(settings, tmp_path)


def run_one_part_twice(settings: dict[str, Any], folder: Path) -> None:
    """The pipeline makes its images once."""
    config = RunConfig.from_mapping({**settings, "model": {**settings["model"], "part": "unet"}})
    times = list[int]()
    for _ in range(2):
        Pipeline(config, folder).run()
        times.append((folder / ".stages" / "calls.pt").stat().st_mtime_ns)
    assert times[0] == times[1]


def quantize_the_pipeline(settings: dict[str, Any], folder: Path) -> None:
    """Each model is calibrated on its calls for the prompts of a file, at all time steps, and the image is judged."""
    (folder / "prompts.txt").write_text("a blue house\n\ntwo red circles\n")
    data = {"data": [str(folder / "prompts.txt")], "samples": 8}
    quantsim = {"profile": "qnn-htp", "calibration": data, "evaluation": 2}
    result = QuantSim(RunConfig.from_mapping({**settings, "quantsim": quantsim}), folder / "out", progress=False).run()
    assert isinstance(result, PartsQuantSimResult) and result.chain is not None
    noise = result.chain.noise
    assert (noise.measured, noise.tokens) == ("image", 0) and 25 < noise.sqnr_db < 60
    assert math.isinf(result.chain.parts["vae_encoder"].sqnr_db)  # which an image of a text does not need
    assert {row.part for row in result.chain.layers if math.isfinite(row.sqnr_db)} == {
        "text_encoder",
        "unet",
        "vae_decoder",
    }
    quantized = folder / "out" / "quantized"
    for part in result.parts:
        names = {file.name for file in (quantized / part).iterdir()}
        assert names == {"model.onnx", "model.onnx_data", "config.json"}, part
        onnxruntime.InferenceSession(str(quantized / part / "model.onnx"))
    assert (quantized / "scheduler" / "scheduler_config.json").is_file()
    assert not (folder / "out" / "model.encodings").exists()  # the parts share no names
    data["data"] = [str(folder / "prompts.npz")]
    with pytest.raises(UsageError, match=r"prompts.npz, expected files .txt with a prompt in each line"):
        QuantSim(RunConfig.from_mapping({**settings, "quantsim": quantsim}), folder / "out", progress=False).run()
