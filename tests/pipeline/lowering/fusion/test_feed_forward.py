"""Two large products become one call with what is between and after them; small ones, or shared ones, do not."""

from __future__ import annotations

import pytest

from pipeline.ir.check import check
from pipeline.ir.parse import from_text
from pipeline.lowering.fusion.pointwise import join_products
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays

BEFORE = """
graph "layers" (%0 "x": float32[1, 128, 1024]) {
  const %1 "first": float32[1024, 1024]
  const %2 "b1": float32[1024]
  const %3 "second": float32[1024, 1024]
  const %4 "b2": float32[1024]

  %5 "h": float32[1, 128, 1024] = LinearPointwise(%0, %1, %2) {
    trans: false, add: false, bias: true, activation: "tanh", numbers: []
  }
  %6 "t": float32[1, 128, 1024] = LinearPointwise(%5, %3, %4) {
    trans: true, add: false, bias: true, activation: "none", numbers: []
  }
  %7 "y": float32[1, 128, 1024] = aten.add.Tensor(%0, %6) {self: $0, other: $1}

  return %7
}
"""


def test_products_activation_biases_and_sum_are_one_call() -> None:
    assert_becomes(
        join_products,
        BEFORE,
        """
        graph "layers" (%0 "x": float32[1, 128, 1024]) {
          const %1 "first": float32[1024, 1024]
          const %2 "b1": float32[1024]
          const %3 "second": float32[1024, 1024]
          const %4 "b2": float32[1024]

          %5 "y": float32[1, 128, 1024], %6 "h hidden": float32[1, 128, 1024] = FeedForward(%0, %1, %3, %0, %2, %4) {
            trans_first: false, trans_second: true,
            add: true, bias_first: true, bias_second: true, activation: "tanh", numbers: []
          }

          return %5
        }
        """,
    )


PLAIN = """
graph "layers" (%0 "x": float32[128, 1024]) {
  const %1 "first": float32[1024, 2048]
  const %2 "b1": float32[2048]
  const %3 "second": float32[2048, 512]

  %4 "h": float32[128, 2048] = LinearPointwise(%0, %1, %2) {
    trans: false, add: false, bias: true, activation: "relu", numbers: []
  }
  %5 "y": float32[128, 512] = aten.matmul.default(%4, %3) {self: $0, other: $1}

  return %5
}
"""


def test_a_plain_second_product_without_a_sum_is_joined_too() -> None:
    assert_becomes(
        join_products,
        PLAIN,
        """
        graph "layers" (%0 "x": float32[128, 1024]) {
          const %1 "first": float32[1024, 2048]
          const %2 "b1": float32[2048]
          const %3 "second": float32[2048, 512]

          %4 "y": float32[128, 512], %5 "h hidden": float32[128, 2048] = FeedForward(%0, %1, %3, %2) {
            trans_first: false, trans_second: false,
            add: false, bias_first: true, bias_second: false, activation: "relu", numbers: []
          }

          return %4
        }
        """,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1024", "256"),  # the first product is small
        ("512]", "256]"),  # the second one
        ("const %3", "state %3"),  # a matrix that may change from run to run
    ],
)
def test_plain_products_are_left_alone(old: str, new: str) -> None:
    assert old in PLAIN
    assert_stays(join_products, PLAIN.replace(old, new))


def test_a_sum_with_another_shape_stays() -> None:
    """The result could not be written over it."""
    graph = join_products(from_text(BEFORE.replace("aten.add.Tensor(%0, %6)", "aten.add.Tensor(%4, %6)")))
    check(graph)
    assert [(op.kind, op.attrs.get("add")) for op in graph.ops] == [("FeedForward", False), ("aten.add.Tensor", None)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[1, 128,", "[1, 64,"),  # small products are as fast one by one
        ("return %7", "return %7, %5"),  # somebody else reads what is between
        (
            """trans: true, add: false, bias: true, activation: "none\"""",
            """trans: true, add: false, bias: true, activation: "relu\"""",
        ),
        ("LinearPointwise(%5, %3, %4)", "LinearPointwise(%0, %3, %4)"),  # not one after the other
        ("LinearPointwise(%5, %3, %4)", "LinearPointwise(%0, %3, %5)"),  # the first is a bias of the second
        ("[1, 128,", "[1, n,"),
        ("float32", "float64"),
    ],
)
def test_other_products_are_left_alone(old: str, new: str) -> None:
    assert old in BEFORE
    assert_stays(join_products, BEFORE.replace(old, new))


def test_vectors_are_left_alone_however_large_the_matrices() -> None:
    large = BEFORE.replace("1024", "16384")
    assert "FeedForward" in [op.kind for op in join_products(from_text(large)).ops]
    vectors = from_text(large.replace("[1, 128, 16384]", "[16384]"))  # no numbers: the matrices would have 1 GiB each
    assert join_products(vectors) is vectors


def test_the_sum_of_two_pairs_belongs_to_the_first_and_a_third_product_stays() -> None:
    relu = """{trans: false, add: false, bias: false, activation: "relu", numbers: []}"""
    plain = relu.replace("relu", "none")
    graph = join_products(
        from_text(f"""
        graph "layers" (%0 "x": float32[128, 1024]) {{
          param %1 "w": float32[1024, 1024]

          %2 "h": float32[128, 1024] = LinearPointwise(%0, %1) {relu}
          %3 "t": float32[128, 1024] = LinearPointwise(%2, %1) {plain}
          %4 "i": float32[128, 1024] = LinearPointwise(%0, %1) {relu}
          %5 "u": float32[128, 1024] = LinearPointwise(%4, %1) {plain}
          %6 "s": float32[128, 1024] = aten.add.Tensor(%3, %5) {{self: $0, other: $1}}
          %7 "a": float32[128, 1024] = LinearPointwise(%6, %1) {relu}
          %8 "b": float32[128, 1024] = LinearPointwise(%7, %1) {plain}
          %9 "y": float32[128, 1024] = LinearPointwise(%8, %1) {plain}

          return %9
        }}
        """)
    )
    check(graph)
    names = [(op.kind, graph.values[op.outputs[0]].name, op.attrs.get("add")) for op in graph.ops]
    assert names == [
        ("FeedForward", "u", False),
        ("FeedForward", "s", True),
        ("FeedForward", "b", False),
        ("LinearPointwise", "y", False),
    ]
