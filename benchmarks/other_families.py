"""Families of transformers that no line of the product names: a whole run of each, and its tokens against torch's.

    python -m benchmarks.other_families [--families StableLM "mBART" …]

Text, text after an encoder and text after an image, by the default recipe; the chain is 32 greedy tokens for each of
two prompts on onnxruntime and `plan`. The models are small and random. A family that is refused has its sentence in
the row. The table is in RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from benchmarks.encoder_decoder import BART
from benchmarks.generation import LENGTH, SMALL
from benchmarks.image_text import TEXT, TOWER
from benchmarks.parts_table import print_table, run_in_parts
from pipeline.config import ModelConfig
from pipeline.errors import OnnxlineError
from pipeline.parts.chain import TorchText, generate_after_encoder, generate_after_image, generate_by_torch

WRITE: Final = "text-generation"
ANSWER: Final = "text2text-generation"
SEE: Final = "image-text-to-text"

EARLIER: Final[dict[str, Any]] = {
    **{"vocab_size": 89, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1},
    "tie_word_embeddings": False,
}
LLAMA: Final[dict[str, Any]] = {**TEXT, "model_type": "llama"}
SIGLIP: Final[dict[str, Any]] = {**TOWER, "model_type": "siglip_vision_model"}
CLIP: Final[dict[str, Any]] = {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32}

FAMILIES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "StableLM": (WRITE, "StableLmForCausalLM", {**SMALL, "use_parallel_residual": True, "qk_layernorm": True}),
    "Cohere": (WRITE, "CohereForCausalLM", {**SMALL, "use_qk_norm": True}),
    "OLMo 2": (WRITE, "Olmo2ForCausalLM", SMALL),
    "Nemotron": (WRITE, "NemotronForCausalLM", {**SMALL, "head_dim": 8}),
    "Bloom": (WRITE, "BloomForCausalLM", EARLIER),
    "GPT-NeoX": (WRITE, "GPTNeoXForCausalLM", {**SMALL, "rotary_pct": 0.5}),
    "Gemma 2": (WRITE, "Gemma2ForCausalLM", {**SMALL, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "StarCoder 2": (WRITE, "Starcoder2ForCausalLM", {**SMALL, "sliding_window": 6}),
    "GLM": (WRITE, "GlmForCausalLM", {**SMALL, "head_dim": 8}),
    "HunYuan": (WRITE, "HunYuanDenseV1ForCausalLM", {**SMALL, "head_dim": 8}),
    "Persimmon": (WRITE, "PersimmonForCausalLM", SMALL),
    "RWKV": (WRITE, "RwkvForCausalLM", {**EARLIER, "num_hidden_layers": 2, "attention_hidden_size": 32}),
    "Pegasus": (ANSWER, "PegasusForConditionalGeneration", BART),
    "mBART": (ANSWER, "MBartForConditionalGeneration", BART),
    "Marian": (ANSWER, "MarianMTModel", BART),
    "PLBart": (ANSWER, "PLBartForConditionalGeneration", BART),
    "Blenderbot": (ANSWER, "BlenderbotForConditionalGeneration", BART),
    "LED": (
        ANSWER,
        "LEDForConditionalGeneration",
        {
            **BART,
            "attention_window": [4, 4],
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    "Pegasus-X": (ANSWER, "PegasusXForConditionalGeneration", {**BART, "block_size": 4, "num_global_tokens": 2}),
    "Idefics 3": (
        SEE,
        "Idefics3ForConditionalGeneration",
        {"text_config": LLAMA, "vision_config": TOWER, "scale_factor": 2, "image_token_id": 88, "pad_token_id": 2},
    ),
    "PaliGemma": (
        SEE,
        "PaliGemmaForConditionalGeneration",
        {
            **{"text_config": {**TEXT, "model_type": "gemma"}, "vision_config": {**SIGLIP, "projection_dim": 32}},
            **{"image_token_index": 88, "projection_dim": 32},
        },
    ),
    "LLaVA-NeXT": (
        SEE,
        "LlavaNextForConditionalGeneration",
        {
            **{"text_config": LLAMA, "vision_config": {**CLIP, "num_hidden_layers": 3}, "image_token_index": 88},
            "image_grid_pinpoints": [[16, 16]],
        },
    ),
    "Qwen2-VL": (
        SEE,
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {
                **{key: value for key, value in TEXT.items() if key != "head_dim"},
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
            },
            "vision_config": {
                **{"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4},
                **{"spatial_merge_size": 2, "temporal_patch_size": 2, "image_size": 32},
            },
            **{"image_token_id": 88, "video_token_id": 87, "vision_start_token_id": 86, "vision_end_token_id": 85},
        },
    ),
    "Mistral 3": (
        SEE,
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 8, "image_size": 16},
            **{"image_token_index": 88, "spatial_merge_size": 2, "vision_feature_layer": -1},
        },
    ),
    "InternVL": (
        SEE,
        "InternVLForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
            **{"image_token_id": 88, "image_seq_length": 4, "downsample_ratio": 0.5},
        },
    ),
    "Aya Vision": (
        SEE,
        "AyaVisionForConditionalGeneration",
        {
            **{"text_config": {**TEXT, "model_type": "cohere2"}, "vision_config": SIGLIP, "image_token_index": 88},
            **{"downsample_factor": 2, "adapter_layer_norm_eps": 1e-6, "alignment_intermediate_size": 64},
        },
    ),
}
"""Family → its task, class of transformers, and a small configuration of it."""

SPREADS: Final = {WRITE: 0.15, ANSWER: 0.1, SEE: 0.5}
"""Deviation of the matrices of a task: with those of the classes, random models repeat one token."""


def make_model(family: str, seed: int = 2) -> Any:
    """A model of the family with random weights, in eval mode; tables of tokens have a deviation of 1."""
    task, name, settings = FAMILIES[family]
    cls: Any = getattr(transformers, name)
    model = cls(cls.config_class(**settings)).eval()
    tables = {id(table.weight) for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table}
    scale = 1.0 / float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:  # tables of positions may be no weights
                spread = scale if id(parameter) in tables else SPREADS[task]
                parameter.normal_(0, spread, generator=generator)
    return model


def text_of(model: Any, task: str, settings: dict[str, Any]) -> TorchText:
    """A text by torch, which shows how many different tokens there are."""
    if task == SEE:
        return generate_after_image(model, 7, 7)
    if task == ANSWER:
        return generate_after_encoder(model, ModelConfig.model_validate(settings["model"]), LENGTH, 1)
    return generate_by_torch(model, LENGTH, 1)


def main() -> None:
    print_table(__doc__, FAMILIES, "family | task | nodes | Q/K/V kept | run | chain | different tokens", row)


def row(family: str, folder: Path) -> Iterator[str]:
    """The cells of a family: what the run found, or the sentence by which it was refused."""
    task = FAMILIES[family][0]
    yield task
    model = make_model(family)
    model.save_pretrained(folder / "source")
    settings: dict[str, Any] = {
        "model": {"transformers": str(folder / "source"), "task": task},
        "passes": {"keep": ["qkv?"]},
        "runtime": {"backends": ["onnxruntime", "plan"]},
    }
    try:
        result, structures, seconds = run_in_parts(settings, family, folder)
    except OnnxlineError as error:
        yield f"exit code {error.exit_code}: {' '.join(str(error).split())}"
        return
    yield ", ".join(f"{part.export.nodes} → {part.optimize.nodes}" for part in result.parts.values())
    yield structures
    yield seconds
    yield ", ".join(f"{chain.backend} {chain.result}" for chain in result.chain)
    yield str(len({*text_of(model, task, settings).tokens}))


if __name__ == "__main__":
    main()
