"""Each row of the table of patches is needed: without it the library still does what the row is there for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from pipeline.export.parts.patches import PATCHES, apply_patches


def test_these_rows_are_tested_here() -> None:
    names = ["scaled_dot_product_attention", "Module.to", "SwitchTransformersExperts.forward"]
    assert [row.name for row in PATCHES] == names


class Attention(torch.nn.Module):
    def forward(self, query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)


class PatchedAttention(Attention):
    def forward(self, query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with apply_patches():
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
    with apply_patches():
        found = experts(TOKENS)
    assert float((found - expected).abs().max()) < 1e-6  # float32 in another order


def test_without_the_patches_these_experts_have_no_trace(experts: torch.nn.Module) -> None:
    with pytest.raises(RuntimeError, match="Couldn't swap"):  # the conversion of the router in forward
        torch.export.export(experts, (TOKENS,))
    inner, chosen = experts.experts, torch.eye(4, dtype=torch.int64)[[0, 1, 1, 3, 0, 2]][:, None]
    with pytest.raises(Exception, match="data-dependent"):  # the loop over experts
        torch.export.export(inner, (TOKENS[0], chosen, torch.ones(6, 1)))
