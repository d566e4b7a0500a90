"""What a replay costs in addition to its kernels, what finding a capture costs, and how two threads scale.

    python -m benchmarks.capture_replay [--rounds 20] [--markdown FILE]

One process, one thread of torch. Costs are taken with the time of the processor, which leaves out the turns of other
processes: the median of rounds in which the sides take turns. The fixed cost of a replay is what stays when the cost of
its calls is taken away: a program of one call against one of 101. The cost per call beyond the kernel is that of a call
less that of the same launch in a bare loop. Two threads against one are taken with the clock, and need two free cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import machine, show, versions_line
from pipeline.ir import Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import CompiledProgram, compile_graph

SMALL = TensorSpec((8,), "float32")
TIMES = 300
"""Calls of one side in one round."""
FURTHER = 100
"""Calls that the longer program has more than the shorter one."""
SQUARE, PRODUCTS, REPLAYS = 384, 8, 25
"""Of the threads: matrices of one replay, and replays of one round."""

Side = Callable[[], object]


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    rows = [*_cost_rows(options.rounds), *_hit_rows(options.rounds), *_thread_rows(max(options.rounds // 4, 3))]
    text = "\n".join(
        [
            f"{machine()}; {versions_line()}",
            "",
            "| what | measured | wanted |",
            "| --- | --- | --- |",
            *(f"| {name} | {found} | {wanted} |" for name, found, wanted in rows),
            "",
        ]
    )
    show(text, options.markdown)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    return parser.parse_args()


def _cost_rows(rounds: int) -> list[tuple[str, str, str]]:
    short, long = _negations(1), _negations(1 + FURTHER)
    feed = {"x": torch.ones(8)}
    out = torch.empty(8)
    launches = [partial(torch.neg, feed["x"], out=out)] * FURTHER
    for program in (short, long):
        program.capture(feed)
    found = _take_turns(
        rounds,
        {
            "views": lambda: short.replay(feed, copy=False),
            "copies": lambda: short.replay(feed),
            "long": lambda: long.replay(feed, copy=False),
            "run": lambda: short.run(feed),
            "bare": lambda: _run_bare(launches),
            "capture": partial(short.capture(feed).replay, feed, copy=False),
        },
    )
    call, bare = (found["long"] - found["views"]) / FURTHER, found["bare"] / FURTHER
    return [
        ("fixed cost of a replay, outputs as views", _microseconds(found["views"] - call), "5 µs"),
        ("the same, outputs as copies", _microseconds(found["copies"] - call), "5 µs"),
        ("fixed cost of `run` for comparison", _microseconds(found["run"] - call), ""),
        ("a call of `Neg` on 8 elements in a replay", _microseconds(call), "1 µs"),
        ("the same in a bare loop", _microseconds(bare), ""),
        ("what a replay adds to a call", _microseconds(call - bare), "1 µs"),
    ]


def _negations(calls: int) -> CompiledProgram:
    builder = GraphBuilder("negations")
    value = builder.input("x", SMALL)
    for at in range(calls):
        (value,) = builder.emit("aten.neg.default", [value], [(f"v{at}", SMALL)])
    return compile_graph(builder.build([value]))


def _run_bare(launches: Sequence[Side]) -> None:
    with torch.inference_mode():
        for launch in launches:
            launch()


def _hit_rows(rounds: int) -> list[tuple[str, str, str]]:
    sides, names = {}, {}
    for count in (2, 2000):
        graph, weights = _with_params(count), {f"w{at}": torch.ones(8) for at in range(count)}
        bound, fed = compile_graph(graph, weights), compile_graph(graph)
        x = {"x": torch.ones(8)}
        bound.capture(x)
        fed.capture({**x, **weights})
        sides[f"bound {count}"] = partial(bound.context.captures.find, x)
        names[f"bound {count}"] = f"a hit, {count} params bound to the program"
        sides[f"fed {count}"] = partial(fed.context.captures.find, {**x, **weights})
        names[f"fed {count}"] = f"a hit, {count} params in every feed"
    found = _take_turns(rounds, sides)
    return [(names[side], _microseconds(seconds), "2 µs") for side, seconds in found.items()]


def _with_params(count: int) -> Graph:
    builder = GraphBuilder("params")
    value = builder.input("x", SMALL)
    for at in range(count):
        (value,) = builder.emit("aten.add.Tensor", [value, builder.param(f"w{at}", SMALL)], [(f"v{at}", SMALL)])
    return builder.build([value])


def _thread_rows(rounds: int) -> list[tuple[str, str, str]]:
    """What two threads do in a second against one, on products of matrices; the sides take turns."""
    builder, spec = GraphBuilder("products"), TensorSpec((SQUARE, SQUARE), "float32")
    value = builder.input("x", spec)
    for at in range(PRODUCTS):
        (value,) = builder.emit("aten.matmul.default", [value, value], [(f"v{at}", spec)])
    program, feed = compile_graph(builder.build([value])), {"x": torch.eye(SQUARE)}

    def replay(_: int) -> None:
        for _ in range(REPLAYS):
            program.replay(feed, copy=False)

    def multiply(_: int) -> None:
        x, out = torch.eye(SQUARE), torch.empty(SQUARE, SQUARE)
        for _ in range(REPLAYS * PRODUCTS):
            torch.mm(x, x, out=out)

    names = {"two threads that replay, against one": replay, "the same with `torch.mm` alone": multiply}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(rounds):
            for name, work in names.items():
                seconds = [_seconds_of(pool, work, threads) for threads in (1, 2)]
                ratios[name].append(2 * seconds[0] / seconds[1])
    return [
        (name, f"{statistics.median(found):.2f} × ({min(found):.2f} to {max(found):.2f})", "1.7 ×")
        for name, found in ratios.items()
    ]


def _seconds_of(pool: ThreadPoolExecutor, work: Callable[[int], None], threads: int) -> float:
    begun = time.perf_counter()
    list(pool.map(work, range(threads)))
    return time.perf_counter() - begun


def _take_turns(rounds: int, sides: Mapping[str, Side]) -> dict[str, float]:
    """Median seconds of processor time of one call of each side."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            side()
            begun = time.thread_time()
            for _ in range(TIMES):
                side()
            seconds[name].append((time.thread_time() - begun) / TIMES)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} µs"


if __name__ == "__main__":
    main()
