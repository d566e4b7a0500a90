"""`genai_config.json`: by it onnxruntime-genai loads a folder of models, and `onnxline generate` knows the tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import onnx

from pipeline.parts.slots import PAST_PREFIX, PRESENT_PREFIX, state_slots

KINDS: Final[Mapping[str, str]] = {
    "key": "key_names",
    "value": "value_names",
    "conv_state": "conv_names",
    "recurrent_state": "recurrent_names",
}
"""Name of a state → the key that onnxruntime-genai gives to its pattern, after `past_` or `present_`."""


def genai_config(config: Any, graph: onnx.GraphProto) -> str:
    """The text of genai_config.json for a decoder.

    Args:
        config: of the model, from transformers.
        graph: of the final decoder.
    """
    return _text(_model_of(config, graph))


def _text(model: Mapping[str, Any]) -> str:
    search = {**SEARCH, "max_length": model["context_length"]}
    return json.dumps({"model": model, "search": search}, indent=4) + "\n"


def _model_of(config: Any, graph: onnx.GraphProto) -> dict[str, Any]:
    """The section `model` for a decoder."""
    text = config.get_text_config(decoder=True)
    slots = state_slots(graph)
    inputs = {value.name for value in graph.input}
    named = [name for name in GIVEN if name in inputs]
    kinds = [kind for kind in KINDS if any(slot.before.endswith(f".{kind}") for slot in slots)]
    heads = text.num_attention_heads if hasattr(text, "num_attention_heads") else 0
    keys = next((slot.shape for slot in slots if slot.before.endswith(".key")), (1, heads, 0, 0))
    length = getattr(text, "max_position_embeddings", None) or DEFAULT_LENGTH
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "decoder.onnx",
        "head_size": keys[3],
        "hidden_size": text.hidden_size,
        "inputs": {
            **{name: name for name in named},
            **{f"past_{KINDS[kind]}": f"{PAST_PREFIX}%d.{kind}" for kind in kinds},
        },
        "outputs": {"logits": "logits", **{f"present_{KINDS[kind]}": f"{PRESENT_PREFIX}%d.{kind}" for kind in kinds}},
        "num_attention_heads": heads,
        "num_hidden_layers": text.num_hidden_layers,
        "num_key_value_heads": keys[1],
    }
    eos = _tokens(text, "eos_token_id")
    return {
        "bos_token_id": _tokens(text, "bos_token_id") or 0,
        "context_length": length,
        "decoder": decoder,
        "eos_token_id": eos if eos is not None else 0,
        "pad_token_id": _first(_tokens(text, "pad_token_id"), eos, 0),
        "type": genai_type(config),
        "vocab_size": text.vocab_size,
    }


GIVEN: Final = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
"""What onnxruntime-genai gives to a decoder besides its states."""


def genai_image_config(config: Any, graphs: Mapping[str, onnx.GraphProto]) -> str | None:
    """The text of genai_config.json for a tower, an embedding and a decoder; None where the decoder has an input that
    onnxruntime-genai does not give, such as the token_type_ids of Gemma 3.

    Args:
        config: of the model, from transformers.
        graphs: part → its final graph.
    """
    decoder, vision = graphs["decoder"], config.vision_config
    if {value.name for value in decoder.input} - {slot.before for slot in state_slots(decoder)} - {*GIVEN}:
        return None
    model = _model_of(config, decoder)
    model |= {
        "type": config.model_type,
        "image_token_id": _first(_tokens(config, "image_token_id"), _tokens(config, "image_token_index")),
        "vision": {
            **_interface("vision", graphs),
            **{key: value for key in TOWER if (value := getattr(vision, key, None)) is not None},
        },
        "embedding": _interface("embedding", graphs),
        **{key: value for key in OF_IMAGES if (value := _tokens(config, key)) is not None},
    }
    return _text(model)


def _interface(part: str, graphs: Mapping[str, onnx.GraphProto]) -> dict[str, Any]:
    """The file of a part, and its inputs and outputs, whose names are those of onnxruntime-genai."""
    graph = graphs[part]
    sides = {"inputs": graph.input, "outputs": graph.output}
    names = {side: {value.name: value.name for value in values} for side, values in sides.items()}
    return {"filename": f"{part}.onnx", **names}


TOWER: Final = ("patch_size", "spatial_merge_size", "tokens_per_second")
"""Sizes of a tower, by which onnxruntime-genai gives a token of an image its positions."""

OF_IMAGES: Final = ("video_token_id", "vision_start_token_id")
"""Tokens by which it finds images and videos in a text."""


SPEECH: Final = "whisper"
"""The type of models with an encoder that onnxruntime-genai knows; it takes features of 3,000 frames."""


def genai_speech_config(config: Any, graph: onnx.GraphProto) -> str:
    """The text of genai_config.json for the encoder and the decoder of Whisper.

    Args:
        config: of the model, from transformers.
        graph: of the final decoder.
    """
    shape = next(slot.shape for slot in state_slots(graph) if slot.before.endswith("decoder.key"))
    shared = {"head_size": shape[3], "hidden_size": config.d_model}

    def list_states(prefix: str, title: str, owner: str) -> dict[str, str]:
        return {f"{title}_{kind}_names": f"{prefix}%d.{owner}.{kind}" for kind in ("key", "value")}

    encoder = {
        **shared,
        "filename": "encoder.onnx",
        "num_attention_heads": config.encoder_attention_heads,
        "num_key_value_heads": config.encoder_attention_heads,
        "num_hidden_layers": config.encoder_layers,
        "inputs": {"audio_features": "input_features"},
        "outputs": {
            "encoder_hidden_states": "last_hidden_state",
            **list_states(PRESENT_PREFIX, "cross_present", "encoder"),
        },
    }
    decoder = {
        **shared,
        "filename": "decoder.onnx",
        "num_attention_heads": config.decoder_attention_heads,
        "num_key_value_heads": config.decoder_attention_heads,
        "num_hidden_layers": config.decoder_layers,
        "inputs": {
            "input_ids": "input_ids",
            **list_states(PAST_PREFIX, "past", "decoder"),
            **list_states(PAST_PREFIX, "cross_past", "encoder"),
        },
        "outputs": {"logits": "logits", **list_states(PRESENT_PREFIX, "present", "decoder")},
    }
    eos = _tokens(config, "eos_token_id")
    model = {
        "bos_token_id": _tokens(config, "bos_token_id") or 0,
        "context_length": config.max_target_positions,
        "decoder": decoder,
        "encoder": encoder,
        "eos_token_id": eos if eos is not None else 0,
        "pad_token_id": _first(_tokens(config, "pad_token_id"), eos, 0),
        "type": SPEECH,
        "vocab_size": config.vocab_size,
    }
    return _text(model)


DEFAULT_LENGTH: Final = 4096
"""Tokens at most, for a model whose configuration names no limit."""

SEARCH: Final[Mapping[str, Any]] = {
    "do_sample": False,
    "early_stopping": True,
    "length_penalty": 1.0,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "past_present_share_buffer": False,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 1,
    "top_p": 1.0,
}
"""Greedy, over a cache that grows."""


def genai_type(config: Any) -> str:
    """The family in the words of onnxruntime-genai's own builder: the class without its head, in small letters."""
    kind = config.get_text_config(decoder=True).model_type
    if kind.endswith("_text"):
        return kind
    classes = getattr(config, "architectures", None) or [f"{kind.replace('_', '')}ForCausalLM"]
    return classes[0].partition("For")[0].lower()


def _tokens(config: Any, key: str) -> int | list[int] | None:
    return getattr(config, key, None)


def _first(*values: int | Sequence[int] | None) -> int:
    found = next(value for value in values if value is not None)
    return found if isinstance(found, int) else found[0]
