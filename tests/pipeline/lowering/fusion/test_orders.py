"""Results are stored in the order in which they are copied later, and images with their channels last."""

from __future__ import annotations

import pytest

from pipeline.ir.parse import from_text
from pipeline.lowering.fusion.layout import keep_channels_last, store_as_copied, store_images_by_channel
from pipeline.runtime import compile_graph
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays

ROWS = '{self: $0, memory_format: word("memory_format", "contiguous_format")}'

HEADS = f"""
graph "heads" (%0 "x": float32[2, 3, 4, 5]) {{
  %1 "y": float32[2, 3, 4, 5] = aten.exp.default(%0) {{self: $0}}
  %2 "rows": float32[2, 3, 4, 5] = aten.clone.default(%1) {ROWS}
  %3 "joined": float32[6, 4, 5] = aten._unsafe_view.default(%2) {{self: $0, size: [6, 4, 5]}}
  %4 "turned": float32[4, 6, 5] = aten.transpose.int(%3) {{self: $0, dim0: 0, dim1: 1}}
  %5 "copied": float32[4, 6, 5] = aten.clone.default(%4) {ROWS}
  %6 "z": float32[4, 30] = aten.view.default(%5) {{self: $0, size: [4, 30]}}

  return %6
}}
"""


def test_a_result_is_stored_where_its_copies_would_be() -> None:
    """The view of a copy becomes one that would copy by itself, were the order another."""
    after = (
        HEADS.replace('"y": float32[2, 3, 4, 5]', '"y": float32[2, 3, 4, 5] strides [15, 5, 30, 1]')
        .replace(f"aten.clone.default(%1) {ROWS}", "aten.alias.default(%1) {self: $0}")
        .replace("aten._unsafe_view.default(%2) {self: $0, size:", "aten.reshape.default(%2) {self: $0, shape:")
    )
    assert_becomes(store_as_copied, HEADS, after)
    assert launches(HEADS) == 2
    assert launches(after) == 1


def launches(text: str) -> int:
    return len(compile_graph(from_text(text)).context.bound.steps)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return %6", "return %6, %1"),  # others read it in rows
        ("aten.exp.default(%0)", "aten.transpose.int(%0)"),  # no result of its own
    ],
)
def test_other_copies_stay(old: str, new: str) -> None:
    text = HEADS.replace(old, new)
    assert_stays(store_as_copied, text.replace("{self: $0}", "{self: $0, dim0: 1, dim1: 1}") if "int" in new else text)


CONV = """{
  input: $0, weight: $1, bias: none, stride: [1, 1], padding: [1, 1], dilation: [1, 1], transposed: false,
  output_padding: [0, 0], groups: 1
}"""

IMAGES = f"""
graph "images" (%0 "x": float32[2, 3, 4, 4]) {{
  param %1 "w": float32[6, 3, 3, 3]

  %2 "a": float32[2, 6, 4, 4] = aten.convolution.default(%0, %1) {CONV}
  %3 "b": float32[2, 6, 4, 4] = aten.relu.default(%2) {{self: $0}}
  %4 "c": float32[2, 6, 1, 1] = aten.mean.dim(%3) {{self: $0, dim: [-1, -2], keepdim: true}}
  %5 "d": float32[2, 6, 4, 4] = aten.neg.default(%3) {{self: $0}}
  %6 "e": float32[2, 6, 4, 4] = aten.threshold_backward.default(%5, %3) {{grad_output: $0, self: $1, threshold: 0}}

  return %4, %6
}}
"""


def test_images_have_their_channels_last_from_the_feed_on() -> None:
    """What an operator computed in rows is copied once; weights stay in rows."""
    last = "strides [96, 1, 24, 6]"
    assert_becomes(
        store_images_by_channel,
        IMAGES,
        f"""
        graph "images" (%0 "x": float32[2, 3, 4, 4] strides [48, 1, 12, 3]) {{
          param %1 "w": float32[6, 3, 3, 3]

          %2 "a": float32[2, 6, 4, 4] {last} = aten.convolution.default(%0, %1) {CONV}
          %3 "b": float32[2, 6, 4, 4] {last} = aten.relu.default(%2) {{self: $0}}
          %4 "c": float32[2, 6, 1, 1] = aten.mean.dim(%3) {{self: $0, dim: [-1, -2], keepdim: true}}
          %5 "d": float32[2, 6, 4, 4] = aten.neg.default(%3) {{self: $0}}
          %7 "d channels last": float32[2, 6, 4, 4] {last} = aten.clone.default(%5) {{
            self: $0, memory_format: word("memory_format", "channels_last")
          }}
          %6 "e": float32[2, 6, 4, 4] {last} = aten.threshold_backward.default(%7, %3) {{
            grad_output: $0, self: $1, threshold: 0
          }}

          return %4, %6
        }}
        """,
    )


