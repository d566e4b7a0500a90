"""Text of twelve families by their parts: a run of each, and its tokens on onnxruntime, `plan` and onnxruntime-genai.

    python -m benchmarks.generation [--genai PYTHON] [--families Llama Qwen3 …] [--backends onnxruntime plan] [--static]

The models are small and random: two layers of 32 channels. `--genai` names the interpreter of an environment that has
onnxruntime-genai; without it that column stays empty. The table is in RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers

from benchmarks.measure import machine, versions_line
from pipeline import Pipeline, RunConfig
from pipeline.parts import PartsResult, TextGenerator
from pipeline.parts.chain import generate_by_torch

SMALL: Final[dict[str, Any]] = {
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
MIXTURE: Final[dict[str, Any]] = {**SMALL, "num_experts_per_tok": 2}
MAMBA: Final[dict[str, Any]] = {
    **{"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_head": 8, "mamba_chunk_size": 8}
}
LATENT: Final[dict[str, Any]] = {
    **{"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
}
WINDOWED: Final[dict[str, Any]] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Llama": ("LlamaForCausalLM", SMALL),
    "Qwen3": ("Qwen3ForCausalLM", {**SMALL, "head_dim": 16}),
    "Gemma 3": ("Gemma3ForCausalLM", {**SMALL, **WINDOWED, "head_dim": 8}),
    "Phi-4": ("Phi3ForCausalLM", SMALL),
    "Mistral": ("MistralForCausalLM", {**SMALL, "sliding_window": 6}),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        {
            **{**MIXTURE, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 16},
            **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        },
    ),
    "gpt-oss": ("GptOssForCausalLM", {**MIXTURE, **WINDOWED, "head_dim": 8, "num_local_experts": 4}),
    "SmolLM3": ("SmolLM3ForCausalLM", {**SMALL, "no_rope_layers": [1, 0]}),
    "Granite hybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **{**MIXTURE, **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4},
            **{"shared_intermediate_size": 32, "mamba_expand": 2},
        },
    ),
    "Falcon-H1": ("FalconH1ForCausalLM", {**SMALL, **MAMBA, "mamba_d_ssm": 64}),
    "Mamba-2": (
        "Mamba2ForCausalLM",
        {
            **{"vocab_size": 89, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8},
            **{"state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
            **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
        },
    ),
    "OLMoE": ("OlmoeForCausalLM", {**MIXTURE, "num_experts": 4}),
}
"""Family → class of transformers, and a small configuration of it."""

SPREAD: Final = 5.0
EMBEDDING_SPREAD: Final = 50.0
"""Factors on matrices and on embeddings: with those of the classes, random models repeat one token."""

LENGTH: Final = 5
COUNT: Final = 32


def make_model(family: str, seed: int = 0) -> Any:
    """A model of the family with random weights, in eval mode."""
    name, settings = FAMILIES[family]
    cls: Any = getattr(transformers, name)
    torch.manual_seed(seed)
    model = cls(cls.config_class(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(EMBEDDING_SPREAD if "embed" in name else SPREAD)
    return model


def configuration(
    folder: Path, *, cache: Mapping[str, Any] = MappingProxyType({"kind": "dynamic"}), **sections: Any
) -> dict[str, Any]:
    """A configuration of a run in parts for a folder of `save_pretrained`."""
    model = {"transformers": str(folder), "task": "text-generation", "cache": dict(cache)}
    return {"model": model, "passes": {"keep": ["qkv?"]}, **sections}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--genai", metavar="PYTHON", default=os.environ.get("GENAI_PYTHON", ""), help="or $GENAI_PYTHON"
    )
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--backends", nargs="+", default=["onnxruntime", "plan"])
    parser.add_argument("--static", action="store_true", help="prefill and decode over a cache of 48 tokens")
    chosen = parser.parse_args()
    cache: dict[str, Any] = {"kind": "static", "length": 48, "chunk": 8} if chosen.static else {"kind": "dynamic"}
    print(f"{machine()}; {versions_line()}\n")
    columns = [*chosen.backends, "onnxruntime-genai"]
    print(f"| family | states | nodes | Q/K/V kept | run | {' | '.join(columns)} |")
    print(f"| --- | --- | --- | --- | --- | {' | '.join('---' for _ in columns)} |")
    for family in chosen.families:
        with tempfile.TemporaryDirectory() as place:
            print(
                f"| {family} | {' | '.join(row(family, Path(place), chosen.backends, chosen.genai, cache))} |",
                flush=True,
            )


def row(family: str, folder: Path, backends: Sequence[str], genai: str, cache: Mapping[str, Any]) -> Iterator[str]:
    """The cells of a family: what the run found, and how many tokens are torch's on each backend."""
    model = make_model(family)
    model.save_pretrained(folder / "source")
    begun = time.perf_counter()
    try:
        config = RunConfig.from_mapping(configuration(folder / "source", cache=cache), title=family)
        result = Pipeline(config, folder / "run").run()
    except Exception as error:
        yield from ["", "", "", f"{time.perf_counter() - begun:.0f} s", " ".join(str(error).split())[:200]]
        return
    assert isinstance(result, PartsResult)
    inputs = [name for name in result.export.inputs if name.startswith("past_key_values")]
    yield str(len(inputs))
    yield ", ".join(f"{part.export.nodes} → {part.optimize.nodes}" for part in result.parts.values())
    kept = sum(verdict.kept for verdict in result.structures)
    yield f"{kept} of {len(result.structures)}" if result.structures else "none in the source"
    yield f"{time.perf_counter() - begun:.0f} s"
    text = generate_by_torch(model, LENGTH, 1)
    for backend in backends:
        begun = time.perf_counter()
        found = TextGenerator(result.folder, backend).generate(text.prompt, max_new_tokens=COUNT, stop=())
        yield f"{count_equal(found.tokens, text.tokens)} of {COUNT}, {found.tokens_per_second:.0f}/s"
    yield by_genai(genai, result.models, text.prompt, text.tokens) if genai else ""


def by_genai(python: str, models: Path, prompt: Sequence[int], expected: Sequence[int], inputs: str = "") -> str:
    """The tokens of onnxruntime-genai from a folder of models, or the error with which it refuses the folder.

    Args:
        inputs: a file .npz with what comes before the text, such as an image, if there is one.
    """
    unused = next(token for token in range(len(expected) + 1) if token not in expected)
    asked = {"models": str(models), "prompt": list(prompt), "count": len(expected), "eos": unused}
    asked |= {"inputs": inputs} if inputs else {}
    done = subprocess.run([python, str(SCRIPT), json.dumps(asked)], capture_output=True, text=True, timeout=120)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:160]
    said = json.loads(done.stdout.splitlines()[-1])
    return f"{count_equal(said['tokens'], expected)} of {len(expected)}"


SCRIPT: Final = Path(__file__).with_name("generate_by_genai.py")


def count_equal(found: Sequence[int], expected: Sequence[int]) -> int:
    """The tokens before the first that differs."""
    pairs = zip(found, expected, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(found), len(expected)))


if __name__ == "__main__":
    main()
