"""A torch graph by the planned runtime, against torch eager and pytorch-ir's executor, on the very same inputs.

    python -m benchmarks.ir_execution [--rounds 30] [--threads 2] [--markdown FILE]

One process; the sides take turns, one run each, so that a busy machine slows all of them alike. The table holds medians
and the median of the ratios of neighbouring runs. pytorch-ir is measured where `torch_ir` can be imported.

The last rows are tokens of a decoder of eight layers, whose caches of 2048 are buffers that it writes by `index_copy_`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

from benchmarks.decoder import CACHED, Decoder
from benchmarks.measure import machine, show, versions_line
from pipeline.importers.from_torch import from_torch
from pipeline.importers.from_torch.functionalize import functionalize_program
from pipeline.runtime import compile_graph

Side = Callable[[], Any]

EAGER, OURS, PEER = "torch eager", "planned runtime", "pytorch-ir"


@dataclass(frozen=True, slots=True)
class Case:
    """A BERT of one size, and the ratio to eager torch that is wanted."""

    name: str
    config: BertConfig
    tokens: int
    wanted: float
    runs: int
    """Runs of each side in one round: a short run needs more of them on a busy machine."""


CASES = (
    Case("BERT-base, 128 tokens", BertConfig(), 128, 1.0, 1),
    Case(
        "12 narrow layers, 16 tokens",
        BertConfig(hidden_size=64, num_attention_heads=4, intermediate_size=128),
        16,
        0.6,
        20,
    ),
)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    rows = [row for case in CASES for row in _rows(case, options.rounds * case.runs)] + _decode_rows(options.rounds)
    text = "\n".join(
        [
            f"{machine()}, {options.threads} threads; {versions_line()}",
            "",
            "| model | side | median ms | × eager | wanted |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )
    show(text, options.markdown)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def _rows(case: Case, rounds: int) -> list[str]:
    torch.manual_seed(0)
    model = BertModel(case.config).eval()
    tokens = torch.randint(0, case.config.vocab_size, (1, case.tokens))
    with torch.inference_mode():
        sides = {EAGER: lambda: model(tokens), **_ours(model, tokens), **_peer(model, tokens)}
        seconds = _measured(sides, rounds)
    return _table(case.name, seconds, f"≤ {case.wanted}")


def _decode_rows(rounds: int) -> list[str]:
    """One token, at the same place each time; both sides write to caches of their own."""
    torch.manual_seed(0)
    model = Decoder().eval().requires_grad_(False)
    inputs = torch.tensor([[7]]), torch.tensor([1000])
    with torch.inference_mode():
        seconds = _measured({EAGER: lambda: model(*inputs), **_ours(model, *inputs)}, rounds)
    return _table(f"a token, caches of {CACHED}", seconds, "")


def _table(name: str, seconds: dict[str, list[float]], wanted: str) -> list[str]:
    rows = []
    for side, runs in seconds.items():
        ratio = statistics.median(run / eager for run, eager in zip(runs, seconds[EAGER], strict=True))
        limit = wanted if side == OURS else ""
        rows.append(f"| {name} | {side} | {statistics.median(runs) * 1e3:.2f} | {ratio:.2f} | {limit} |")
    return rows


def _ours(model: torch.nn.Module, *inputs: torch.Tensor) -> dict[str, Side]:
    program = torch.export.export(model, inputs, strict=False)
    graph = from_torch(functionalize_program(program))
    keys = {key for keys in graph.sources.values() for key in keys}
    weights = {name: tensor for name, tensor in model.state_dict().items() if name in keys}
    compiled = compile_graph(graph, weights)
    feed = {graph.values[vid].name: tensor for vid, tensor in zip(graph.inputs, inputs, strict=True)}
    return {OURS: lambda: compiled.run(feed)}


def _peer(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, Side]:
    try:
        from torch_ir import IRExecutor, extract_ir  # type: ignore[import-not-found]
    except ImportError:
        return {}
    with torch.device("meta"):
        abstract = type(model)(model.config).eval()
    executor = IRExecutor(extract_ir(abstract, (tokens.to("meta"),), strict=False))
    executor.load_weights_from_state_dict(dict(model.state_dict()) | dict(model.named_buffers()))
    return {PEER: lambda: executor.execute((tokens,))}


def _measured(sides: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 3):
        for name, run in list(sides.items())[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            run()
            if number >= 3:  # the first ones warm caches
                seconds[name].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
