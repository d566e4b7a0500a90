"""A decoder with its cache as inputs and outputs: what its states are; token by token it is the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from benchmarks.generation import make_model
from pipeline.config import ModelConfig
from pipeline.errors import SourceError, UsageError
from pipeline.export import TorchSource, load_source
from pipeline.export.exported import name_dims
from pipeline.export.parts.decoder import CachedDecoder
from pipeline.export.parts.draws import CALLS, make_feeds
from pipeline.parts.chain import generate_by_torch, generate_greedily

QUICK = ("Llama", "Gemma 3", "Falcon-H1")
"""One with keys and values alone, one with a window, one with all kinds of states in one layer."""


def states_of(family: str) -> dict[str, tuple[Any, ...]]:
    return {f"{state.layer}.{state.name}": state.shape for state in CachedDecoder(make_model(family)).states}


def test_states_are_read_off_the_cache_of_the_library() -> None:
    grows = ("batch_size", 2, "past_sequence_length", 8)
    assert states_of("Llama") == {"0.key": grows, "0.value": grows, "1.key": grows, "1.value": grows}


def test_states_of_fixed_size_have_no_named_dim_but_the_batch() -> None:
    assert states_of("Mamba-2") == {
        f"{layer}.{name}": ("batch_size", *shape)
        for layer in range(2)
        for name, shape in (("conv_state", (80, 4)), ("recurrent_state", (8, 8, 8)))
    }


def test_positions_are_an_input_where_other_positions_change_the_logits() -> None:
    assert CachedDecoder(make_model("Llama")).has_positions
    assert not CachedDecoder(make_model("Granite hybrid")).has_positions  # its layers know no positions
    assert not CachedDecoder(make_model("Mamba-2")).has_positions


@pytest.mark.parametrize("family", QUICK)
def test_token_by_token_is_as_torch_generates(family: str) -> None:
    """Over more tokens than a window or a chunk has; no token is repeated all along, so that a lost state shows."""
    model = make_model(family)
    expected = generate_by_torch(model, 5, 1).tokens
    assert len(set(expected)) > 3
    assert generate(CachedDecoder(model), 5, 1, len(expected)) == expected


@torch.no_grad()
def generate(decoder: CachedDecoder, length: int, seed: int, count: int) -> tuple[int, ...]:
    """Greedy tokens after the prompt of `generate_by_torch`."""
    generator = torch.Generator().manual_seed(seed)
    new, tokens = torch.randint(0, decoder.vocabulary, (1, length), generator=generator), list[int]()
    states, seen = decoder.empty_states(1), 0
    for _ in range(count):
        seen += new.shape[1]
        found = decoder(**decoder.arguments(new, torch.ones(1, seen, dtype=torch.int64), states))
        states, new = found["present"], found["logits"][:, -1].argmax(-1, keepdim=True)
        tokens.append(int(new))
    return tuple(tokens)


def test_draws_have_caches_that_the_model_wrote_and_masks_with_padding() -> None:
    decoder = CachedDecoder(make_model("Llama"))
    padded = make_feeds(decoder, next(call for call in CALLS if call.padded and call.past), 3)
    mask, key = padded["attention_mask"], padded["past_key_values.0.key"]
    assert mask.sum(-1).tolist() == [9, 10]  # padding is on the left, and the last row is whole
    assert mask[0, 0] == 0 and mask[0, 1:].all()
    assert padded["position_ids"].tolist() == [[8], [9]]
    whole = make_feeds(decoder, next(call for call in CALLS if not call.past), 3)
    assert whole["past_key_values.0.key"].shape == (2, 2, 0, 8)
    assert key.shape == (2, 2, 9, 8) and abs(key).max() > 0


def test_the_last_logits_alone() -> None:
    model = make_model("Llama")
    ids = torch.tensor([[3, 4, 5]])
    every, last = (
        decoder(**decoder.arguments(ids, torch.ones_like(ids), decoder.empty_states(1)))["logits"]
        for decoder in (CachedDecoder(model), CachedDecoder(model, last_only=True))
    )
    assert last.shape == (1, 1, every.shape[2])
    torch.testing.assert_close(last, every[:, -1:])


def test_a_model_that_raises_in_its_own_generate_is_one_sentence() -> None:
    with pytest.raises(
        SourceError, match="own generate of LlamaForCausalLM raises IndexError: index out of range"
    ) as caught:
        generate_greedily(make_model("Llama"), 2, input_ids=torch.tensor([[10**6]]))
    assert str(caught.value).endswith("expected a configuration whose tokens are in the vocabulary")


def test_a_model_whose_generate_fails_elsewhere_is_not_blamed_on_its_tokens() -> None:
    """transformers makes a cache of `num_layers` layers for `num_decoder_layers`."""
    import transformers

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 50}
    config = transformers.T5Config(**sizes, num_layers=1, num_decoder_layers=2)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with pytest.raises(SourceError, match=r"raises IndexError: list index .*; expected a model whose generate runs$"):
        generate_greedily(model, 2, 0, input_ids=torch.tensor([[3, 4]]))


def test_a_model_that_generates_no_text_is_one_sentence() -> None:
    import transformers

    config = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(SourceError, match="BertModel generates no text with a cache"):
        CachedDecoder(transformers.BertModel(config).eval())


def test_a_model_with_states_outside_of_its_cache_is_one_sentence() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "lru_width": 16,
        "vocab_size": 16,
    }
    config = RecurrentGemmaConfig(**sizes, num_hidden_layers=3, attention_window_size=8)
    with pytest.raises(SourceError, match="RecurrentGemmaForCausalLM keeps what it has read in its modules, outside"):
        CachedDecoder(RecurrentGemmaForCausalLM(config).eval())


def test_a_model_that_raises_on_the_inputs_of_a_task_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """Mamba takes a mask of the new tokens alone; the inputs of a task are no user's to declare."""
    sizes: dict[str, Any] = {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 16}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path)
    section = ModelConfig.model_validate({"transformers": str(tmp_path), "task": "text-generation"})
    with pytest.raises(SourceError, match="the model raises on its example inputs") as caught:
        load_source(section)
    assert "kind: static" in str(caught.value) and "model.inputs" not in str(caught.value)


def test_a_dim_that_a_model_of_transformers_fixes_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """As the loop of Mamba's own scan does: the inputs of a task are no user's to declare, and so is the code."""
    make_model("Llama").save_pretrained(tmp_path)
    source = load_source(ModelConfig.model_validate({"transformers": str(tmp_path), "task": "text-generation"}))
    assert isinstance(source, TorchSource)
    spec = source.inputs[0]
    value = ir.Value(name=spec.name, shape=ir.Shape([spec.shape[0], 5]))
    model = ir.Model(ir.Graph([value], [], nodes=[]), ir_version=10)
    with pytest.raises(UsageError, match="'sequence_length' was asked to be dynamic and came out as the") as caught:
        name_dims(model, source.inputs[:1], source.way_out)
    _, way_out = str(caught.value).split("what to try: ")
    assert "model.cache: {kind: static, length: 2048}" in way_out and "model.inputs" not in way_out
