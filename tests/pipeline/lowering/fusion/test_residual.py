"""A product and the tensor that is added to it become one call, also through views that keep the order."""

from __future__ import annotations

import pytest

from pipeline.ir import check, from_text
from pipeline.lowering.fusion import add_in_products, join_relu_with_products
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays

BEFORE = """
graph "layer" (%0 "x": float32[2, 8, 16], %1 "r": float32[2, 8, 32]) {
  const %2 "w": float32[16, 32]
  const %3 "b": float32[32]

  %4 "p": float32[2, 8, 32] = LinearPointwise(%0, %2, %3) {
    trans: false, add: false, bias: true, activation: "gelu", numbers: []
  }
  %5 "y": float32[2, 8, 32] = aten.add.Tensor(%1, %4) {self: $0, other: $1}

  return %5
}
"""


def test_a_sum_after_the_activation_is_part_of_the_product() -> None:
    assert_becomes(
        add_in_products,
        BEFORE,
        """
        %4 "y": float32[2, 8, 32] = LinearPointwise(%0, %2, %1, %3) {
          trans: false, add: true, bias: true, activation: "gelu", numbers: []
        }
        return %4
        """,
    )


def test_a_gemm_whose_rows_are_shown_otherwise_before_the_sum() -> None:
    assert_becomes(
        add_in_products,
        """
        graph "layer" (%0 "x": float32[8, 16], %1 "r": float32[1, 8, 32]) {
          const %2 "w": float32[32, 16]
          const %3 "b": float32[32]

          %4 "p": float32[8, 32] = aten.linear.default(%0, %2, %3) {input: $0, weight: $1, bias: $2}
          %5 "rows": float32[8, 1, 32] = aten.reshape.default(%4) {self: $0, shape: [8, 1, 32]}
          %6 "turned": float32[1, 8, 32] = aten.permute.default(%5) {self: $0, dims: [1, 0, 2]}
          %7 "y": float32[1, 8, 32] = aten.add.Tensor(%1, %6) {self: $0, other: $1}

          return %7
        }
        """,
        """
        %5 "y other by rows": float32[8, 32] = aten.reshape.default(%1) {self: $0, shape: [8, 32]}
        %6 "y by rows": float32[8, 32] = LinearPointwise(%0, %2, %5, %3) {
          trans: true, add: true, bias: true, activation: "none", numbers: []
        }
        %4 "y": float32[1, 8, 32] = aten.reshape.default(%6) {self: $0, shape: [1, 8, 32]}
        return %4
        """,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return %5", "return %5, %4"),  # somebody else reads the product
        ("aten.add.Tensor(%1, %4)", "aten.mul.Tensor(%1, %4)"),
        ("aten.add.Tensor(%1, %4)", "aten.add.Tensor(%4, %4)"),  # the product is read twice
        ('%1 "r": float32[2, 8, 32]', '%1 "r": float32[2, 1, 32]'),  # what is added is spread
    ],
)
def test_other_sums_are_left_alone(old: str, new: str) -> None:
    assert old in BEFORE
    assert_stays(add_in_products, BEFORE.replace(old, new))


VIEWED = """
graph "layer" (%0 "x": float32[8, 16], %1 "r": float32[8, 8], %2 "v": float32[16, 8]) {
  const %3 "w": float32[16, 8]

  %4 "p": float32[8, 8] = aten.matmul.default(%0, %3) {self: $0, other: $1}
  %5 "turned": float32[8, 8] = aten.permute.default(%4) {self: $0, dims: [0, 1]}
  %6 "y": float32[8, 8] = aten.add.Tensor(%1, %5) {self: $0, other: $1}

  return %6
}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [("[0, 1]", "[1, 0]"), ("aten.matmul.default(%0, %3)", "aten.matmul.default(%0, %2)")],
    ids=["the view moves elements", "the matrix changes from run to run"],
)
def test_other_products_are_left_alone(old: str, new: str) -> None:
    assert [op.kind for op in add_in_products(from_text(VIEWED)).ops] == ["LinearPointwise"]
    assert_stays(add_in_products, VIEWED.replace(old, new))


def test_the_sum_of_two_products_belongs_to_the_first() -> None:
    graph = add_in_products(
        from_text("""
        graph "layer" (%0 "x": float32[8, 16]) {
          const %1 "w": float32[16, 16]

          %2 "p": float32[8, 16] = aten.matmul.default(%0, %1) {self: $0, other: $1}
          %3 "q": float32[8, 16] = aten.matmul.default(%0, %1) {self: $0, other: $1}
          %4 "y": float32[8, 16] = aten.add.Tensor(%2, %3) {self: $0, other: $1}

          return %4
        }
        """)
    )
    check(graph)
    assert [(op.kind, graph.values[op.inputs[-1]].name) for op in graph.ops] == [
        ("aten.matmul.default", "w"),
        ("LinearPointwise", "q"),
    ]


# A product and the ReLU after it, or the gradient of one, become one call for a kernel in C++.

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
        %3 "y": float32[2, 4] = ReluProduct(%0, %1, %2) {bias: true, gate: false}
        return %3
        """,
    )


def test_the_gradient_of_a_relu_after_that_of_a_product() -> None:
    assert_becomes(
        join_relu_with_products,
        BACKWARD,
        """
        %3 "dx": float32[2, 4] = ReluProduct(%0, %1, %2) {bias: false, gate: true}
        return %3
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
