"""A product and the ReLU after it, or the gradient of one, become one call for a kernel in C++."""

from __future__ import annotations

import pytest

from pipeline.lowering.fusion.gradients import join_relu_with_products
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays

FORWARD = """
graph "forward" (%0 "x": float32[2, 3], %1 "w": float32[3, 4], %2 "b": float32[4]) {
  %3 "product": float32[2, 4] = aten.addmm.default(%2, %0, %1) {self: $0, mat1: $1, mat2: $2}
  %4 "y": float32[2, 4] = aten.relu.default(%3) {self: $0}

  return %4
}
"""

BACKWARD = """
graph "backward" (%0 "dy": float32[2, 3], %1 "w": float32[3, 4], %2 "y": float32[2, 4]) {
  %3 "product": float32[2, 4] = aten.mm.default(%0, %1) {self: $0, mat2: $1}
  %4 "dx": float32[2, 4] = aten.threshold_backward.default(%3, %2) {grad_output: $0, self: $1, threshold: 0}

  return %4
}
"""


def test_a_relu_after_a_product_with_a_bias() -> None:
    assert_becomes(
        join_relu_with_products,
        FORWARD,
        """
        graph "forward" (%0 "x": float32[2, 3], %1 "w": float32[3, 4], %2 "b": float32[4]) {
          %3 "y": float32[2, 4] = ReluProduct(%0, %1, %2) {bias: true, gate: false}

          return %3
        }
        """,
    )


def test_the_gradient_of_a_relu_after_that_of_a_product() -> None:
    assert_becomes(
        join_relu_with_products,
        BACKWARD,
        """
        graph "backward" (%0 "dy": float32[2, 3], %1 "w": float32[3, 4], %2 "y": float32[2, 4]) {
          %3 "dx": float32[2, 4] = ReluProduct(%0, %1, %2) {bias: false, gate: true}

          return %3
        }
        """,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("float32", "float64"),
        ("threshold: 0", "threshold: 1"),
        ("return %4", "return %3, %4"),
        ("aten.mm.default(%0, %1) {self: $0, mat2: $1}", "aten.mm.default(%0, %1) {mat2: $1, self: $1}"),
    ],
    ids=["float64", "another threshold", "the product is read elsewhere", "one operand twice"],
)
def test_what_stays(old: str, new: str) -> None:
    assert_stays(join_relu_with_products, BACKWARD.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"b": float32[4]', '"b": float32[2, 4]'),
        ('"b": float32[4]', '"b": float32[1]'),
        ("mat2: $2}", "mat2: $2, beta: 2}"),
        ("mat2: $2}", "mat2: $2, alpha: 0.5}"),
    ],
)
def test_other_sums_stay(old: str, new: str) -> None:
    assert_stays(join_relu_with_products, FORWARD.replace(old, new))
