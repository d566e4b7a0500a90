"""Decode over a cache of fixed length: onnxruntime with IOBinding and `plan`, turn by turn in one process.

    python -m benchmarks.generation_speed [--layers 4] [--hidden 512] [--vocabulary 8000] [--length 256] [--threads 1]

A random model with the proportions of TinyLlama: four heads of the query for each head of the cache, heads of 64. The
parts are exported, and go through `[onnxscript, default]`. With one thread the times are those of the processor too, so
that other processes on the machine change them little. The figures are in RESULTS.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import passes
from benchmarks.measure import machine, versions_line
from pipeline.config import ExportConfig, ModelConfig, RuntimeConfig
from pipeline.export import export_onnx
from pipeline.export.parts import make_part
from pipeline.export.transformers_class import LoadedModel
from pipeline.parts.generate import continue_text, take_largest
from pipeline.parts.sessions import BoundStates, PlannedStates, TextParts, TextReader

TOKENS, PROMPT = 24, 39


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    sizes = {"layers": 4, "hidden": 512, "vocabulary": 8000, "length": 256, "threads": 1, "rounds": 7}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{machine()}; {versions_line()}; {vars(chosen)}\n")
    with tempfile.TemporaryDirectory() as folder:
        write_parts(Path(folder), make_model(chosen), chosen.length)
        measure(TextParts.of(Path(folder)), chosen.threads, chosen.rounds)


def make_model(sizes: argparse.Namespace) -> Any:
    """A Llama of these sizes with random weights, in eval mode."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 11 // 4,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 64,
        num_key_value_heads=max(1, sizes.hidden // 256),
        max_position_embeddings=2 * sizes.length,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


def write_parts(folder: Path, model: Any, length: int) -> None:
    """Export prefill and decode over a cache of `length` tokens, and optimize them."""
    cache = {"kind": "static", "length": length, "chunk": 32}
    settings = {"transformers": {"class": "LlamaForCausalLM"}, "task": "text-generation", "cache": cache}
    for part in ("prefill", "decode"):
        config = ModelConfig.model_validate({**settings, "part": part, "logits": "last"})
        source = make_part(config, LoadedModel(model, (), "random", None))
        export_onnx(source, ExportConfig(), folder / f"{part}.raw.onnx")
        found = passes.optimize(folder / f"{part}.raw.onnx", recipe=["onnxscript", "default"])
        found.save(folder / f"{part}.onnx")


def measure(parts: TextParts, threads: int, rounds: int) -> None:
    """Print milliseconds for a token, and tokens per second next to onnxruntime's."""
    sides: Mapping[str, Callable[[], Any]] = {
        "onnxruntime, IOBinding": lambda: BoundStates(parts, threads),
        "plan": lambda: PlannedStates(parts, RuntimeConfig()),
        "plan, fusions: all": lambda: PlannedStates(parts, RuntimeConfig(fusions="all")),
        "plan, fusions: all, native": lambda: PlannedStates(parts, RuntimeConfig(fusions="all", native=True)),
    }
    readers = {name: TextReader(parts, make()) for name, make in sides.items()}
    clock = time.process_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in readers}
    texts: dict[str, list[int]] = {}
    for _ in range(rounds):
        for name, reader in readers.items():
            tokens = continue_text(reader, range(1, PROMPT + 1), TOKENS + 1, take_largest)
            texts[name] = [next(tokens)]  # the prompt and its token come before
            begun = clock()
            texts[name] += tokens
            times[name].append((clock() - begun) / TOKENS)
    first = next(iter(readers))
    print("| | ms for a token: least, median | tokens per second / onnxruntime's: least, median | same tokens |")
    print("| --- | --- | --- | --- |")
    for name, seconds in times.items():
        found = [(find(seconds), find(times[first])) for find in (min, statistics.median)]
        milliseconds = ", ".join(f"{own * 1e3:.2f}" for own, _ in found)
        ratios = ", ".join(f"{other / own:.2f}" for own, other in found)
        print(f"| {name} | {milliseconds} | {ratios} | {texts[name] == texts[first]} |")


if __name__ == "__main__":
    main()
