"""Flexible attention: its score and its mask are bodies, which torch maps over all pairs of positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pipeline.torch_ir import IR, IRExecutor, extract_ir, verify_ir_with_state_dict

LENGTH = 6


class Causal(nn.Module):
    """With a mask of blocks, and a learned bias that the score reads."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        blocks = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, LENGTH, LENGTH, device=x.device)
        actual = flex_attention(x, x, x, lambda score, b, h, i, j: score + h * self.bias[i, j], block_mask=blocks)
        assert isinstance(actual, Tensor)
        return actual


@pytest.mark.filterwarnings("ignore")  # torch's own: that it is quicker when compiled
def test_flex_attention(tmp_path: Path) -> None:
    model, x = Causal(), torch.randn(1, 2, LENGTH, 4)
    extract_ir(model, (x,), strict=False).save(tmp_path / "ir.json")
    ir = IR.load(tmp_path / "ir.json")
    (op,) = [op for op in ir.graph.ops if op.bodies]
    assert [[inner.kind for inner in body.ops] for body in op.bodies] == [
        ["aten.index.Tensor", "aten.mul.Tensor", "aten.add.Tensor"],
        ["aten.ge.Tensor"],
    ]
    executor = IRExecutor(ir, model.state_dict())
    torch.testing.assert_close(executor.execute((x,))[0], model(x))
    assert "'flex_attention' cannot run" in executor.not_planned
    ok, report = verify_ir_with_state_dict(ir, model.state_dict(), model, (x,))
    assert ok, report