def test_images_that_no_convolution_makes_stay() -> None:
    assert_stays(store_images_by_channel, IMAGES.replace("aten.convolution.default", "mylib.convolution.default"))


# Images keep their channels last from one convolution to the next.

PLAIN = """{
  strides: [1, 1], pads: [0, 0], dilations: [1, 1], group: 1, add: false, bias: false, norm: false, epsilon: 0.0,
  channels_last: false, activation: "none", numbers: []
}"""


def test_what_stands_between_two_convolutions_follows() -> None:
    assert_becomes(
        keep_channels_last,
        f"""
        graph "images" (%0 "x": float32[1, 3, 4, 4]) {{
          param %1 "w": float32[6, 3, 1, 1]

          %2 "a": float32[1, 6, 4, 4] = ConvPointwise(%0, %1) {PLAIN}
          %3 "b": float32[1, 6, 4, 4] = aten.silu.default(%2) {{self: $0}}
          %4 "c": float32[1, 12, 4, 4] = aten.cat.default(%3, %2) {{tensors: [$0, $1], dim: 1}}
          %5 "d": float32[1, 12, 3, 4] = aten.constant_pad_nd.default(%4) {{self: $0, pad: [0, 0, 0, -1], value: 0.0}}
          %6 "y": float32[12, 3, 4] = aten.sum.dim_IntList(%5) {{self: $0, dim: [0], keepdim: false}}

          return %6
        }}
        """,
        f"""
        %5 "x channels last": float32[1, 4, 4, 3] = aten.permute.default(%0) {{self: $0, dims: [0, 2, 3, 1]}}
        %6 "a channels last": float32[1, 4, 4, 6] = ConvPointwise(%5, %1) {PLAIN.replace("last: false", "last: true")}
        %7 "b channels last": float32[1, 4, 4, 6] = aten.silu.default(%6) {{self: $0}}
        %8 "c channels last": float32[1, 4, 4, 12] = aten.cat.default(%7, %6) {{tensors: [$0, $1], dim: 3}}
        %2 "c": float32[1, 12, 4, 4] = aten.permute.default(%8) {{self: $0, dims: [0, 3, 1, 2]}}
        %9 "d channels last": float32[1, 3, 4, 12] = aten.constant_pad_nd.default(%2) {{
          self: $0, pad: [0, 0, 0, -1], value: 0.0, "orders of axes": [[0, 3, 1, 2]]
        }}
        %3 "d": float32[1, 12, 3, 4] = aten.permute.default(%9) {{self: $0, dims: [0, 3, 1, 2]}}
        %4 "y": float32[12, 3, 4] = aten.sum.dim_IntList(%3) {{self: $0, dim: [0], keepdim: false}}
        return %4
        """,
    )


def test_the_pool_of_torch_is_stored_as_its_operand_is() -> None:
    pool = "kernel_size: [2, 2], stride: [2, 2]"
    assert_becomes(
        keep_channels_last,
        f"""
        graph "images" (%0 "x": float32[1, 3, 4, 4]) {{
          param %1 "w": float32[6, 3, 1, 1]

          %2 "a": float32[1, 6, 4, 4] = ConvPointwise(%0, %1) {PLAIN}
          %3 "y": float32[1, 6, 2, 2] = aten.max_pool2d.default(%2) {{self: $0, {pool}}}

          return %3
        }}
        """,
        f"""
        %4 "x channels last": float32[1, 4, 4, 3] = aten.permute.default(%0) {{self: $0, dims: [0, 2, 3, 1]}}
        %5 "a channels last": float32[1, 4, 4, 6] = ConvPointwise(%4, %1) {PLAIN.replace("last: false", "last: true")}
        %2 "a": float32[1, 6, 4, 4] = aten.permute.default(%5) {{self: $0, dims: [0, 3, 1, 2]}}
        %6 "y channels last": float32[1, 2, 2, 6] = aten.max_pool2d.default(%2) {{
          self: $0, {pool}, "orders of axes": [[0, 3, 1, 2]]
        }}
        %3 "y": float32[1, 6, 2, 2] = aten.permute.default(%6) {{self: $0, dims: [0, 3, 1, 2]}}
        return %3
        """,
    )


def test_a_graph_without_convolutions_is_left_alone() -> None:
    assert_stays(
        keep_channels_last,
        """
        graph "sum" (%0 "x": float32[1, 3, 4, 4]) {
          %1 "y": float32[1, 3, 4, 4] = aten.add.Tensor(%0, %0) {self: $0, other: $1}

          return %1
        }
        """,
    )
