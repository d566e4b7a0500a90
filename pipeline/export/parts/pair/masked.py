"""Prefill and decode with masks as inputs: modules with flat tensors in and out, for models of no library too.

    prefill = Prefill(model)    (input_ids, attention_mask, position_ids) → (logits, k0, v0, k1, v1, …)
    decode = Decode(model)      (…, cache_position, k0, v0, …) → (logits, k0, v0, …)

A model that cannot work with a cache that is input and output is refused before the trace.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from pipeline.errors import UsageError
from pipeline.export.parts.holder import ModelHolder
from pipeline.export.parts.states import fixed_layer

LOWEST = torch.finfo(torch.float32).min

FULL, SLIDING = "full_attention", "sliding_attention"


def causal_mask(query_positions: Tensor, key_length: int) -> Tensor:
    """The mask that both graphs take, float32 (1, 1, queries, keys), on the device of the positions.

    Args:
        query_positions: int64 (queries,), the position of each query in the sequence.
        key_length: how many keys there are, in tokens.

    Source: seed document 000, `make_additive_causal_mask`.
    """
    keys = torch.arange(key_length, device=query_positions.device)
    hidden = keys.unsqueeze(0) > query_positions.unsqueeze(1)
    # Filled, not multiplied: 0 × lowest is fine, but hidden × lowest on meta would keep the dtype of `hidden`.
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, LOWEST)[None, None]


def mask_for_model(mask: Tensor, position_ids: Tensor, model: Any) -> Tensor | dict[str, Tensor]:
    """The mask for this model's attention: in its dtype, and with its sliding window if it has one.

    transformers takes a mask of four dims as it is and adds no window to it, so the window is added here; a model
    with layers of both kinds takes a mapping by kind.
    """
    kinds = attention_kinds(model)
    mask = _cast(mask, model)
    if SLIDING not in kinds:
        return mask
    windowed = _add_window(mask, position_ids, _text_config(model).sliding_window)
    return windowed if FULL not in kinds else {FULL: mask, SLIDING: windowed}


def attention_kinds(model: Any) -> frozenset[str]:
    """Which kinds of attention the layers have, in the words of transformers' `layer_types`."""
    config = _text_config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return frozenset(kinds)
    return frozenset({SLIDING if getattr(config, "sliding_window", None) else FULL})


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _cast(mask: Tensor, model: Any) -> Tensor:
    """Cast the mask: eager attention adds it in float32, torch's fused attention wants the dtype of the queries."""
    implementation = getattr(_text_config(model), "_attn_implementation", "eager")
    dtype = next(model.parameters()).dtype
    if implementation == "eager" or dtype == mask.dtype:
        return mask
    # Clamped first: the lowest float32 would become -inf, and a row of nothing else NaN.
    return mask.clamp(min=torch.finfo(dtype).min).to(dtype)


def _add_window(mask: Tensor, position_ids: Tensor, window: int) -> Tensor:
    keys = torch.arange(mask.shape[-1], device=mask.device)
    too_old = keys <= position_ids.unsqueeze(-1) - window  # (1, queries, keys)
    return mask.masked_fill(too_old.unsqueeze(1), torch.finfo(mask.dtype).min)


KNOWN_KINDS = frozenset({"full_attention", "sliding_attention"})
KNOWN_ATTENTION = frozenset({"eager", "sdpa", None})
NEEDED_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "past_key_values")


def check_model(model: Any) -> None:
    """Refuse a model that cannot have a static cache.

    Raises:
        UsageError: this model class or this setting of it cannot be split into prefill and decode.
    """
    reason = next((reason for ask in QUESTIONS if (reason := ask(model))), None)
    if reason is not None:
        raise UsageError(f"{type(model).__name__} cannot have a static cache: {reason}")


def check_updates(cache: Cache, model: Any) -> None:
    """Check after the forward that every layer was written exactly once.

    Raises:
        UsageError: the model has layers without a cache of their own, or writes one twice.
    """
    counts = [getattr(layer, "updates", 1) for layer in cache.layers]
    if not counts:
        raise UsageError(
            f"{type(model).__name__} wrote nothing into past_key_values; expected one update(keys, values, layer_idx) "
            "a layer; is use_cache honoured by its forward?"
        )
    if set(counts) != {1}:
        raise UsageError(
            f"{type(model).__name__} wrote its layers' caches {counts} times; expected once each. Layers that share "
            "keys and values, or write in pieces, cannot be mapped from prefill to decode one to one"
        )


def _in_training(model: Any) -> str | None:
    return "it is in training mode, and dropout would be in the graph; call model.eval()" if model.training else None


