"""Embedding, decoder layers, head. The modules' names are the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kimi_k25_text_local.attention import Attention
from kimi_k25_text_local.config import KimiTextConfig
from kimi_k25_text_local.experts import MixtureOfExperts
from kimi_k25_text_local.parts import Embedding, Linear, Mlp, Place, RMSNorm
from kimi_k25_text_local.rope import cos_and_sin


@dataclass(frozen=True, slots=True)
class CausalOutput:
    """logits: (1, length, vocabulary), in the model's dtype.

    past_key_values: the cache that was given; else the keys and the values of each layer, of these tokens alone.
    """

    logits: Tensor
    past_key_values: Any = None


@dataclass(frozen=True, slots=True)
class NewStates:
    """Stands for the cache that was not given: a row of (keys, values), one pair for each layer."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def update(self, keys: Tensor, values: Tensor, _layer: int) -> tuple[Tensor, Tensor]:
        self.pairs.append((keys, values))
        return keys, values


@dataclass(frozen=True, slots=True)
class PlacedCache:
    """A cache that asks with each update where the new states go, as transformers 4 told it by `cache_kwargs`."""

    cache: Any
    cache_position: Tensor

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self.cache.update(keys, values, layer, {"cache_position": self.cache_position})


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
        config: or the `text_config` of the checkpoint, as transformers loads it.
        device: "meta" makes the shapes of all 61 layers without a byte of weights.
    """

    def __init__(self, config: KimiTextConfig | Any, device: str = "meta") -> None:
        super().__init__()
        if not isinstance(config, KimiTextConfig):
            config = KimiTextConfig.from_mapping(config if isinstance(config, Mapping) else config.to_dict())
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
        cache_position: Tensor | None = None,
    ) -> CausalOutput:
        """
        Args:
            input_ids, position_ids: int64 (1, length).
            attention_mask: float32 (1, 1, length, keys), additive.
            past_key_values: has `update(keys, values, layer)`, as transformers' `Cache`.
            use_cache: whether the result has the states of the layers; without, no cache is read either.
            cache_position: int64 (length,), where the new states go: the cache gets it with each update.
        """
        if not use_cache:
            return CausalOutput(self.lm_head(self.model(input_ids, attention_mask, position_ids, None)))
        new = NewStates()
        cache = past_key_values if past_key_values is not None else new
        reader = cache if cache_position is None or cache is new else PlacedCache(cache, cache_position)
        logits = self.lm_head(self.model(input_ids, attention_mask, position_ids, reader))
        return CausalOutput(logits, tuple(new.pairs) if cache is new else cache)
