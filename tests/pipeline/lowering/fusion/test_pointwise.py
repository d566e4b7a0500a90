"""Products and convolutions take what follows them into their call."""

from __future__ import annotations

import pytest

from pipeline.lowering.fusion.pointwise import fuse_convolutions, fuse_epilogues, fuse_products
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays


def test_a_product_takes_its_bias_and_its_activation() -> None:
    assert_becomes(
        fuse_products,
        """
        graph "mlp" (%0 "x": float32[2, 4]) {
          param %1 "w": float32[4, 8]
          param %2 "b": float32[8]

          %3 "p": float32[2, 8] = aten.matmul.default(%0, %1) {self: $0, other: $1}
          %4 "s": float32[2, 8] = aten.add.Tensor(%2, %3) {self: $0, other: $1}
          %5 "y": float32[2, 8] = aten.gelu.default(%4) {self: $0, approximate: "none"} @"fc"

          return %5
        }
        """,
        """
        %3 "y": float32[2, 8] =
          LinearPointwise(%0, %1, %2) {trans: false, add: false, bias: true, activation: "gelu", numbers: []} @"fc"
        return %3
        """,
    )


def test_torch_s_linear_and_the_bound_of_a_clamp() -> None:
    assert_becomes(
        fuse_products,
        """
        graph "mlp" (%0 "x": float32[2, 3, 4]) {
          param %1 "w": float32[8, 4]
          param %2 "b": float32[8]

          %3 "p": float32[2, 3, 8] = aten.linear.default(%0, %1, %2) {input: $0, weight: $1, bias: $2}
          %4 "y": float32[2, 3, 8] = aten.hardtanh.default(%3) {self: $0, min_val: 0, max_val: 1.5}

          return %4
        }
        """,
        """
        %3 "y": float32[2, 3, 8] =
          LinearPointwise(%0, %1, %2) {trans: true, add: false, bias: true, activation: "clip", numbers: [0.0, 1.5]}
        return %3
        """,
    )


