"""Extraction of an IR against bare torch.export, and the 1 T-parameter model against pytorch-ir, side by side.

    python -m benchmarks.ir_extraction overhead           BERT-base on meta, and a model whose buffers are written
    python -m benchmarks.ir_extraction kimi               both graphs of text-only Kimi-K2.5 (61 layers), in a process
    python -m benchmarks.ir_extraction kimi --peer PATH   pytorch-ir too; PATH is the folder that holds its package
    python -m benchmarks.ir_extraction load               the time to load what `kimi` wrote, and pytorch-ir's

Times are wall seconds, medians where something is repeated; memory is the largest resident set of the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "runs" / "benchmarks" / "kimi"
PEER_OUT = ROOT / "runs" / "benchmarks" / "kimi_peer"


def overhead(repeats: int) -> None:
    """`extract_ir` against `torch.export.export`, and with functionalization against `run_decompositions({})`."""
    import torch
    from transformers import BertConfig, BertModel

    from pipeline.torch_ir import extract_ir

    class Written(torch.nn.Module):
        """A cache that is written by slices, twelve layers deep."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(12)])
            self.register_buffer("cache", torch.zeros(12, 8, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                self.cache[index] = layer(x)
                x = x + self.cache[index].relu()
            return x

    with torch.device("meta"):
        bert, written = BertModel(BertConfig()).eval(), Written()
    ids = torch.ones(1, 128, dtype=torch.long, device="meta")
    wide = torch.ones(8, 64, device="meta")

    def export(model: torch.nn.Module, tensor: torch.Tensor) -> torch.export.ExportedProgram:
        return torch.export.export(model, (tensor,), strict=False)

    rows = [
        ("no op writes", lambda: export(bert, ids), lambda: extract_ir(bert, (ids,))),
        ("functionalized", lambda: export(written, wide).run_decompositions({}), lambda: extract_ir(written, (wide,))),
    ]
    for name, bare, ours in rows:
        bare_seconds, our_seconds = interleaved(bare, ours, repeats)
        print(f"{name}: torch {bare_seconds:.3f} s, extract_ir {our_seconds:.3f} s, {our_seconds / bare_seconds:.3f} ×")


def interleaved(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float]:
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for seconds, run in zip(found, (first, second), strict=True):
            gc.collect()
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return statistics.median(found[0][1:]), statistics.median(found[1][1:])  # the first of each warms up


def kimi(layers: int | None, peer: Path | None) -> None:
    """The example as a user runs it, in a fresh process; then pytorch-ir on the same wrappers."""
    command = [sys.executable, "examples/extract_kimi_k25_text_ir.py", "--output-dir", str(OUT)]
    command += [] if layers is None else ["--layers", str(layers)]
    measured("onnxline", command, ROOT)
    if peer is not None:
        script = [sys.executable, "-m", "benchmarks.ir_extraction", "peer", *command[4:]]
        measured("pytorch-ir", script, ROOT, str(peer))
    for path in sorted((*OUT.glob("*.json*"), *PEER_OUT.glob("*.json"))):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB")


def measured(name: str, command: Sequence[str], folder: Path, *beside: str) -> None:
    paths = [str(ROOT), str(ROOT / "examples"), *beside]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    print(f"{name}: {seconds:.1f} s, {usage.ru_maxrss / 1024:.0f} MiB, status {os.waitstatus_to_exitcode(status)}")


def peer(layers: int | None) -> None:
    """What the example does, with pytorch-ir in the place of onnxline's `extract_ir`."""
    import torch
    from torch_ir import extract_ir  # pyright: ignore[reportMissingImports]

    from kimi_k25_text_local import KimiK25TextForCausalLM, KimiTextConfig
    from pipeline.export.parts.pair import CacheSizes, CacheSpec, Decode, Prefill, decode_inputs, prefill_inputs

    config = KimiTextConfig.from_json(ROOT / "examples" / "kimi_k25_text_local" / "config.json")
    if layers is not None:
        config = replace(config, num_hidden_layers=layers)
    model, sizes = KimiK25TextForCausalLM(config), CacheSizes(128, 2048)
    PEER_OUT.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        first = extract_ir(Prefill(model), prefill_inputs(sizes), model_name="KimiK25_Text_Prefill")
        caches = [CacheSpec.of(one.shape, getattr(torch, one.dtype)) for one in first.graph_outputs[1:]]
        second = extract_ir(Decode(model), decode_inputs(caches, sizes), model_name="KimiK25_Text_Decode")
    for ir, stage in ((first, "prefill"), (second, "decode")):
        # Its own `save` does not take the dtype in `softmax(dtype=)`; this is its format with that written as text.
        with (PEER_OUT / f"kimi_k25_text_{stage}_ir.json").open("w") as file:
            json.dump(ir.to_dict(), file, indent=2, default=str)


def load(repeats: int) -> None:
    """Loading the files: ours alone, with its Graph, with its nodes; pytorch-ir's with its nodes, its only form."""
    from pipeline.torch_ir import load_ir

    name = "kimi_k25_text_decode_ir.json"
    rows: list[tuple[str, Callable[[], object]]] = [
        ("onnxline load_ir", lambda: load_ir(OUT / name)),
        ("onnxline load_ir, .graph", lambda: load_ir(OUT / name).graph),
        ("onnxline load_ir, .nodes", lambda: load_ir(OUT / name).nodes),
    ]
    if (PEER_OUT / name).exists():
        from torch_ir import load_ir as peer_load  # pyright: ignore[reportMissingImports]

        rows.append(("pytorch-ir load_ir", lambda: peer_load(str(PEER_OUT / name))))
    for what, run in rows:
        seconds = []
        for _ in range(repeats):
            gc.collect()
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        print(f"{what}: {statistics.median(seconds):.3f} s")
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", choices=["overhead", "kimi", "peer", "load"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--peer", type=Path)
    given = parser.parse_args()
    if given.what == "overhead":
        overhead(given.repeats)
    elif given.what == "kimi":
        kimi(given.layers, given.peer)
    elif given.what == "peer":
        peer(given.layers)
    else:
        load(given.repeats)


if __name__ == "__main__":
    main()
