"""Twelve families in parts: a graph computes what torch computes, and a text through prefill and decode is torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from benchmarks.generation import FAMILIES, make_model
from pipeline.config import ExportConfig, ModelConfig, VerifyConfig
from pipeline.export import TorchSource, export_onnx, load_source, run_torch
from pipeline.parts import TextGenerator
from pipeline.parts.chain import generate_by_torch


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_is_the_model(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path / "source")
    settings = {"transformers": str(tmp_path / "source"), "task": "text-generation"}
    source = load_source(ModelConfig.model_validate(settings))
    assert isinstance(source, TorchSource) and source.draws is not None
    export_onnx(source, ExportConfig(), tmp_path / "decoder.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "decoder.onnx"), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == [spec.name for spec in source.inputs]
    for draw in source.draws(VerifyConfig()):
        expected = run_torch(source, draw.feeds)
        found: list[Any] = session.run(list(expected), dict(draw.feeds))
        for name, array in zip(expected, found, strict=True):
            limit = 1e-4 * max(1.0, float(np.abs(expected[name]).max(initial=0)))  # float32, other orders of sums
            np.testing.assert_allclose(array, expected[name], atol=limit, rtol=0, err_msg=f"{draw.draw.label}: {name}")


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_give_the_tokens_of_torch(family: str, tmp_path: Path) -> None:
    """A prompt of two chunks, over a cache that is full in the end."""
    model = make_model(family)
    model.save_pretrained(tmp_path / "source")
    text = generate_by_torch(model, 11, 1, 42)
    assert len(text.tokens) == 32
    settings = {"transformers": str(tmp_path / "source"), "task": "text-generation"}
    for part in ("prefill", "decode"):
        cache = {"kind": "static", "length": 42, "chunk": 8}
        source = load_source(ModelConfig.model_validate({**settings, "cache": cache, "part": part}))
        assert isinstance(source, TorchSource)
        export_onnx(source, ExportConfig(), tmp_path / f"{part}.onnx")
    for backend in ("onnxruntime", "plan"):
        found = TextGenerator(tmp_path, backend).generate(text.prompt, max_new_tokens=32, stop=())
        assert found.tokens == text.tokens, backend
