"""The arena against its lower bound, and the time of planning: shipped configurations, families, and growth.

    python -m benchmarks.arena configs [--runs FOLDER]
    python -m benchmarks.arena families [--family NAME]…
    python -m benchmarks.arena growth [--blocks 1000 3000 12000 48000]

`configs` plans the `ir.json` that `onnxline run` left in each folder of FOLDER. `families` traces each family
(benchmarks/families/*.yaml), and plans what torch.export gives. The bound is the most bytes alive in one call, with
each block rounded up to 64 bytes; `unaligned` is the ratio to the bound without rounding, as `plan.json` has it.

`growth` plans the model of `benchmarks.growth` with about so many ops, and packs blocks of three kinds: the nested
lives of a training step; random lives, mostly short; layers with a cache that is kept. Seconds are of the processor.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import onnx

from benchmarks.families.table import families
from benchmarks.growth import layers
from pipeline.errors import message_with_notes
from pipeline.export import TorchSource, load_source
from pipeline.export.trace import trace_module
from pipeline.importers import from_onnx
from pipeline.importers.from_torch import from_torch
from pipeline.importers.from_torch.functionalize import functionalize_program
from pipeline.ir.graph import Graph
from pipeline.ir.json import from_json
from pipeline.lowering import lower, with_kernels
from pipeline.lowering.memory_order import in_traced_order
from pipeline.ops import emitter_of
from pipeline.planning import check_plan, make_plan
from pipeline.planning.alias import storage_classes
from pipeline.planning.arena import Block, Lifetime, aligned_peak, assign_offsets, lifetimes
from pipeline.runtime.compile import fold_constants

WANTED: Final = 1.03
OPS_OF_LAYER: Final = 36


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: its ops, arena and bounds in bytes, and the seconds that lowering and planning took."""

    name: str
    ops: int
    arena: int
    bound: int
    live: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.arena / max(self.bound, 1)

    def __str__(self) -> str:
        ratios = f"{self.ratio:.4f} | {self.arena / max(self.live, 1):.4f}"
        return f"| {self.name} | {self.ops:,} | {self.arena:,} | {ratios} | {self.seconds:.3f} s |"


def plan_row(name: str, graph: Graph) -> Row:
    """Plan `graph`, whose ops have kernels, and check the plan."""
    begun = time.process_time()
    calls = lower(graph)
    plan = make_plan(graph, calls)
    seconds = time.process_time() - begun
    check_plan(plan)
    lives = lifetimes(graph, calls)
    blocks = [
        Block(
            root,
            plan.slots[root].spec.nbytes,
            Lifetime(min(lives[v].first for v in vids), max(lives[v].last for v in vids)),
        )
        for root, vids in storage_classes(plan.alias, range(len(plan.slots))).items()
        if root in plan.offsets
    ]
    return Row(name, len(calls), plan.arena_bytes, aligned_peak(blocks), plan.live_bytes, seconds)


def config_rows(runs: Path) -> Iterator[Row]:
    """The models that `onnxline run` wrote as IR below `runs`."""
    for path in sorted(runs.glob("*/ir.json")):
        yield plan_row(path.parent.name, with_kernels(from_json(json.loads(path.read_text(encoding="utf-8")))))


def family_rows(names: Sequence[str]) -> Iterator[Row]:
    """The families that can be traced and planned."""
    for name, graph in family_graphs(names):
        try:
            yield plan_row(name, graph)
        except Exception as error:  # a table of what can be measured, with the reason of what cannot
            print(f"{name}: {message_with_notes(error).splitlines()[0]}", file=sys.stderr)


def family_graphs(names: Sequence[str]) -> Iterator[tuple[str, Graph]]:
    """Name and lowered graph of the families that can be traced, or of those among `names`; why another cannot goes to
    stderr."""
    table = families()
    for name in names or table:
        try:
            source = load_source(table[name].section())
            if not isinstance(source, TorchSource):
                raise TypeError(f"found {type(source).__name__}, expected a model of torch")
            program, _ = trace_module(source)
            graph = from_torch(functionalize_program(program))
            graph = with_kernels(in_traced_order(fold_constants(graph)))
        except Exception as error:  # a table of what can be measured, with the reason of what cannot
            print(f"{name}: {message_with_notes(error).splitlines()[0]}", file=sys.stderr)
        else:
            yield name, graph


