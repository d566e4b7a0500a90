"""A whole run of a decoder with TinyLlama's proportions from bf16 safetensors: time, and memory beside its weights.

    python -m benchmarks.large_decoder [--layers 22] [--vocabulary 32000] [--folder DIR] [--side onnxline]

2,048 channels, 32 heads over 4, 5,632 inside; the weights are random, with a seed. The run keeps Q, K and V, proves
every pass, and compares the tokens of its parts with torch's. The other side is the plain conversion: transformers'
class in float32 and torch.onnx.export. Memory is PSS of all processes of a side, sampled each 0.15 s.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.measure import machine, run_child, versions_line

INTERVAL_S: Final = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-large-decoder")
    parser.add_argument("--side", choices=("onnxline", "export"))
    chosen = parser.parse_args()
    model = chosen.folder / f"{chosen.layers}-{chosen.vocabulary}"
    if not (model / "config.json").exists():
        run_child(["-c", MAKE, str(chosen.layers), str(chosen.vocabulary), str(model)], memory=False)
    weights = 2 * (model / "model.safetensors").stat().st_size  # in float32
    print(f"{machine()}; {versions_line()}; weights in float32 {weights / 2**20:,.0f} MiB\n")
    print("| side | seconds | peak memory | of the weights |\n| --- | --- | --- | --- |")
    sides = {"onnxline": run_of(model, chosen.folder), "export": ["-c", EXPORT, str(model)]}
    for side, command in sides.items():
        if chosen.side not in (None, side):
            continue
        child = run_child(command, interval_s=INTERVAL_S)
        print(
            f"| {side} | {child.seconds:.0f} | {child.peak_bytes / 2**20:,.0f} MiB | {child.peak_bytes / weights:.2f} |"
        )
        print("\n".join(f"    {line}" for line in child.said.splitlines() if STAGES.intersection(line.split(":")[:1])))


STAGES: Final = frozenset(("source", "reference", "export", "passes", "runtime", "chain"))
"""The lines of a run that are shown."""


def run_of(model: Path, folder: Path) -> list[str]:
    config = folder / "large_decoder.yaml"
    config.write_text(
        f"""name: large_decoder
model: {{transformers: {model}, task: text-generation, cache: {{kind: dynamic}}}}
passes: {{keep: [qkv]}}
runtime: {{backends: [onnxruntime]}}
""",
        encoding="utf-8",
    )
    return ["-m", "onnxline", "run", str(config), "--out", str(folder / "run")]


MAKE: Final = """
import sys, torch, transformers
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
config = transformers.LlamaConfig(
    vocab_size=int(sys.argv[2]), hidden_size=2048, intermediate_size=5632, num_hidden_layers=int(sys.argv[1]),
    num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False,
    dtype=torch.bfloat16,
)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[3])
"""

EXPORT: Final = """
import sys, tempfile, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.config.use_cache = False
with tempfile.TemporaryDirectory() as folder:
    ids = torch.ones(2, 8, dtype=torch.long)
    torch.onnx.export(model, (ids,), f"{folder}/model.onnx", dynamo=True, external_data=True)
"""


if __name__ == "__main__":
    main()
