"""Embedding, decoder layers, head. The modules' names are the checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kimi_k25_text_local.attention import Attention
from kimi_k25_text_local.config import KimiTextConfig
from kimi_k25_text_local.experts import MixtureOfExperts
from kimi_k25_text_local.parts import Embedding, Linear, Mlp, Place, RMSNorm
from kimi_k25_text_local.rope import cos_and_sin


@dataclass(frozen=True, slots=True)
class CausalOutput:
    """logits: (1, length, vocabulary), in the model's dtype."""

    logits: Tensor


class DecoderLayer(nn.Module):
    """Attention, then a dense MLP in the first layers and a mixture of experts in the others."""

    def __init__(self, config: KimiTextConfig, layer: int, place: Place) -> None:
        super().__init__()
        dense = layer < config.first_k_dense_replace
        self.self_attn = Attention(config, layer, place)
        self.mlp = (
            Mlp(config.hidden_size, config.intermediate_size, place) if dense else MixtureOfExperts(config, place)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)

    def forward(self, x: Tensor, mask: Tensor, positions: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, positions, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids → hidden states after the last norm."""

    def __init__(self, config: KimiTextConfig, place: Place) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, place=place)
        self.layers = nn.ModuleList([DecoderLayer(config, layer, place) for layer in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)

    def forward(self, input_ids: Tensor, mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        x = self.embed_tokens(input_ids)
        positions = cos_and_sin(self.config, position_ids)
        for layer in self.layers:
            x = layer(x, mask, positions, cache)
        return self.norm(x)


class KimiK25TextForCausalLM(nn.Module):
    """The text model, for inference: in eval mode, no gradients, parameters uninitialized until weights are loaded.

    Args:
        device: "meta" makes the shapes of all 61 layers without a byte of weights.
    """

    def __init__(self, config: KimiTextConfig, device: str = "meta") -> None:
        super().__init__()
        place = Place(device, config.dtype)
        self.model = Decoder(config, place)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, place=place)
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = True,
    ) -> CausalOutput:
        """
        Args:
            input_ids, position_ids: int64 (1, length).
            attention_mask: float32 (1, 1, length, keys), additive.
            past_key_values: has `update(keys, values, layer)`, as transformers' `Cache`; None without a cache.
        """
        cache = past_key_values if use_cache else None
        return CausalOutput(self.lm_head(self.model(input_ids, attention_mask, position_ids, cache)))
