"""How the pass stage grows with the depth of a model: tiny pre-norm transformer layers.

    python -m benchmarks.growth [--layers 12 24 48 96 192 384] [--recipe default] [--markdown FILE]

Each size is a process of its own that makes the model (hidden size 16, two heads, about 40 nodes a layer) and calls
`passes.optimize(model, recipe, keep=["qkv"])` once. Seconds are of the processor, by process, so that a busy machine
does not blur them: `ours` is the main process, which is Python of ours alone; `passes` is the worker that runs
onnxoptimizer and onnxsim; `proof` is the one that runs onnxruntime. The last column is their sum over n log n, against
the first row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.measure import machine, run_child, versions_line

WIDTH: Final = 16

LAYER: Final = """
    n{i} = LayerNormalization <axis = -1> (x{i}, scale{i}, shift{i})
    {projections}
    split{i} = Constant <value_ints = [1, -1, 2, 8]> ()
    qr{i} = Reshape (q{i}, split{i})
    kr{i} = Reshape (k{i}, split{i})
    vr{i} = Reshape (v{i}, split{i})
    qt{i} = Transpose <perm = [0, 2, 1, 3]> (qr{i})
    kh{i} = Transpose <perm = [0, 2, 1, 3]> (kr{i})
    kt{i} = Transpose <perm = [0, 1, 3, 2]> (kh{i})
    vt{i} = Transpose <perm = [0, 2, 1, 3]> (vr{i})
    root{i} = Constant <value = float {{0.35355339}}> ()
    s{i} = MatMul (qt{i}, kt{i})
    m{i} = Mul (s{i}, root{i})
    p{i} = Softmax <axis = -1> (m{i})
    mixed{i} = MatMul (p{i}, vt{i})
    mt{i} = Transpose <perm = [0, 2, 1, 3]> (mixed{i})
    join{i} = Constant <value_ints = [1, -1, 16]> ()
    o{i} = Reshape (mt{i}, join{i})
    {out}
    a{i} = Add (x{i}, r{i})
    nn{i} = LayerNormalization <axis = -1> (a{i}, scale{i}, shift{i})
    {up}
    g{i} = Gelu (u{i})
    {down}
    x{n} = Add (a{i}, d{i})
"""


def layers(count: int) -> onnx.ModelProto:
    """The model, with seeded weights."""
    generator = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {}

    def linear(read: str, made: str, rows: int = WIDTH, columns: int = WIDTH) -> str:
        weights[f"w{made}"] = generator.standard_normal((columns, rows), np.float32) / 4
        weights[f"b{made}"] = generator.standard_normal(columns, np.float32)
        return f"""t{made} = Transpose <perm = [1, 0]> (w{made})
            m{made} = MatMul ({read}, t{made}) {made} = Add (m{made}, b{made})"""

    body = []
    for i in range(count):
        weights |= {f"scale{i}": np.ones(WIDTH, np.float32), f"shift{i}": np.zeros(WIDTH, np.float32)}
        parts = {
            "projections": "\n".join(linear(f"n{i}", f"{role}{i}") for role in "qkv"),
            "out": linear(f"o{i}", f"r{i}"),
            "up": linear(f"nn{i}", f"u{i}", WIDTH, 2 * WIDTH),
            "down": linear(f"g{i}", f"d{i}", 2 * WIDTH, WIDTH),
        }
        body.append(LAYER.format(i=i, n=i + 1, **parts))
    text = f"g (float[1, seq, {WIDTH}] x0) => (float[1, seq, {WIDTH}] y) {{ {''.join(body)} y = Identity (x{count}) }}"
    graph = onnx.parser.parse_graph(text)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96, 192, 384])
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--markdown", type=Path, default=Path("runs/benchmarks/growth.md"))
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    recipe = options.recipe.split(",")
    if options.child:
        print(json.dumps(_measure(options.child, recipe)))
        return
    rows = []
    for count in options.layers:
        arguments = ["-m", "benchmarks.growth", "--child", str(count), "--recipe", options.recipe]
        rows.append(json.loads(run_child(arguments, memory=False).said.strip().splitlines()[-1]))
        print(rows[-1], flush=True)
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text(_markdown(rows, options.recipe), encoding="utf-8")
    print(_markdown(rows, options.recipe))


def _measure(count: int, recipe: Sequence[str]) -> dict[str, Any]:
    import passes
    from passes.context import open_context

    model = layers(count)
    with open_context() as context:
        workers = {"passes": context.worker, "proof": context.proofs}
        processes = {name: worker.call(os.getpid) for name, worker in workers.items()}
        begun, spent = time.perf_counter(), {name: _cpu_seconds(process) for name, process in processes.items()}
        ours = time.process_time()
        run = passes.optimize(model, recipe=recipe, keep=["qkv"], context=context)
        ours = time.process_time() - ours
        seconds = {name: _cpu_seconds(process) - spent[name] for name, process in processes.items()}
        wall = time.perf_counter() - begun
    kept = sum(one.kept for one in run.structures)
    nodes = len(model.graph.node)
    return {"layers": count, "nodes": nodes, "kept": kept, "ours": ours, **seconds, "wall": wall}


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _markdown(rows: Sequence[dict[str, Any]], recipe: str) -> str:
    lines = ["| layers | nodes | kept | ours | passes | proof | sum over n log n |", "| --- " * 7 + "|"]
    units = [(row["ours"] + row["passes"] + row["proof"]) / (row["layers"] * math.log(row["layers"])) for row in rows]
    for row, unit in zip(rows, units, strict=True):
        lines.append(
            f"| {row['layers']} | {row['nodes']} | {row['kept']} | {row['ours']:.1f} s | {row['passes']:.1f} s "
            f"| {row['proof']:.1f} s | {unit / units[0]:.2f} |"
        )
    command = f"python -m benchmarks.growth --recipe {recipe} --layers {' '.join(str(row['layers']) for row in rows)}"
    date = time.strftime("%Y-%m-%d")
    return f"`{command}`, {date}\n\n" + "\n".join(lines) + f"\n\nMachine: {machine()}. {versions_line()}.\n"


if __name__ == "__main__":
    main()
