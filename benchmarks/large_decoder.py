"""A whole run of a decoder with TinyLlama's proportions from bf16 safetensors: time, and memory in addition to its
weights.

    python -m benchmarks.large_decoder [--layers 22] [--vocabulary 32000] [--folder DIR] [--peers PYTHON] [--side SIDE]

2,048 channels, 32 heads over 4, 5,632 inside; the weights are random, with a seed. The run keeps Q, K and V, proves
every pass, and compares the tokens of its parts with torch's. The other sides are plain conversions: transformers'
class in float32 and torch.onnx.export, and with `--peers`, the interpreter of an environment that has olive-ai and
optimum-onnx, the commands of these two. Olive takes torch's exporter with dynamo, since its default, that with
TorchScript, gives the cache as a list, which transformers 4.57 refuses.
Memory is PSS of all processes of a side, sampled each 0.15 s.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Final

import onnx

from benchmarks.measure import machine, run_child, versions_line

INTERVAL_S: Final = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-large-decoder")
    parser.add_argument("--peers", default="", metavar="PYTHON", help="that has olive-ai and optimum-onnx")
    parser.add_argument("--side", choices=("onnxline", "export", "olive", "optimum"))
    chosen = parser.parse_args()
    model = chosen.folder / f"{chosen.layers}-{chosen.vocabulary}"
    if not (model / "config.json").exists():
        run_child(["-c", MAKE, str(chosen.layers), str(chosen.vocabulary), str(model)], memory=False)
    weights = 2 * (model / "model.safetensors").stat().st_size  # in float32
    print(f"{machine()}; {versions_line()}; weights in float32 {weights / 2**20:,.0f} MiB\n")
    print(f"| side | seconds | of a processor | peak memory | of the weights | nodes |\n|{' --- |' * 6}")
    for side, (python, command, written) in sides_of(model, chosen.folder, chosen.peers).items():
        if chosen.side not in (None, side):
            continue
        child = run_child(command, interval_s=INTERVAL_S, python=python)
        nodes = len(onnx.load(written, load_external_data=False).graph.node)
        memory = f"{child.peak_bytes / 2**20:,.0f} MiB | {child.peak_bytes / weights:.2f}"
        print(f"| {side} | {child.seconds:.0f} | {child.processor_seconds:.0f} | {memory} | {nodes:,} |", flush=True)
        print("\n".join(f"    {line}" for line in child.said.splitlines() if STAGES.intersection(line.split(":")[:1])))


def sides_of(model: Path, folder: Path, peers: str) -> dict[str, tuple[str, list[str], Path]]:
    """Side → its interpreter, what that is asked, and the model that it writes.

    Args:
        model: the folder of the checkpoint.
        folder: for what the sides write.
        peers: the interpreter that has Olive and optimum; empty where there is none.
    """
    sides = {
        "onnxline": (sys.executable, run_of(model, folder), folder / "run" / "models" / "decoder.onnx"),
        "export": (sys.executable, ["-c", EXPORT, str(model), str(folder)], folder / "export.onnx"),
    }
    if not peers:
        return sides
    olive, optimum = folder / "olive", folder / "optimum"
    asked = ["-m", str(model), "--torch_dtype", "float32", "--use_dynamo_exporter", "-o", str(olive)]
    command = ["-c", OLIVE, str(folder), "capture-onnx-graph", *asked, "--disable_telemetry"]
    task = ["--task", "text-generation-with-past", "--dtype", "fp32"]
    return sides | {
        "olive": (peers, command, olive / "model.onnx"),
        "optimum": (
            peers,
            ["-m", "optimum.commands.optimum_cli", "export", "onnx", *task, "-m", str(model), str(optimum)],
            optimum / "model.onnx",
        ),
    }


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
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.config.use_cache = False
ids = torch.ones(2, 8, dtype=torch.long)
torch.onnx.export(model, (ids,), f"{sys.argv[2]}/export.onnx", dynamo=True, external_data=True)
"""

OLIVE: Final = """
import os, shutil, sys
os.chdir(sys.argv.pop(1))
shutil.rmtree(".olive-cache", ignore_errors=True)  # it holds what an earlier call has written
from olive.cli.launcher import main
main(sys.argv[1:])
"""


if __name__ == "__main__":
    main()