def depth_row(ops: int) -> Row:
    """Pre-norm transformer layers, about as many `ops`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.onnx"
        onnx.save(layers(max(1, round(ops / OPS_OF_LAYER))), path)
        return plan_row(
            "layers of a model", with_kernels(from_onnx(path, shapes={"x0": (1, 2, 16)}, emitter_of=emitter_of))
        )


def packing_row(name: str, blocks: Sequence[Block]) -> Row:
    """Offsets alone: `ops` is the number of blocks."""
    begun = time.process_time()
    _, arena = assign_offsets(blocks)
    seconds = time.process_time() - begun
    bound = aligned_peak(blocks)
    return Row(name, len(blocks), arena, bound, bound, seconds)


def nested(count: int) -> list[Block]:
    """Each activation of a training step waits for its gradient."""
    sizes, half = random.Random(1), count // 2
    forward = [Block(at, sizes.choice((4096, 16384, 65536)), Lifetime(at, 2 * half - at)) for at in range(half)]
    backward = [Block(at, sizes.choice((4096, 16384, 65536)), Lifetime(at, at + 1)) for at in range(half, 2 * half)]
    return forward + backward


def mixed(count: int) -> list[Block]:
    """One block in twenty lives for up to the whole run, so the number of those alive grows with the plan."""
    generator = random.Random(0)
    blocks = []
    for at in range(count):
        calls = int(generator.expovariate(0.2)) if generator.random() < 0.95 else generator.randrange(count)
        nbytes = generator.choice((64, 256, 1024, 4096, 4096, 16384, generator.randrange(1, 20000)))
        blocks.append(Block(at, nbytes, Lifetime(at, min(count, at + 1 + calls))))
    return blocks


def cached(count: int) -> list[Block]:
    """Layers of twelve blocks, of which one lives to the end."""
    sizes = (4096, 2048, 4096, 4096, 12288, 12288, 4096, 4096, 16384, 16384, 4096, 4096)
    calls = (11, count, 4, 3, 1, 1, 1, 9, 1, 1, 1, 12)
    return [Block(at, sizes[at % 12], Lifetime(at, min(count, at + calls[at % 12]))) for at in range(count)]


KINDS: Final[Mapping[str, Callable[[int], list[Block]]]] = {
    "blocks, nested": nested,
    "blocks, random": mixed,
    "blocks, a cache a layer": cached,
}


def growth_rows(counts: Sequence[int]) -> Iterator[Row]:
    """All kinds, each from small to large; beside the name, microseconds over n log n."""
    kinds: dict[str, Callable[[int], Row]] = {"layers of a model": depth_row}
    kinds |= {name: lambda count, name=name: packing_row(name, KINDS[name](count)) for name in KINDS}
    for make_row in kinds.values():
        for count in counts:
            row = make_row(count)
            yield replace(row, name=f"{row.name} ({1e6 * row.seconds / (row.ops * math.log2(row.ops)):.1f} µs)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("configs", "families", "growth"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 3000, 12000, 48000])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    sources = {
        "configs": lambda: config_rows(options.runs),
        "families": lambda: family_rows(options.family),
        "growth": lambda: growth_rows(options.blocks),
    }
    print("| | ops | arena | ratio | unaligned | time |\n" + "| --- " * 6 + "|")
    rows = []
    for row in sources[options.what]():
        rows.append(row)
        print(row, flush=True)
    over = [row.name for row in rows if row.ratio > WANTED]
    print(f"\n{len(rows)} plans, {len(over)} over {WANTED}: {', '.join(over) or 'none'}")


if __name__ == "__main__":
    main()
