"""Twelve families in parts: a graph computes what torch computes, and a text through prefill and decode is torch's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.generation import FAMILIES, make_model
from pipeline.config import ExportConfig, ModelConfig
from pipeline.export import TorchSource, export_onnx, load_source
from pipeline.parts import TextGenerator
from pipeline.parts.chain import generate_by_torch
from tests.pipeline.export.parts.graphs import check_graph


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_is_the_model(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path / "source")
    settings = {"transformers": str(tmp_path / "source"), "task": "text-generation"}
    source = load_source(ModelConfig.model_validate(settings))
    assert isinstance(source, TorchSource)
    check_graph(source, tmp_path / "decoder.onnx")


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
