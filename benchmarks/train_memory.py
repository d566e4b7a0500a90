"""Memory of a train step in addition to its states: the arena, and the bound of the order of its operators.

    python -m benchmarks.train_memory

Each model twice: parameters of 1 MiB or more are updated as soon as their gradient is final, or all at the end. Nothing
is run, so BERT-base needs no moments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Adam
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.train_steps import CASES, LOSS
from pipeline.lowering import lower, with_kernels
from pipeline.lowering.fusion import fuse_train_step
from pipeline.lowering.memory_order import in_traced_order
from pipeline.planning import check_plan, make_plan
from pipeline.training.graph import LARGE, make_graph
from pipeline.training.optimizer import read_optimizer
from pipeline.training.trace import trace_step

NEVER = 2**62


class Classifier(nn.Module):
    """BERT-base with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertForSequenceClassification(BertConfig())

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=words).logits


def main() -> None:
    models: list[tuple[str, Callable[[], nn.Module], tuple[torch.Tensor, torch.Tensor]]] = [
        (case.name, case.make, (torch.randn(case.shape), torch.randint(0, 10, case.shape[:1]))) for case in CASES
    ]
    words = torch.randint(0, 30_000, (1, 128))
    models.append(("BERT-base, batch 1, 128 tokens", Classifier, (words, torch.randint(0, 2, (1,)))))
    print("| step | updates | bound, KB | arena / bound |\n| --- | --- | --- | --- |")
    for name, make, batch in models:
        module = make()
        traced = trace_step(module, LOSS, batch)
        settings = read_optimizer(Adam(module.parameters()), module, traced.params)
        for updates, large in (("early", LARGE), ("at the end", NEVER)):
            graph = with_kernels(in_traced_order(fuse_train_step(make_graph(traced, settings, large=large))))
            plan = make_plan(graph, lower(graph))
            check_plan(plan)
            ratio = plan.arena_bytes / plan.live_bytes
            print(f"| {name} | {updates} | {plan.live_bytes / 1000:.0f} | {ratio:.4f} |", flush=True)


if __name__ == "__main__":
    main()
