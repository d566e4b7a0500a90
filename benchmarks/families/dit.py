"""A small DiT of diffusers: the exporter writes its sines and patches with sequences and CastLike."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel


def make() -> tuple[DiTTransformer2DModel, tuple[()], dict[str, Any]]:
    """Two blocks over 16 patches, conditioned on a time step and a class."""
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor([7]),
        "class_labels": torch.tensor([3]),
        "return_dict": False,
    }
    return model.eval(), (), inputs