PRODUCT = """
graph "kept" (%0 "x": float32[2, 4]) {
  param %1 "w": float32[4, 4]
  param %2 "b": float32[4]

  %3 "p": float32[2, 4] = aten.matmul.default(%0, %1) {self: $0, other: $1}
  %4 "y": float32[2, 4] = aten.relu.default(%3) {self: $0}

  return %4
}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return %4", "return %4, %3"),  # the product itself is wanted
        ("aten.matmul.default(%0, %1)", "aten.add.Tensor(%0, %2)"),
        ("aten.relu.default(%3) {self: $0}", "aten.softmax.int(%3) {self: $0, dim: 1}"),
        (
            "aten.relu.default(%3) {self: $0}",
            "aten.add.Tensor(%3, %0) {self: $0, other: $1}",
        ),  # no bias, one number for each element
        ("aten.relu.default(%3) {self: $0}", "aten.mul.Tensor(%3, %3) {self: $0, other: $1}"),
    ],
)
def test_what_does_not_fit_is_left_alone(old: str, new: str) -> None:
    assert old in PRODUCT
    assert_stays(fuse_products, PRODUCT.replace(old, new))


ACTIVATED = """
graph "mlp" (%0 "x": {dtype}[2, 4]) {{
  param %1 "w": {dtype}[4, 8]
  param %2 "b": {dtype}[8]

  %3 "p": {dtype}[2, 8] = aten.matmul.default(%0, %1) {{self: $0, other: $1}}
  %4 "s": {dtype}[2, 8] = aten.add.Tensor(%3, %2) {{self: $0, other: $1}}
  %5 "y": {dtype}[2, 8] = {activation}

  return %5
}}
"""

EPILOGUE = """
graph "mlp" (%0 "x": {dtype}[2, 4]) {{
  param %1 "w": {dtype}[4, 8]
  param %2 "b": {dtype}[8]

  %3 "y": {dtype}[2, 8] =
    LinearPointwise(%0, %1, %2) {{trans: false, add: false, bias: true, activation: "{name}", numbers: []}}

  return %3
}}
"""

BIAS_ALONE = """
graph "mlp" (%0 "x": {dtype}[2, 4]) {{
  param %1 "w": {dtype}[4, 8]
  param %2 "b": {dtype}[8]

  %3 "s": {dtype}[2, 8] =
    LinearPointwise(%0, %1, %2) {{trans: false, add: false, bias: true, activation: "none", numbers: []}}
  %4 "y": {dtype}[2, 8] = {activation}

  return %4
}}
"""


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("activation", "name"),
    [
        ("aten.relu.default(%4) {self: $0}", "relu"),
        ('aten.gelu.default(%4) {self: $0, approximate: "tanh"}', "gelu_tanh"),
        ('aten.gelu.default(%4) {self: $0, approximate: "none"}', None),
        ("aten.silu.default(%4) {self: $0}", None),
    ],
)
def test_an_epilogue_of_a_gpu_is_a_bias_with_relu_or_gelu_by_tanh(
    dtype: str, activation: str, name: str | None
) -> None:
    after = BIAS_ALONE if name is None else EPILOGUE
    assert_becomes(
        fuse_epilogues,
        ACTIVATED.format(dtype=dtype, activation=activation),
        after.format(dtype=dtype, activation=activation.replace("%4", "%3"), name=name),
    )


@pytest.mark.parametrize(
    ("old", "new"), [("aten.relu.default(%3) {self: $0}", "aten.neg.default(%3) {self: $0}"), ("float32", "float64")]
)
def test_a_product_without_a_bias_has_no_epilogue(old: str, new: str) -> None:
    assert_stays(fuse_epilogues, PRODUCT)
    assert old in PRODUCT
    assert_stays(fuse_epilogues, PRODUCT.replace(old, new))


def test_a_convolution_takes_the_norm_the_sum_and_the_activation() -> None:
    """Of two convolutions that are added, the first takes the sum, and runs where the sum was."""
    assert_becomes(
        fuse_convolutions,
        """
        graph "block" (%0 "x": float32[1, 3, 5, 5]) {
          param %1 "w": float32[4, 3, 3, 3]
          param %2 "v": float32[4, 3, 1, 1]
          param %3 "scale": float32[4]
          param %4 "shift": float32[4]
          param %5 "mean": float32[4]
          param %6 "var": float32[4]

          %7 "a": float32[1, 4, 5, 5] =
            aten.conv2d.default(%0, %1) {input: $0, weight: $1, padding: [1, 1]}
          %8 "n": float32[1, 4, 5, 5] = aten.batch_norm.default(%7, %3, %4, %5, %6) {
            input: $0, weight: $1, bias: $2, running_mean: $3, running_var: $4, training: false,
            momentum: 0.0, eps: 0.5, cudnn_enabled: false
          }
          %9 "b": float32[1, 4, 5, 5] =
            aten.conv2d.default(%0, %2, %3) {input: $0, weight: $1, bias: $2}
          %10 "s": float32[1, 4, 5, 5] = aten.add.Tensor(%8, %9) {self: $0, other: $1}
          %11 "y": float32[1, 4, 5, 5] = aten.relu.default(%10) {self: $0}

          return %11
        }
        """,
        """
        %7 "b": float32[1, 4, 5, 5] = ConvPointwise(%0, %2, %3) {
          strides: [1, 1], pads: [0, 0], dilations: [1, 1], group: 1,
          add: false, bias: true, norm: false, epsilon: 0.0, channels_last: false, activation: "none", numbers: []
        }
        %8 "y": float32[1, 4, 5, 5] = ConvPointwise(%0, %1, %7, %3, %4, %5, %6) {
          strides: [1, 1], pads: [1, 1], dilations: [1, 1], group: 1,
          add: true, bias: false, norm: true, epsilon: 0.5, channels_last: false, activation: "relu", numbers: []
        }
        return %8
        """,
    )


def test_torch_s_convolution_with_one_number_for_both_dimensions() -> None:
    assert_becomes(
        fuse_convolutions,
        """
        graph "conv" (%0 "x": float32[1, 3, 5, 5]) {
          param %1 "w": float32[4, 3, 3, 3]

          %2 "c": float32[1, 4, 3, 3] =
            aten.conv2d.default(%0, %1) {input: $0, weight: $1, bias: none, stride: [2], padding: [1, 1]}
          %3 "y": float32[1, 4, 3, 3] = aten.silu.default(%2) {self: $0}

          return %3
        }
        """,
        """
        %2 "y": float32[1, 4, 3, 3] = ConvPointwise(%0, %1) {
          strides: [2, 2], pads: [1, 1], dilations: [1, 1], group: 1,
          add: false, bias: false, norm: false, epsilon: 0.0, channels_last: false, activation: "silu", numbers: []
        }
        return %2
        """,
    )


def test_a_product_of_what_is_fed_is_left_alone() -> None:
    assert_stays(
        fuse_products,
        """
        graph "fed" (%0 "x": float32[2, 4], %1 "w": float32[4, 4]) {
          %2 "p": float32[2, 4] = aten.matmul.default(%0, %1) {self: $0, other: $1}
          %3 "y": float32[2, 4] = aten.relu.default(%2) {self: $0}

          return %3
        }
        """,
    )
