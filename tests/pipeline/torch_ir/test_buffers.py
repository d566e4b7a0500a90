"""Buffers that no checkpoint has, of a model on meta: computed again where the model knows how."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.torch_ir import extract_ir


class Filling(nn.Module):
    """Fills one of its buffers, takes another by what it holds, and leaves a third."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("filled", "scaled", "left"):
            self.register_buffer(name, torch.empty(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("filled") + self.get_buffer("scaled") + self.get_buffer("left")

    def _init_weights(self, module: nn.Module) -> None:
        module.get_buffer("filled").copy_(torch.arange(4.0))
        module.get_buffer("scaled").mul_(2)


def test_what_was_not_written_is_not_known() -> None:
    with torch.device("meta"):
        ir = extract_ir(Filling(), (torch.empty(2, 4),))
    assert {name: value.tolist() for name, value in ir.constants.items()} == {"filled": [0, 1, 2, 3]}


def test_a_checkpoint_has_the_persistent_buffers() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(4))
            self.register_buffer("own", torch.full((4,), 2.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.get_buffer("kept") + self.get_buffer("own")

    ir = extract_ir(Scaling(), (torch.zeros(2, 4),), strict=False)
    assert {name: value.tolist() for name, value in ir.constants.items()} == {"own": [2, 2, 2, 2]}
