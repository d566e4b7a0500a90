"""`transformers`: ModelOutput and default caches, in and out, from a saved IR that was traced on meta."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from pipeline.torch_ir import IR, IRExecutor, extract_ir, verify_ir_with_state_dict

CONFIG = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0)


def traced(kwargs: dict[str, object], file: Path) -> IR:
    with torch.device("meta"):
        model = GPT2LMHeadModel(CONFIG).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the caches begin as lifted constants without elements
        extract_ir(model, (), kwargs=kwargs).save(file)
    return IR.load(file)


def cache(length: int, device: str = "cpu") -> DynamicCache:
    made = DynamicCache(config=CONFIG)
    for layer in range(2):
        made.update(*torch.randn(2, 1, 2, length, 8, device=device), layer)
    return made


def test_prefill_and_decode_of_gpt2(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(CONFIG).eval()
    prefill = traced({"input_ids": torch.zeros(1, 5, dtype=torch.long, device="meta")}, tmp_path / "p.json")
    ids = torch.randint(0, 32, (1, 5))
    ok, report = verify_ir_with_state_dict(prefill, model.state_dict(), model, (), kwargs={"input_ids": ids})
    assert ok, report
    assert [one["path"] for one in report.output_details][:2] == ["logits", "past_key_values.layers.0.keys"]

    step = {"input_ids": torch.zeros(1, 1, dtype=torch.long, device="meta"), "past_key_values": cache(5, "meta")}
    decode = traced(step, tmp_path / "d.json")
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
