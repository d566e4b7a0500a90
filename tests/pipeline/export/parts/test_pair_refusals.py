"""What cannot be split into prefill and decode is refused by name, before anything is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pipeline.errors import UsageError
from pipeline.export.parts.pair import (
    CacheSizes,
    Decode,
    Prefill,
    Program,
    cache_specs,
    decode_inputs,
    generate,
    kv_mapping,
    prefill_inputs,
)

T5: dict[str, Any] = {"vocab_size": 89, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4}

REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "training": (lambda make: make("Llama").train(), "training mode.* call model.eval"),
    "encoder_decoder": (
        lambda _: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).eval(),
        "encoder",
    ),
    "no_language_model": (lambda _: nn.Linear(2, 2).eval(), "takes no input_ids, attention_mask, position_ids"),
    "alibi": (
        lambda _: transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=89, hidden_size=32, n_layer=1, n_head=4)
        ).eval(),
        r"positions are in a bias \(ALiBi\)",
    ),
    "local_attention": (
        lambda make: make("GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4),
        "transformers says so",
    ),
    "flash": (lambda make: with_attention(make("Llama"), "flash_attention_2"), "attn_implementation='eager'"),
    "linear": (lambda make: with_kinds(make("Qwen3"), ["linear_attention", "full_attention"]), "kind linear_attention"),
}


def with_attention(model: Any, name: str) -> Any:
    model.config._attn_implementation_internal = name
    return model


def with_kinds(model: Any, kinds: list[str]) -> Any:
    model.config.layer_types = kinds
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_is_refused(case: str, causal_lm: Callable[..., Any]) -> None:
    make, said = REFUSED[case]
    with pytest.raises(UsageError, match=said):
        Prefill(make(causal_lm))


class Sharing(nn.Module):
    """Writes layer 0 a given number of times, and nothing else."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.weight = times, nn.Parameter(torch.zeros(1))
        self.eval()

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, past_key_values: Any, **_: Any) -> None:
        for _ in range(self.times):
            past_key_values.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), 0)


@pytest.mark.parametrize(("times", "said"), [(0, "wrote nothing into past_key_values"), (2, r"caches \[2\] times")])
def test_each_layer_is_written_once(times: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        cache_specs(Sharing(times))


def test_sizes_without_room_are_refused() -> None:
    with pytest.raises(UsageError, match="prefill of 8 tokens with caches of 8"):
        CacheSizes(8, 8)
    nothing = Program(lambda: [], (), ())
    for prompt, steps in ((5, 1), (4, 5)):
        with pytest.raises(UsageError, match=f"a prompt of {prompt} tokens and {steps} steps; expected 1 to 4"):
            ids = torch.zeros(1, prompt, dtype=torch.int64)
            generate(nothing, nothing, {"num_layers": 0, "layers": []}, ids, steps, CacheSizes(4, 8))


def test_the_mapping_has_one_row_a_layer_and_the_names_of_the_graphs() -> None:
    inputs = ["input_ids", "attention_mask", "position_ids", "cache_position", "past_0", "past_1"]
    assert kv_mapping(["linear", "add", "transpose"], inputs, ["linear", "index_copy", "index_copy_1"]) == {
        "num_layers": 1,
        "layers": [
            {
                "layer": 0,
                "prefill_key_output": "add",
                "prefill_value_output": "transpose",
                "decode_key_input": "past_0",
                "decode_value_input": "past_1",
                "decode_key_output": "index_copy",
                "decode_value_output": "index_copy_1",
            }
        ],
    }
    with pytest.raises(UsageError, match="returns 2, decode takes 2 and returns 4 tensors"):
        kv_mapping(["l", "k", "v"], inputs, ["l", "k", "v", "k1", "v1"])


def test_on_meta_the_graph_has_the_models_own_names_and_half_precision_masks(causal_lm: Callable[..., Any]) -> None:
    """Weight-free, bfloat16, torch's fused attention: the mask is clamped before it is cast, and stays finite."""
    model = causal_lm("Llama").to(device="meta", dtype=torch.bfloat16)
    sizes, specs = CacheSizes(4, 8), cache_specs(model)
    with torch.no_grad():
        first = torch.export.export(Prefill(model), prefill_inputs(sizes), strict=False)
        second = torch.export.export(Decode(model), decode_inputs(specs, sizes), strict=False)
    for program in (first, second):
        assert set(program.graph_signature.parameters) == {name for name, _ in model.named_parameters()}
        targets = [str(node.target) for node in program.graph.nodes]
        assert targets.count("aten.clamp.default") == 1
    shapes = [node.meta["val"].shape for node in second.graph.nodes if node.op == "placeholder"][-4:]
    assert shapes == [(1, 2, 8, 8)] * 4


def test_experts_in_single_precision_have_caches_on_meta(causal_lm: Callable[..., Any]) -> None:
    """Where nothing is exported, transformers multiplies experts by an operator that takes bfloat16 alone on meta."""
    model = causal_lm("Mixtral")
    assert cache_specs(model.to(device="meta")) == cache_specs(causal_lm("Mixtral"))
