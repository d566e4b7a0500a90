"""Checks before a trace whether a model can work with a cache that is input and output."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import Cache

from pipeline.errors import UsageError
from pipeline.export.static_cache.masks import attention_kinds

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
    counts = [getattr(layer, "updates", 0) for layer in cache.layers]
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
