"""All passes on traced torch modules: what became of them, and the numbers of torch."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from pipeline.importers.from_torch import from_torch, functionalize_program
from pipeline.lowering.fusion import fuse
from pipeline.runtime import compile_graph

ATOL, RTOL = 1e-4, 1e-4
"""float32, sums of up to 288 products, and a normalisation that is multiplied into its weight."""


class Block(nn.Module):
    """A residual block whose shortcut is a convolution too, then a pool and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32))
        self.shortcut = nn.Conv2d(3, 32, 1)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
        for norm in (self.first[1], self.second[1]):
            nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
            nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
            nn.init.normal_(norm.weight)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.second(self.first(x)) + self.shortcut(x))
        y = nn.functional.max_pool2d(y, 2)
        return self.head(y.mean((2, 3)))


def fused_kinds(model: nn.Module, x: torch.Tensor) -> Counter[str]:
    """The kinds after all passes; checks that a run gives what the module gives."""
    model = model.eval().requires_grad_(False)
    graph = fuse(from_torch(functionalize_program(torch.export.export(model, (x,), strict=False))))
    program = compile_graph(graph, dict(model.state_dict()))
    feed = {graph.values[graph.inputs[0]].name: x}
    for _ in range(2):
        (found,) = program.run(feed).values()
        torch.testing.assert_close(found, model(x), atol=ATOL, rtol=RTOL)
    return Counter(op.kind for op in graph.ops)


def test_a_residual_block() -> None:
    kinds = fused_kinds(Block(), torch.randn(2, 3, 16, 16))
    assert kinds["ConvPointwise"] == 3
    assert not {kind for kind in kinds if "norm" in kind or "relu" in kind or "add" in kind}
    assert kinds["LinearPointwise"] == 1


def test_an_encoder_layer() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    kinds = fused_kinds(encoder, torch.randn(2, 8, 32))
    assert kinds["LinearPointwise"] == 2
    assert kinds["aten.gelu.default"] == 0
