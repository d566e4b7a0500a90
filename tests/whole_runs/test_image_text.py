"""A whole run of a model that sees images: its text on onnxruntime and `plan`, and all three parts quantized."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.image_text import configuration, make_model
from pipeline import Pipeline, RunConfig
from pipeline.parts import PartsResult
from pipeline.parts.chain import generate_after_image
from pipeline.quantsim import QuantSim
from pipeline.quantsim.parts import PartsQuantSimResult


# Positions in time, height and width; a mask by the types of tokens; tiles of an image.
@pytest.mark.parametrize("family", ["Qwen2.5-VL", "Gemma 3", "SmolVLM"])
def test_a_run_of_a_model_that_sees_images(family: str, tmp_path: Path, command_line) -> None:
    make_model(family).save_pretrained(tmp_path / "source")
    settings = configuration(tmp_path / "source", name="vlm", runtime={"backends": ["onnxruntime", "plan"]})
    settings["passes"]["recipe"] = ["onnxscript"]
    settings["quantsim"] = {"sensitivity": False}
    result = Pipeline(RunConfig.from_mapping(settings), tmp_path / "out").run()
    assert isinstance(result, PartsResult) and list(result.parts) == ["vision", "embedding", "decoder"]
    assert [(chain.backend, chain.result) for chain in result.chain] == [
        ("onnxruntime", "64 of 64 tokens"),
        ("plan", "64 of 64 tokens"),
    ]
    text = generate_after_image(make_model(family), 7, 1)
    np.savez(tmp_path / "image.npz", pixel_values=text.inputs["pixel_values"])
    words = ["--ids", ",".join(map(str, text.prompt)), "--inputs", tmp_path / "image.npz", "--backend", "plan"]
    code, out, _ = command_line("generate", tmp_path / "out", *words, "--max-new-tokens", "8")
    assert code == 0 and out.splitlines()[0] == ",".join(map(str, text.tokens[:8]))
    found = QuantSim(RunConfig.from_mapping(settings), tmp_path / "out").run()
    assert isinstance(found, PartsQuantSimResult) and found.chain is not None
    assert list(found.chain.parts) == ["vision", "embedding", "decoder"]
    assert found.chain.noise.tokens == 64 and 5 < found.chain.noise.sqnr_db < 60
    for part in result.parts:
        quantized = onnx.load(tmp_path / "out" / "parts" / part / "model.qdq.onnx", load_external_data=False)
        assert "QuantizeLinear" in {node.op_type for node in quantized.graph.node}
