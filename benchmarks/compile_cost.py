"""What `compile_graph` costs for BERT-base at (1, 128), of which the check of each call against its operator is a part.

    python -m benchmarks.compile_cost

The least of nine in seconds of the processor: other programs only add to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import BertConfig, BertModel

from pipeline.importers.from_torch import from_torch
from pipeline.importers.from_torch.functionalize import functionalize_program
from pipeline.runtime import compile_graph
from pipeline.runtime.call_check import refuse_wrong_calls

REPEATS = 9


def main() -> None:
    module = BertModel(BertConfig(), add_pooling_layer=False).eval().requires_grad_(requires_grad=False)
    ids = torch.ones(1, 128, dtype=torch.int64)
    graph = from_torch(functionalize_program(torch.export.export(module, (ids,), strict=False)))
    weights = dict(module.state_dict())
    print(f"compile_graph: {measure(lambda: compile_graph(graph, weights)):.3f} s, {len(graph.ops)} ops")
    print(f"of these the check: {measure(lambda: refuse_wrong_calls(graph)):.3f} s")


def measure(call: Callable[[], object]) -> float:
    """The least processor seconds of `call` in REPEATS calls."""
    found = []
    for _ in range(REPEATS):
        begun = time.process_time()
        call()
        found.append(time.process_time() - begun)
    return min(found)


if __name__ == "__main__":
    main()
