"""Images keep their channels last from one convolution to the next."""

from __future__ import annotations

from pipeline.lowering.fusion.layout import keep_channels_last
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays

CONV = """{
  strides: [1, 1], pads: [0, 0], dilations: [1, 1], group: 1, add: false, bias: false, norm: false, epsilon: 0.0,
  channels_last: false, activation: "none", numbers: []
}"""


def test_what_stands_between_two_convolutions_follows() -> None:
    assert_becomes(
        keep_channels_last,
        f"""
        graph "images" (%0 "x": float32[1, 3, 4, 4]) {{
          param %1 "w": float32[6, 3, 1, 1]

          %2 "a": float32[1, 6, 4, 4] = ConvPointwise(%0, %1) {CONV}
          %3 "b": float32[1, 6, 4, 4] = aten.silu.default(%2) {{self: $0}}
          %4 "c": float32[1, 12, 4, 4] = aten.cat.default(%3, %2) {{tensors: [$0, $1], dim: 1}}
          %5 "d": float32[1, 12, 3, 4] = aten.constant_pad_nd.default(%4) {{self: $0, pad: [0, 0, 0, -1], value: 0.0}}
          %6 "y": float32[12, 3, 4] = aten.sum.dim_IntList(%5) {{self: $0, dim: [0], keepdim: false}}

          return %6
        }}
        """,
        f"""
        %5 "x channels last": float32[1, 4, 4, 3] = aten.permute.default(%0) {{self: $0, dims: [0, 2, 3, 1]}}
        %6 "a channels last": float32[1, 4, 4, 6] = ConvPointwise(%5, %1) {CONV.replace("last: false", "last: true")}
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

          %2 "a": float32[1, 6, 4, 4] = ConvPointwise(%0, %1) {CONV}
          %3 "y": float32[1, 6, 2, 2] = aten.max_pool2d.default(%2) {{self: $0, {pool}}}

          return %3
        }}
        """,
        f"""
        %4 "x channels last": float32[1, 4, 4, 3] = aten.permute.default(%0) {{self: $0, dims: [0, 2, 3, 1]}}
        %5 "a channels last": float32[1, 4, 4, 6] = ConvPointwise(%4, %1) {CONV.replace("last: false", "last: true")}
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
