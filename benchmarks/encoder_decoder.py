"""Text of an encoder and a decoder in parts: a run of each family, and its tokens on onnxruntime and `plan`.

    python -m benchmarks.encoder_decoder [--families T5 BART …]

The models are small and random: two layers of 32 channels. The table is in RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from benchmarks.generation import count_equal
from benchmarks.parts_table import print_table, run_in_parts
from pipeline.config import ModelConfig
from pipeline.parts import TextGenerator
from pipeline.parts.chain import generate_after_encoder

TEXT: Final = "text2text-generation"
SPEECH: Final = "automatic-speech-recognition"

T5: Final[dict[str, Any]] = {
    **{"vocab_size": 89, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0, "tie_word_embeddings": False},
}
BART: Final[dict[str, Any]] = {
    **{"vocab_size": 89, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 0},
}
WHISPER: Final[dict[str, Any]] = {
    **BART,
    **{"decoder_layers": 3, "max_source_positions": 20, "max_target_positions": 64, "num_mel_bins": 8},
    **{"decoder_start_token_id": 3, "bos_token_id": 1, "eos_token_id": 2},
}

FAMILIES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "T5": (TEXT, "T5ForConditionalGeneration", T5),
    "mT5": (TEXT, "MT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "BART": (TEXT, "BartForConditionalGeneration", BART),
    "Marian": (TEXT, "MarianMTModel", BART),
    "Whisper": (SPEECH, "WhisperForConditionalGeneration", WHISPER),
}
"""Family → its task, class of transformers, and a small configuration of it. Whisper has more layers in its decoder."""


def make_model(family: str, seed: int = 2) -> Any:
    """A model of the family with random weights, in eval mode, whose texts do not repeat one token."""
    _, name, settings = FAMILIES[family]
    cls: Any = getattr(transformers, name)
    model = cls(cls.config_class(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    spread = OF_RELATIVE_POSITIONS if "d_kv" in settings else OF_POSITIONS
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and parameter.requires_grad:  # tables of positions may be no weights
                is_table = any(word in name for word in ("embed", "shared", "lm_head"))
                parameter.normal_(0, 1.0 if is_table else spread, generator=generator)
    return model


OF_POSITIONS: Final = 0.1
OF_RELATIVE_POSITIONS: Final = 1.0
"""Deviations of the matrices: with those of the classes, random models repeat one token."""


def configuration(family: str, folder: Path, **sections: Any) -> dict[str, Any]:
    """A configuration of a run in parts for a folder of `save_pretrained`."""
    model = {"transformers": str(folder), "task": FAMILIES[family][0]}
    return {"model": model, "passes": {"keep": ["qkv?"]}, **sections}


def main() -> None:
    print_table(
        __doc__,
        FAMILIES,
        "family | states | nodes of encoder and decoder | Q/K/V kept | run | chain | onnxruntime | plan",
        row,
    )


def row(family: str, folder: Path) -> Iterator[str]:
    """The cells of a family: what the run found, and how many tokens are torch's on each backend."""
    model = make_model(family)
    model.save_pretrained(folder / "source")
    settings = configuration(family, folder / "source")
    result, structures, seconds = run_in_parts(settings, family, folder)
    inputs = [name for name in result.parts["decoder"].export.inputs if name.startswith("past_key_values")]
    yield str(len(inputs))
    yield ", ".join(f"{part.export.nodes} → {part.optimize.nodes}" for part in result.parts.values())
    yield structures
    yield seconds
    yield ", ".join(chain.result for chain in result.chain)
    text = generate_after_encoder(model, ModelConfig.model_validate(settings["model"]), 5, 1)
    for backend in ("onnxruntime", "plan"):
        count = len(text.tokens)
        found = TextGenerator(result.folder, backend).generate(inputs=text.inputs, max_new_tokens=count, stop=())
        yield f"{count_equal(found.tokens, text.tokens)} of {count}, {found.tokens_per_second:.0f}/s"


if __name__ == "__main__":
    main()
