"""A Gather at one constant place is a view."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.ir.parse import from_text
from pipeline.lowering.fusion import FUSIONS, fuse
from pipeline.lowering.fusion.op_patterns import select_constant_indices
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays

GATHER = """
graph "row" (%0 "x": float32[3, 2]) {
  const %1 "at": int64[]

  %2 "y": float32[2] = aten.index.Tensor(%0, %1) {self: $0, indices: [$1]}

  return %2
}
"""


def test_a_gather_at_one_place_is_a_select() -> None:
    assert_becomes(
        select_constant_indices,
        GATHER,
        """
        graph "row" (%0 "x": float32[3, 2]) {
          const %1 "at": int64[]

          %2 "y": float32[2] = aten.select.int(%0) {self: $0, dim: 0, index: 2}

          return %2
        }
        """,
        {"at": torch.tensor(-1)},
    )


def test_a_place_out_of_range_stays_for_the_kernel_to_refuse() -> None:
    assert_stays(select_constant_indices, GATHER, {"at": torch.tensor(3)})


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=f"no fusion named 'attnetion'; there are {', '.join(FUSIONS)}; did you mean"):
        fuse(from_text(GATHER), ["attnetion"])


def test_a_graph_that_counts_through_memory_is_left_as_it_is() -> None:
    graph = from_text(
        """
        graph "strided" (%0 "x": float32[4]) {
          const %1 "at": int64[]

          %2 "y": float32[2] = aten.as_strided.default(%0) {self: $0, size: [2], stride: [1]}

          return %2
        }
        """
    )
    assert fuse(graph) is graph
