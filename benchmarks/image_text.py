"""Text after an image in parts: a run of each family, and its tokens on onnxruntime against torch's `generate`.

    [GENAI_PYTHON=PYTHON] python -m benchmarks.image_text [--families "Gemma 3" SmolVLM …]

The models are small and random: two layers of 32 channels in tower and text. GENAI_PYTHON names the interpreter of an
environment that has onnxruntime-genai; without it that column stays empty. The table is in RESULTS.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from benchmarks.generation import by_genai
from benchmarks.parts_table import print_table, run_in_parts
from pipeline.export.parts.image_text import VisionPart
from pipeline.parts.chain import generate_after_image
from pipeline.runtime.tensors import to_numpy

TEXT: Final[dict[str, Any]] = {
    **{"vocab_size": 89, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False},
}
TOWER: Final[dict[str, Any]] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 16, "patch_size": 4},
}
WINDOWED: Final[dict[str, Any]] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Gemma 3": (
        "Gemma3ForConditionalGeneration",
        {
            **{"text_config": {**TEXT, **WINDOWED}, "vision_config": TOWER, "mm_tokens_per_image": 4},
            **{"image_token_index": 88, "boi_token_index": 86, "eoi_token_index": 87},
        },
    ),
    "SmolVLM": (
        "SmolVLMForConditionalGeneration",
        {
            **{"text_config": {**TEXT, "model_type": "llama"}, "vision_config": TOWER, "scale_factor": 2},
            **{"image_token_id": 88, "pad_token_id": 2},
        },
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                **{key: value for key, value in TEXT.items() if key != "head_dim"},
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
            },
            "vision_config": {
                **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32},
                **{"patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1]},
                **{"image_size": 32, "temporal_patch_size": 2},
            },
            **{"image_token_id": 88, "video_token_id": 87, "vision_start_token_id": 86, "vision_end_token_id": 85},
        },
    ),
    "LLaVA": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 32},
            "image_token_index": 88,
        },
    ),
}
"""Family → class of transformers, and a small configuration of it."""

SPREAD: Final = 0.15
"""Deviation of the matrices: with those of the classes, random models repeat one token."""


def make_model(family: str, seed: int = 2) -> Any:
    """A model of the family with random weights, in eval mode.

    What the table of tokens gives has a deviation of 1: a table that the model scales up would outweigh all layers,
    and the model would write its last token again and again.
    """
    name, settings = FAMILIES[family]
    cls: Any = getattr(transformers, name)
    model = cls(cls.config_class(**settings)).eval()
    table = 1.0 / float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                is_table = "embed_tokens" in name or "lm_head" in name
                parameter.normal_(0, table if is_table else SPREAD, generator=generator)
    return model


def configuration(folder: Path, **sections: Any) -> dict[str, Any]:
    """A configuration of a run in parts for a folder of `save_pretrained`."""
    return {
        "model": {"transformers": str(folder), "task": "image-text-to-text"},
        "passes": {"keep": ["qkv?"]},
        **sections,
    }


def main() -> None:
    columns = "family | nodes of vision, embedding and decoder | Q/K/V kept | run | chain | onnxruntime-genai"
    print_table(__doc__, FAMILIES, columns, row)


def row(family: str, folder: Path) -> Iterator[str]:
    """The cells of a family: what the run found, and how many tokens are torch's."""
    model = make_model(family)
    model.save_pretrained(folder / "source")
    result, structures, seconds = run_in_parts(configuration(folder / "source"), family, folder)
    yield ", ".join(f"{part.export.nodes} → {part.optimize.nodes}" for part in result.parts.values())
    yield structures
    yield seconds
    yield ", ".join(chain.sentence for chain in result.chain)
    genai = os.environ.get("GENAI_PYTHON")
    yield image_by_genai(genai, result.models, model, folder / "image.npz") if genai else ""


def image_by_genai(python: str, models: Path, model: Any, file: Path) -> str:
    """What onnxruntime-genai writes after a random image, as `by_genai`; `file` is for the image."""
    text, vision = generate_after_image(model, 7, 7), VisionPart(model)
    arrays: dict[str, Any] = {name: to_numpy(tensor) for name, tensor in vision.given.items()}
    arrays |= {**text.inputs, "num_image_tokens": np.array([len(vision.features)])}
    np.savez(file, **arrays)
    return by_genai(python, models, text.prompt, text.tokens, str(file))


if __name__ == "__main__":
    main()