def _arguments(model: Any) -> str | None:
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in NEEDED_ARGUMENTS if name not in parameters]
    if not missing:
        return None
    return f"its forward takes no {', '.join(missing)}; expected a causal LM with {', '.join(NEEDED_ARGUMENTS)}"


def _encoder(model: Any) -> str | None:
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    return "it is an encoder-decoder, which has a second cache; export encoder and decoder by themselves"


def _alibi(model: Any) -> str | None:
    is_alibi = getattr(getattr(model, "config", None), "alibi", None)
    if is_alibi is None:  # Bloom has no other positions, and its configuration no word of them
        is_alibi = hasattr(getattr(model, "base_model", model), "build_alibi_tensor")
    if not is_alibi:
        return None
    return "its positions are in a bias (ALiBi) that it makes from a mask of two dims; the static mask has four"


def _own_claim(model: Any) -> str | None:
    if getattr(model, "_can_compile_fullgraph", True):
        return None
    return "transformers says so of this class (`_can_compile_fullgraph` is False); wrap it by hand"


def _attention(model: Any) -> str | None:
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation in KNOWN_ATTENTION:
        return None
    return (
        f"its attention is {implementation!r}, which takes no additive mask; make it with attn_implementation='eager'"
    )


def _layer_kinds(model: Any) -> str | None:
    other = sorted(attention_kinds(model) - KNOWN_KINDS)
    if not other:
        return None
    return f"it has layers of kind {', '.join(other)}; only {' and '.join(sorted(KNOWN_KINDS))} keep keys and values"


QUESTIONS = (_in_training, _encoder, _alibi, _arguments, _own_claim, _attention, _layer_kinds)


class FreshLayer(DynamicLayer):
    """A layer before the first token: what the model writes is what it reads."""

    updates = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take K and V of the prompt, (1, heads, length, width) each, and give them back."""
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        self.updates += 1
        return key_states, value_states


class _Wrapper(ModelHolder):
    def __init__(self, model: nn.Module) -> None:
        check_model(model)
        super().__init__(model)

    def _run(self, cache: Cache, ids: Tensor, mask: Tensor, positions: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
        (model,) = self.wrapped
        result = model.forward(  # not `model(…)`: the tracer would look for the model among the wrapper's modules
            input_ids=ids,
            attention_mask=mask_for_model(mask, positions, model),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **named,
        )
        check_updates(cache, model)
        layers: list[Any] = cache.layers
        return (result.logits, *(state for layer in layers for state in (layer.keys, layer.values)))


class Prefill(_Wrapper):
    """The prompt in one go: logits of every position, then K and V of every layer.

    Args:
        model: any causal LM whose forward takes `past_key_values` with transformers' `Cache` interface and returns an
            object with `.logits`. It is not copied, and its parameters keep their names: a checkpoint of the model is
            one of the wrapper.

    Raises:
        UsageError: the model cannot be split like this; the message says why.
    """

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """
        Args:
            input_ids: int64 (1, length).
            position_ids: int64 (1, length).
            attention_mask: float32 (1, 1, length, length), additive; see `causal_mask`.

        Returns:
            logits (1, length, vocabulary), then k0, v0, k1, v1, …, each (1, heads, length, width) as the model
            caches it: after rotation, before heads are repeated.
        """
        cache = Cache(layer_class_to_replicate=FreshLayer)
        return self._run(cache, input_ids, attention_mask, position_ids)


class Decode(_Wrapper):
    """One more token, or a few: reads caches of fixed length, returns them with the new states written in.

    Args and Raises: as `Prefill`.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache_position: Tensor,
        *past_kv_flat: Tensor,
    ) -> tuple[Tensor, ...]:
        """
        Args:
            input_ids: int64 (1, new tokens).
            position_ids: int64 (1, new tokens).
            attention_mask: float32 (1, 1, new tokens, max_cache_len), additive; hides what is not yet written.
            cache_position: int64 (new tokens,), where in the caches the new states go.
            past_kv_flat: k0, v0, k1, v1, …, each (1, heads, max_cache_len, width).

        Returns:
            logits (1, new tokens, vocabulary), then the caches in the order in which they came.
        """
        pairs = zip(past_kv_flat[::2], past_kv_flat[1::2], strict=True)
        cache = Cache(layers=[fixed_layer(keys, values, cache_position) for keys, values in pairs])
        # A model that takes `cache_position` makes it of the cache's length if it is not given one.
        named = {"cache_position": cache_position} if _takes(self.wrapped[0], "cache_position") else {}
        return self._run(cache, input_ids, attention_mask, position_ids, **named)


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters
