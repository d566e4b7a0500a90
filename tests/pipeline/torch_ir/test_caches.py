"""`transformers`: ModelOutput and default caches, in and out, from a saved IR that was traced on meta."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM, StaticCache

from pipeline.torch_ir import IR, ExecutionError, IRExecutor, extract_ir, verify_ir_with_state_dict

X = torch.ones(1, 2, 5, 8)
CONFIG = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0)


def trace_and_load(kwargs: dict[str, object], file: Path) -> IR:
    with torch.device("meta"):
        model = GPT2LMHeadModel(CONFIG).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the caches begin as lifted constants without elements
        extract_ir(model, (), kwargs=kwargs).save(file)
    return IR.load(file)


def cache(length: int, device: str = "cpu") -> DynamicCache:
    cache = DynamicCache(config=CONFIG)
    for layer in range(2):
        cache.update(*torch.randn(2, 1, 2, length, 8, device=device), layer)
    return cache


def test_prefill_and_decode_of_gpt2(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(CONFIG).eval()
    prefill = trace_and_load({"input_ids": torch.zeros(1, 5, dtype=torch.long, device="meta")}, tmp_path / "p.json")
    ids = torch.randint(0, 32, (1, 5))
    ok, report = verify_ir_with_state_dict(prefill, model.state_dict(), model, (), kwargs={"input_ids": ids})
    assert ok, report
    assert [detail["path"] for detail in report.output_details][:2] == ["logits", "past_key_values.layers.0.keys"]

    step = {"input_ids": torch.zeros(1, 1, dtype=torch.long, device="meta"), "past_key_values": cache(5, "meta")}
    decode = trace_and_load(step, tmp_path / "d.json")
    past = cache(5)
    given = {"input_ids": ids[:, :1], "past_key_values": past}
    before = copy.deepcopy(past)
    ok, report = verify_ir_with_state_dict(decode, model.state_dict(), model, (), kwargs=given)
    assert ok, report
    assert past.get_seq_length() == before.get_seq_length() == 5
    assert torch.equal(past.layers[0].keys, before.layers[0].keys)
    flat = [ids[:, :1], *(tensor for layer in past.layers for tensor in (layer.keys, layer.values))]
    executor = IRExecutor(decode, model.state_dict())
    assert torch.equal(executor.execute(flat)[0], executor.execute((), given)[0])
    assert executor.not_planned == ""


def mistral(sliding_window: int | None) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=32,
        sliding_window=sliding_window,
    )
    return MistralForCausalLM(config).eval()


def decode_step(model: MistralForCausalLM, length: int) -> dict[str, object]:
    """A decode step after `length` tokens."""
    past = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(torch.arange(length)[None], past_key_values=past)
    return {"input_ids": torch.tensor([[7]]), "past_key_values": past}


@pytest.mark.parametrize("sliding_window", [None, 4])
def test_numbers_of_python_inside_a_cache_are_those_of_the_trace(sliding_window: int | None) -> None:
    """A static cache counts its tokens in a tensor; a sliding one in a number, which the graph has as a constant."""
    model = mistral(sliding_window)
    ir = extract_ir(model, (), kwargs=decode_step(model, 2), strict=False)
    again = IR.from_dict(ir.to_dict())
    assert again.signature == ir.signature
    assert verify_ir_with_state_dict(again, model.state_dict(), model, (), kwargs=decode_step(model, 2))[0]
    ok, report = verify_ir_with_state_dict(again, model.state_dict(), model, (), kwargs=decode_step(model, 6))
    assert ok is (sliding_window is None), report
    if sliding_window:
        said = r"layers.1.cumulative_length\w*: found 6, but the IR was traced with 2, .* extract it again"
        with pytest.raises(ExecutionError, match=said):
            IRExecutor(again, model.state_dict()).execute((), decode_step(model, 6))


def test_files_from_before_such_numbers_were_kept_are_taken_as_they_are() -> None:
    model = mistral(4)
    data = extract_ir(model, (), kwargs=decode_step(model, 2), strict=False).to_dict()
    past = data["signature"]["inputs"]["items"][1]["items"][1]
    assert past.pop("fixed")["layers.0.max_cache_len"] == {"value": 4}
    assert IRExecutor(IR.from_dict(data), model.state_dict()).execute((), decode_step(model, 6))


def longer() -> DynamicCache:
    cache = DynamicCache()
    for layer in range(3):
        cache.update(*torch.randn(2, 1, 2, 5, 8), layer)
    return cache


NO_SUCH_CACHE = {
    "None": (lambda: None, "found None, expected transformers.cache_utils.DynamicCache of 4"),
    "a tuple": (lambda: ((X, X), (X, X)), "found tuple, expected transformers.cache_utils.DynamicCache of 4"),
    "another": (
        lambda: StaticCache(config=CONFIG, max_cache_len=16),
        "found transformers.cache_utils.StaticCache, expected transformers.cache_utils.DynamicCache of 4",
    ),
    "empty": (
        DynamicCache,
        "found transformers.cache_utils.DynamicCache of 0, expected transformers.cache_utils.DynamicCache of 4",
    ),
    "longer": (
        longer,
        "found transformers.cache_utils.DynamicCache of 6, expected transformers.cache_utils.DynamicCache of 4",
    ),
}


def test_a_cache_that_is_none_is_refused_once() -> None:
    """Its tensors are absent too, and that explains nothing."""
    model = GPT2LMHeadModel(CONFIG).eval()
    ids = torch.zeros(1, 1, dtype=torch.long)
    ir = extract_ir(model, (), kwargs={"input_ids": ids, "past_key_values": cache(5)}, strict=False)
    executor = IRExecutor(ir, model.state_dict())
    for make, said in NO_SUCH_CACHE.values():
        with pytest.raises(ExecutionError) as caught:
            executor.execute((), {"input_ids": ids, "past_key_values": make()})
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"inputs: argument past_key_values: {said}; the graph's own are input_ids, ")
    with pytest.raises(ExecutionError) as caught:
        executor.execute((), {"input_ids": ids.float()})
    assert [line[:50] for line in str(caught.value).splitlines()] == [
        "inputs: keyword arguments: without 'past_key_values'; expected input_ids, past_key_values"[:50],
        "input 'input_ids': found float32[1, 1], expected int64[1, 1]"[:50],
    ]
