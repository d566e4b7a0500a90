"""The mixture of experts: 8 of 384 for each token, chosen by biased sigmoid scores, and a shared one for all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kimi_k25_text_local.config import KimiTextConfig
from kimi_k25_text_local.parts import Mlp, Place, Weight


class Router(Weight):
    """Chooses experts without an auxiliary loss (`noaux_tc`): the bias decides who is chosen, never how much."""

    def __init__(self, config: KimiTextConfig, place: Place) -> None:
        super().__init__(config.n_routed_experts, config.hidden_size, place=place)
        self.config = config
        bias = torch.empty(config.n_routed_experts, dtype=torch.float32, device=place.device)  # so in the checkpoint
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, hidden) → indices int64 and shares float32 of the chosen experts, (tokens, chosen) both."""
        scores = functional.linear(x.float(), self.weight.float()).sigmoid()
        chosen = torch.topk(
            scores + self.e_score_correction_bias, self.config.num_experts_per_tok, sorted=False
        ).indices
        shares = scores.gather(1, chosen)
        if self.config.norm_topk_prob:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, shares * self.config.routed_scaling_factor


class MixtureOfExperts(nn.Module):
    """(1, length, hidden) → the same shape.

    The checkpoint has each expert's matrices by themselves; a graph of fixed shapes cannot visit only those that some
    token has chosen. So they are stacked, and then either the chosen ones are gathered for each token, which reads
    tokens × chosen experts, or all experts see all tokens, which reads each expert once. The smaller number wins:
    gathered for the one token of decode (8 < 384), all for 128 tokens of prefill (1024 > 384).
    """

    def __init__(self, config: KimiTextConfig, place: Place) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config, place)
        self.experts = nn.ModuleList([Mlp(hidden, inner, place) for _ in range(config.n_routed_experts)])
        self.shared_experts = Mlp(hidden, inner * config.n_shared_experts, place)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chosen, shares = self.gate(tokens)
        stacks = [self._stacked(name) for name in ("gate_proj", "up_proj", "down_proj")]
        weigh = _gathered if chosen.numel() < len(self.experts) else _all
        return weigh(tokens, chosen, shares, *stacks).to(x.dtype).view_as(x) + self.shared_experts(x)

    def _stacked(self, name: str) -> Tensor:
        """One matrix of every expert, (experts, outputs, inputs)."""
        return torch.stack([expert.get_submodule(name).get_parameter("weight") for expert in self.experts])


def _gathered(x: Tensor, chosen: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    column = x[:, None, :, None]
    inner = functional.silu(torch.matmul(gate[chosen], column)) * torch.matmul(up[chosen], column)
    results = torch.matmul(down[chosen], inner).squeeze(-1)  # (tokens, chosen, hidden)
    return (results * shares.unsqueeze(-1)).sum(dim=1)


def _all(x: Tensor, chosen: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    inner = functional.silu(torch.matmul(x, gate.transpose(1, 2))) * torch.matmul(x, up.transpose(1, 2))
    results = torch.matmul(inner, down.transpose(1, 2))  # (experts, tokens, hidden)
    share_of = shares.new_zeros(x.shape[0], gate.shape[0]).scatter(1, chosen, shares)
    return (results * share_of.t().unsqueeze(-1)).sum(dim=0)
