"""Attention becomes one call; what is no attention, or differs from the fused kernel, does not."""

from __future__ import annotations

import pytest
import torch

from pipeline.lowering.fusion.attention import fuse_attention
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays

BEFORE = """
graph "attention" (%0 "q": float32[1, 2, 3, 4], %1 "k": float32[1, 2, 4, 5], %2 "v": float32[1, 2, 5, 4]) {
  const %3 "half": float32[1]
  const %4 "zero": float32[]
  const %5 "mask": float32[1, 1, 1, 5]

  %6 "scaled": float32[1, 2, 3, 4] = Mul(%0, %3)
  %7 "scores": float32[1, 2, 3, 5] = MatMul(%6, %1)
  %8 "masked": float32[1, 2, 3, 5] = Add(%7, %5)
  %9 "weights": float32[1, 2, 3, 5] = Softmax(%8) {axis: -1}
  %10 "bad": bool[1, 2, 3, 5] = IsNaN(%9)
  %11 "good": float32[1, 2, 3, 5] = Where(%10, %4, %9)
  %12 "y": float32[1, 2, 3, 4] = MatMul(%11, %2)

  return %12
}
"""

HALF = {"half": torch.tensor([0.5]), "zero": torch.tensor(0.0)}


@pytest.mark.parametrize(
    "mask", [torch.zeros(1, 1, 1, 5), torch.tensor([0, 0, -torch.inf, 0, -torch.inf]), torch.full((5,), -torch.inf)]
)
def test_scale_mask_softmax_and_both_products_are_one_call(mask: torch.Tensor) -> None:
    """Rows without any score are 0, which the traced form says by IsNaN and Where."""
    assert_becomes(
        fuse_attention,
        BEFORE,
        """
        graph "attention" (%0 "q": float32[1, 2, 3, 4], %1 "k": float32[1, 2, 4, 5], %2 "v": float32[1, 2, 5, 4]) {
          const %3 "half": float32[1]
          const %4 "zero": float32[]
          const %5 "mask": float32[1, 1, 1, 5]

          %7 "k turned": float32[1, 2, 5, 4] = Transpose(%1) {perm: [0, 1, 3, 2]}
          %8 "y by token": float32[1, 3, 2, 4] = ScaledDotProductAttention(%0, %7, %2, %5) {scale: 0.5, mask: true}
          %6 "y": float32[1, 2, 3, 4] = Transpose(%8) {perm: [0, 2, 1, 3]}

          return %6
        }
        """,
        {**HALF, "mask": mask.view(1, 1, 1, 5)},
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("axis: -1", "axis: 2"),
        ("Where(%10, %4, %9)", "Where(%10, %3, %9)"),  # rows without a score are not 0
        ("MatMul(%11, %2)", "MatMul(%9, %2)"),  # and are NaN
        ("return %12", "return %12, %7"),
    ],
)
def test_another_computation_is_left_alone(old: str, new: str) -> None:
    assert old in BEFORE
    assert_stays(fuse_attention, BEFORE.replace(old, new), HALF)
