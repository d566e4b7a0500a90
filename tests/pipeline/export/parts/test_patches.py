"""Each row of the table of patches is needed: without it the library still does what the row is there for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import torch
from torch.nn import functional

from pipeline.export.parts.patches import PATCHES, apply_patches


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
    assert [row.name for row in PATCHES] == ["scaled_dot_product_attention"]
    assert difference(Attention().eval()) > 0.01, "torch.onnx gives torch's value now: remove the row"
    assert difference(PatchedAttention().eval()) < 1e-6
