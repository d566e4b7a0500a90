"""Encoder and decoder in parts: modules that give the text of `generate`, and graphs that compute what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.encoder_decoder import FAMILIES, configuration, make_model
from benchmarks.generation import make_model as make_decoder
from pipeline.config import ModelConfig
from pipeline.errors import SourceError
from pipeline.export import TorchSource, load_source
from pipeline.export.parts.decoder import CachedDecoder
from pipeline.export.parts.seq2seq import Decoder, Encoder
from pipeline.parts import TextGenerator
from pipeline.parts.chain import generate_after_encoder
from tests.pipeline.export.parts.graphs import check_graph


def section_of(family: str, part: str, folder: Path = Path()) -> ModelConfig:
    return ModelConfig.model_validate({**configuration(family, folder)["model"], "part": part})


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_both_modules_give_the_text_of_generate(family: str) -> None:
    model, section = make_model(family), section_of(family, "decoder")
    text = generate_after_encoder(model, section, 5, 1)
    assert len(text.tokens) == 32 and len(set(text.tokens)) > 4
    encoder, decoder = Encoder(model, section), Decoder(model, section)
    inputs = {name: torch.from_numpy(array) for name, array in text.inputs.items()}
    cross = {layer: sides["encoder"] for layer, sides in encoder(**inputs)["present"].items()}
    own: dict[str, dict[str, torch.Tensor]] = {}
    for state in decoder.own_states:
        own.setdefault(state.layer, {})[state.name] = state.empty(1)
    tokens = [*text.prompt]
    while len(tokens) < 33:
        ids = torch.tensor([tokens[-1:]])
        result = decoder(**decoder.arguments(ids, inputs.get("attention_mask"), own, cross))
        own = {layer: sides["decoder"] for layer, sides in result["present"].items()}
        tokens.append(int(result["logits"][0, -1].argmax()))
    assert tuple(tokens[1:]) == text.tokens


def test_inputs_follow_from_the_model() -> None:
    """Whisper's encoder has no mask and one length, and its decoder has a layer more."""
    model = make_model("Whisper")
    assert [*Encoder(model, section_of("Whisper", "encoder")).declarations()] == ["input_features"]
    decoder = Decoder(model, section_of("Whisper", "decoder")).declarations()
    assert [name for name in decoder if name.endswith(".key")] == [
        *(f"past_key_values.{layer}.decoder.key" for layer in range(3)),
        *(f"past_key_values.{layer}.encoder.key" for layer in range(3)),
    ]
    assert decoder["past_key_values.2.encoder.key"].dynamic == {0: "batch_size"}
    text = Decoder(make_model("T5"), section_of("T5", "decoder")).declarations()
    assert text["encoder_attention_mask"].dynamic == {0: "batch_size", 1: "encoder_sequence_length"}
    assert text["past_key_values.1.encoder.value"].dynamic == {0: "batch_size", 2: "encoder_sequence_length"}
    assert text["past_key_values.1.decoder.value"].dynamic == {0: "batch_size", 2: "past_decoder_sequence_length"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graphs_are_the_model(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "source")
    for part in ("encoder", "decoder"):
        source = load_source(section_of(family, part, tmp_path / "source"))
        assert isinstance(source, TorchSource)
        check_graph(source, tmp_path / f"{part}.onnx")
    text = generate_after_encoder(model, section_of(family, "decoder"), 5, 1)
    start = text.prompt
    found = TextGenerator(tmp_path).generate(inputs=text.inputs, start=start, max_new_tokens=32, stop=())
    assert found.tokens == text.tokens


def test_a_decoder_alone_is_refused_in_one_sentence() -> None:
    with pytest.raises(SourceError, match="LlamaForCausalLM has no encoder and decoder with a cache; expected a model"):
        Encoder(make_decoder("Llama"), section_of("T5", "encoder"))


def test_an_encoder_and_a_decoder_are_no_decoder_alone() -> None:
    with pytest.raises(SourceError, match="this task is for decoders alone; expected text2text-generation, or no task"):
        CachedDecoder(make_model("T5"))


def test_a_decoder_that_reads_one_token_a_call_is_refused_with_a_way_out() -> None:
    from transformers import ProphetNetConfig, ProphetNetForConditionalGeneration

    sides = ("encoder", "decoder")
    sizes: dict[str, Any] = {
        f"num_{side}_{key}": size for side in sides for key, size in (("layers", 1), ("attention_heads", 2))
    }
    config = ProphetNetConfig(vocab_size=40, hidden_size=16, encoder_ffn_dim=24, decoder_ffn_dim=24, **sizes)
    said = (
        r"ProphetNetForConditionalGeneration does not run .* one token or several: .*; leave out model\.task, and the"
    )
    with pytest.raises(SourceError, match=said):
        Encoder(ProphetNetForConditionalGeneration(config).eval(), section_of("T5", "encoder"))
