"""A model of a trillion parameters through the passes, without its weights: time and memory of every stage.

    python -m benchmarks.weight_free [--layers 61] [--graph prefill] [--graph decode] [--functions] [--folder DIR]

Makes the shards of Kimi-K2.5 as sparse files (2 TB that take no room), exports its graph on meta, runs the recipe with
`keep`, and writes the model into the folder of the shards. Needs examples/kimi_k25_text_local.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import Child, kind_of_memory, machine, mib, run_child, versions_line

KEEP = ("attention", "swiglu", "rmsnorm")
MARK = "stage"
INTERVAL_S = 1.0
"""Of samples; a process that has mapped terabytes takes long to ask."""


def main() -> None:
    given = _parser().parse_args()
    if given.child:
        _run(given.child, given.layers, given.recipe.split(","), Path(given.folder), functions=given.functions)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        from benchmarks.weight_free_model import write_sparse_shards

        shards, tensors, size = write_sparse_shards(Path(folder), given.layers)
        sys.stdout.write(f"{shards} shards, {tensors:,} tensors, {size / 1e12:.2f} TB\n")
        for graph in given.graph or ["prefill", "decode"]:
            arguments = ["--child", graph, "--layers", str(given.layers), "--recipe", given.recipe, "--folder", folder]
            arguments += ["--functions"] if given.functions else []
            _tell(graph, run_child(["-m", "benchmarks.weight_free", *arguments], interval_s=INTERVAL_S))
    sys.stdout.write(f"{machine()}; {kind_of_memory()}; {versions_line()}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--graph", action="append", choices=["prefill", "decode"], help="both by default")
    parser.add_argument("--recipe", default="default,onnxsim", help="steps, with commas (default: %(default)s)")
    parser.add_argument("--functions", action="store_true", help="equal layers as one ONNX function")
    parser.add_argument("--folder", help="on a disk that has sparse files; the system's temporary one by default")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def _run(graph: str, layers: int, recipe: list[str], folder: Path, *, functions: bool) -> None:
    """In a process of its own: the whole journey; tells when each stage began and ended."""
    from benchmarks import weight_free_model
    from pipeline import Pipeline, RunConfig
    from pipeline.events import Event, StageEnded

    def tell(event: Event) -> None:
        if isinstance(event, StageEnded):
            sys.stdout.write(f"{MARK} {event.name} {time.time() - event.seconds} {time.time()} {event.detail}\n")

    factory = f"{weight_free_model.__file__}:{graph}"
    config = RunConfig.from_mapping(
        {
            "name": f"kimi_{graph}",
            "model": {"factory": factory, "args": {"layers": layers}, "checkpoint": str(folder)},
            "export": {"weights": "referenced", "pieces": weight_free_model.PIECES}
            | ({"functions": "layers"} if functions else {}),
            "passes": {"recipe": recipe, "keep": list(KEEP)},
            "verify": {"proof": "structure"},
        }
    )
    result = Pipeline(config, folder / f"run_{graph}", observer=tell).run()
    kept = sum(one.kept for one in result.structures)
    notes = [
        f"{row.name} {row.status}: {row.reason}" for row in result.passes if row.reason or row.status.counts_as_reverted
    ]
    sys.stdout.write(f"{result.export.nodes:,} nodes exported, {result.optimize.nodes:,} written; ")
    sys.stdout.write(f"{sum(row.changed for row in result.passes)} of {len(result.passes)} steps changed it; ")
    sys.stdout.write(f"{kept} of {len(result.structures)} structures kept; {mib(result.model.stat().st_size)}\n")
    sys.stdout.write("".join(f"{note}\n" for note in notes))


def _tell(graph: str, child: Child) -> None:
    sys.stdout.write(f"{graph}: {child.seconds:.0f} s, peak {mib(child.peak_bytes)}\n")
    for line in child.said.splitlines():
        if not line.startswith(f"{MARK} "):
            sys.stdout.write(f"  {line}\n")
            continue
        _, name, begun, ended, *detail = line.split(" ", 4)
        inside = [size for at, size in child.samples if float(begun) <= at <= float(ended)]
        seconds = float(ended) - float(begun)
        sys.stdout.write(f"  {name}: {seconds:.1f} s, peak {mib(max(inside, default=0))}; {' '.join(detail)}\n")


if __name__ == "__main__":
    main()
