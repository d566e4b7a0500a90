"""Each row of the table of patches is needed: without it the library still does what the row is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, LlamaConfig, SwitchTransformersConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from benchmarks.other_families import make_model
from pipeline.export.patches import PATCHES, apply_patches


def test_these_rows_are_tested_here() -> None:
    assert [row.name for row in PATCHES] == [
        "scaled_dot_product_attention",
        "Module.to",
        "SwitchTransformersExperts.forward",
        "dynamic_rope_update",
        "Cache.is_initialized",
        "is_torchdynamo_exporting",
    ]


class Attention(torch.nn.Module):
    def forward(self, query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)


class PatchedAttention(Attention):
    def forward(self, query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with apply_patches(self):
            return super().forward(query, mask)


def difference(module: torch.nn.Module) -> float:
    """Of ONNX and torch, for queries of which the first sees no key."""
    example = (torch.arange(12.0).reshape(1, 1, 3, 4).sin(), torch.ones(3, 3).tril(-1).bool()[None, None])
    names: dict[str, Any] = {"input_names": ["query", "mask"], "verbose": False}
    model = torch.onnx.export(module, example, dynamo=True, optimize=False, **names)
    assert model is not None
    session = onnxruntime.InferenceSession(model.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"query": example[0].numpy(), "mask": example[1].numpy()})
    return float(np.abs(found - module(*example).numpy()).max())


def test_without_the_patch_a_token_that_sees_nothing_differs_in_onnx() -> None:
    assert difference(Attention().eval()) > 0.01, "torch.onnx gives torch's value now: remove the row"
    assert difference(PatchedAttention().eval()) < 1e-6


@pytest.fixture
def experts() -> torch.nn.Module:
    """The sparse layer of a Switch transformer: a router that takes one of four experts for each token."""
    torch.manual_seed(0)
    config = SwitchTransformersConfig(d_model=8, d_ff=16, num_experts=4, expert_capacity=1, router_dtype="float32")
    return SwitchTransformersSparseMLP(config).eval()


TOKENS = torch.arange(48.0).reshape(1, 6, 8).sin()


@torch.no_grad()
def test_experts_of_a_switch_transformer_compute_the_same_with_the_patches(experts: torch.nn.Module) -> None:
    expected = experts(TOKENS)
    assert (expected == 0).all(-1).any(), "a token that finds its expert full should be among them"
    with apply_patches(experts):
        found = experts(TOKENS)
    assert float((found - expected).abs().max()) < 1e-6  # float32 in another order


def test_without_the_patches_these_experts_have_no_trace(experts: torch.nn.Module) -> None:
    with pytest.raises(RuntimeError, match="Couldn't swap"):  # the conversion of the router in forward
        torch.export.export(experts, (TOKENS,))
    inner, chosen = experts.get_submodule("experts"), torch.eye(4, dtype=torch.int64)[[0, 1, 1, 3, 0, 2]][:, None]
    with pytest.raises(Exception, match="data-dependent"):  # the loop over experts
        torch.export.export(inner, (TOKENS[0], chosen, torch.ones(6, 1)))


@pytest.fixture
def rotation() -> Callable[[], torch.nn.Module]:
    """Makes a rotation that takes other frequencies for texts of more than 8 tokens."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, max_position_embeddings=8, rope_parameters=rope)
    return lambda: LlamaRotaryEmbedding(config)


STATES = torch.zeros(1, 1, 16)


def test_a_rotation_by_the_length_of_the_text_keeps_nothing_of_an_earlier_text(
    rotation: Callable[[], torch.nn.Module],
) -> None:
    module = rotation()
    for length in (5, 12, 9, 20, 3):
        positions = torch.arange(length)[None]
        with apply_patches(module):
            found = module(STATES, positions)
        for tensor, expected in zip(found, rotation()(STATES, positions), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)
    assert not torch.equal(
        rotation()(STATES, torch.arange(12)[None])[0][:, :8], rotation()(STATES, torch.arange(8)[None])[0]
    )


def test_without_the_patch_a_rotation_by_the_length_has_no_trace(rotation: Callable[[], torch.nn.Module]) -> None:
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(rotation(), (STATES, torch.arange(9)[None]), strict=False)


def test_with_the_patch_the_frequencies_of_a_traced_rotation_follow_the_positions(
    rotation: Callable[[], torch.nn.Module],
) -> None:
    module = rotation()
    length = torch.export.Dim("length", min=2)
    with apply_patches(module):
        program = torch.export.export(
            module, (STATES, torch.arange(9)[None]), dynamic_shapes=({}, {1: length}), strict=False
        )
    for count in (5, 20):
        positions = torch.arange(count)[None]
        found = program.module()(STATES, positions)
        for tensor, expected in zip(found, rotation()(STATES, positions), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)


def test_without_the_patch_words_of_a_prompt_see_each_other_in_the_first_call_alone() -> None:
    """The second call has two words, of which the first sees the other one where both are of the prompt."""
    model, mask = make_model("PaliGemma"), torch.ones(1, 3, dtype=torch.int64)

    @torch.no_grad()
    def logits_of_the_second(third: int) -> torch.Tensor:
        words, cache = model.get_input_embeddings()(torch.tensor([[1, 2, third]])), DynamicCache(config=model.config)
        for start, end in ((0, 1), (1, 3)):
            given = {"attention_mask": mask[:, :end], "token_type_ids": 0 * mask[:, :end], "past_key_values": cache}
            logits = model(inputs_embeds=words[:, start:end], **given).logits
        return logits[:, 0]

    assert torch.equal(logits_of_the_second(5), logits_of_the_second(9))
    with apply_patches(model):
        assert not torch.equal(logits_of_the_second(5), logits_of_the_second(9))


class Solves(TorchFunctionMode):
    """Counts the triangular systems that are solved."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.linalg.solve_triangular
        return function(*args, **(kwargs or {}))


def test_without_the_patch_the_delta_rule_writes_rows_for_an_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a trace, which tests of translations have, it takes 20 s; here the rule is told that there is one."""
    from transformers.models.qwen3_next import modeling_qwen3_next as library

    module, x = torch.nn.Identity(), 0.1 * torch.randn(1, 4, 2, 8)
    monkeypatch.setattr(torch.nn.Identity, "__module__", library.__name__)
    monkeypatch.setattr(library, "is_torchdynamo_exporting", lambda: True)

    def count_systems() -> int:
        with Solves() as solves:
            library.torch_chunk_gated_delta_rule(x, x, x, -x[..., 0].abs(), x[..., 1].sigmoid())
        return solves.count

    assert count_systems() == 0, "the library solves a system for exporters too: remove the row"
    with apply_patches(module, is_traced=True):
        assert count_systems() == 2
