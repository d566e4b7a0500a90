"""Weights of a Llama of 7 B from bf16 safetensors in int4 blocks of 32, shard by shard: time and memory of the jobs.

    python -m benchmarks.quant_shards [--layers 2] [--data] [--folder DIR]

The weights are random, of the sizes of Llama 2 7 B, in as many layers as fit the disk. What 7 B and 70 B would take
follows from the time of the jobs for each GiB, or with `--data`, where GPTQ rounds weights on 8 × 128 random tokens,
from the time for each layer. The files are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from benchmarks.measure import machine, versions_line
from pipeline.config import RunConfig
from pipeline.quantsim import QuantSim
from pipeline.quantsim.shards import FOLDER, TABLE

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "use_cache": False,
    "dtype": "bfloat16",
}

SHARD_MIB: Final = 256

LAYER_MIB: Final = 512
"""Of the weights of a piece: a layer has 386 MiB of bfloat16."""

TOKENS: Final = 128
SAMPLES: Final = 8
HELD_OUT: Final = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--data", action="store_true")
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=chosen.folder))
    try:
        # Each in a process of its own: a child begins with the peak of the process that it comes from.
        for work, arguments in ((store, ()), (measure, (chosen.data,))):
            process = multiprocessing.get_context("spawn").Process(
                target=work, args=(folder, chosen.layers, *arguments)
            )
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)
    finally:
        shutil.rmtree(folder)


def store(folder: Path, layers: int) -> None:
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers)
    module: Any = transformers.LlamaForCausalLM(config)
    module.save_pretrained(folder / "llama", max_shard_size="1GB")


def measure(folder: Path, layers: int, with_data: bool) -> None:
    settings = {**SIZES, "num_hidden_layers": layers}
    stored = sum(file.stat().st_size for file in (folder / "llama").glob("*.safetensors"))
    section = {"class": "LlamaForCausalLM", "config": settings, "checkpoint": "llama"}
    data: dict[str, Any] = {
        "name": "llama",
        "model": {
            "transformers": section,
            "inputs": {"input_ids": {"shape": [1, TOKENS], "dtype": "int64", "range": [0, 512]}},
        },
        "export": {"weights": "referenced"},
        "verify": {"proof": "structure"},
        "passes": {"recipe": []},
        "quantsim": {
            "profile": "weight-only",
            "rules": {"op:*": {"weights": "int4/block32"}},
            "shard_mib": SHARD_MIB,
            "shard_jobs": 1,
        },
    }
    if with_data:
        draw = np.random.default_rng(0)
        for number in range(SAMPLES + HELD_OUT):
            np.savez(folder / f"sample{number:02}.npz", input_ids=draw.integers(0, SIZES["vocab_size"], (1, TOKENS)))
        data["quantsim"] |= {"optimize": ["gptq"], "shard_mib": LAYER_MIB, "evaluation": HELD_OUT}
        data["quantsim"]["calibration"] = {"data": "sample*.npz", "samples": SAMPLES}
    begun = time.perf_counter()
    QuantSim(RunConfig.from_mapping(data, folder), folder / "run", progress=False).run()
    seconds = time.perf_counter() - begun
    table = folder / "run" / FOLDER / TABLE
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    outcomes = [row.get("outcome", row) for row in rows if "seconds" in row.get("outcome", row)]
    jobs = sum(outcome["seconds"] for outcome in outcomes)
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{machine()}; {versions_line()}\n")
    processor = used.ru_utime + used.ru_stime
    print(f"{layers} layers, {stored / 2**30:.2f} GiB of bf16, {len(outcomes)} jobs")
    for row in rows:
        outcome = row.get("outcome", row)
        kind = "piece" if "folder" in outcome["value"] else "gptq" if "layers" in outcome["value"] else "nearest"
        print(f"  {kind} {outcome['seconds']:.1f} s {', '.join(outcome['value'].get('layers', ()))}")
    print(f"run {seconds:.0f} s, jobs {jobs:.0f} s: {jobs / (stored / 2**30):.0f} s for each GiB")
    print(f"children: {processor:.0f} s of processor time, the largest had {most:.2f} GiB with the files that it maps")


if __name__ == "__main__":
    main()
