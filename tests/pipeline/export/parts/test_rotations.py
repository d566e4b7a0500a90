"""RoPE of each kind in parts, by the configuration alone: the tokens are torch's, also where the frequencies change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.generation import EMBEDDING_SPREAD, SMALL, SPREAD
from pipeline.config import ExportConfig, ModelConfig
from pipeline.errors import SourceError
from pipeline.export import TorchSource, export_onnx, load_source
from pipeline.export.parts.decoder import CachedDecoder
from pipeline.parts import TextGenerator
from pipeline.parts.chain import generate_greedily

KNOWN = 24
"""The tokens of the texts that a model was trained on."""

BY_LAYER = "dynamic in one of two layers"

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": KNOWN},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": KNOWN,
        "short_factor": [1.0, 1.0, 1.5, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": KNOWN,
    },
    "proportional": {"partial_rotary_factor": 0.5},
    BY_LAYER: {"factor": 2.0},
}
BY_LENGTH = ("dynamic", "longrope", BY_LAYER)


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == BY_LAYER:
        layers = {"sliding_attention": "default", "full_attention": "dynamic"}
        ropes = {layer: {"rope_type": name, "rope_theta": 10000.0} for layer, name in layers.items()}
        ropes["full_attention"] |= KINDS[kind]
        sizes = {**SMALL, "max_position_embeddings": KNOWN, "head_dim": 8, "sliding_window": 6}
        config = Gemma3TextConfig(**sizes, layer_types=[*layers], rope_parameters=ropes)
        return with_spread(Gemma3ForCausalLM(config))
    rope = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind]}
    longest = KNOWN if kind in ("default", "linear", "dynamic", "proportional") else 4 * KNOWN
    return with_spread(
        LlamaForCausalLM(LlamaConfig(**{**SMALL, "max_position_embeddings": longest, "rope_parameters": rope}))
    )


def with_spread(model: Any) -> Any:
    """The weights are large enough that every position gets another token."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(EMBEDDING_SPREAD if "embed" in name else SPREAD)
    return model.eval()


def export(model: Any, cache: dict[str, Any], folder: Path) -> None:
    model.save_pretrained(folder / "source")
    settings = {"transformers": str(folder / "source"), "task": "text-generation", "cache": cache}
    for part in ("prefill", "decode") if cache["kind"] == "static" else ("decoder",):
        source = load_source(ModelConfig.model_validate({**settings, "part": part}))
        assert isinstance(source, TorchSource)
        assert bool([note for note in source.notes if "RoPE" in note]) == (
            any(name in str(getattr(model.config, "rope_parameters", {})) for name in BY_LENGTH) and part == "decoder"
        )
        export_onnx(source, ExportConfig(), folder / f"{part}.onnx")


def assert_tokens(model: Any, folder: Path, length: int, count: int, backend: str) -> None:
    ids = torch.randint(0, 89, (1, length), generator=torch.Generator().manual_seed(length))
    tokens, _ = generate_greedily(model, count, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert len(tokens) == count and len(set(tokens)) > 2
    found = TextGenerator(folder, backend).generate(ids[0].tolist(), max_new_tokens=count, stop=())
    assert found.tokens == tokens, (length, backend)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_module_of_a_decoder_computes_what_the_model_does(kind: str) -> None:
    """Over texts of several lengths, one after the other: nothing of an earlier one is left."""
    part = CachedDecoder(make_model(kind))
    for length in (KNOWN + 5, 4, KNOWN + 20, KNOWN + 2):
        ids = torch.randint(0, 89, (1, length), generator=torch.Generator().manual_seed(length))
        expected = make_model(kind)(ids).logits
        found = part(**part.arguments(ids, torch.ones_like(ids), part.empty_states(1)))["logits"]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_goes_beyond_the_known_length_as_torch_does(kind: str, tmp_path: Path) -> None:
    """A text that grows beyond it, one whose prompt is longer, and a short one after them."""
    export(make_model(kind), {"kind": "dynamic"}, tmp_path)
    for length, count in ((KNOWN - 9, 32), (KNOWN + 5, 8), (4, 8)):
        assert_tokens(make_model(kind), tmp_path, length, count, "onnxruntime")
    assert_tokens(make_model(kind), tmp_path, KNOWN - 4, 8, "plan")


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_chunks_gives_the_tokens_of_torch(kind: str, tmp_path: Path) -> None:
    length = KNOWN if kind in BY_LENGTH else 48
    export(make_model(kind), {"kind": "static", "length": length, "chunk": 8}, tmp_path)
    for backend in ("onnxruntime", "plan"):
        assert_tokens(make_model(kind), tmp_path, 11, length - 10, backend)


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_chunks_of_a_prompt_that_would_get_other_frequencies_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=rf"found 25, but RoPE of the kind {kind.split()[0]} .* expected 24 or less, or cache"
    ):
        export(make_model(kind), {"kind": "static", "length": KNOWN + 1, "chunk": 8}, tmp_path)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_cache_of_a_convolution_is_carried(kind: str, tmp_path: Path) -> None:
    """LFM2: a layer of a short convolution, whose state has a fixed size, and one of attention."""
    torch.manual_seed(0)
    model = with_spread(Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"], conv_L_cache=3)))
    export(model, {"kind": kind, **({"length": 48, "chunk": 8} if kind == "static" else {})}, tmp_path)
    for backend in ("onnxruntime", "plan"):
        assert_tokens(model, tmp_path, 11, 32, backend)
