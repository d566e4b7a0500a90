"""An RMS normalisation and SiLU that exporters write out become one call; what computes something else does not."""

from __future__ import annotations

import re

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.importers.from_torch import from_torch, functionalize_program
from pipeline.ir.parse import from_text
from pipeline.lowering.fusion import FUSIONS, fuse, join_compounds, select_constant_indices
from pipeline.runtime import compile_graph
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays
from tests.support.native import native_library

NORM = """
graph "norm" (%0 "x": float32[2, 3, 16]) {
  const %1 "w": float32[16]
  const %2 "epsilon": float32[]

  %3 "square": float32[2, 3, 16] = aten.pow.Tensor_Scalar(%0) {self: $0, exponent: 2.0}
  %4 "mean": float32[2, 3, 1] = aten.mean.dim(%3) {self: $0, dim: [2], keepdim: true}
  %5 "sum": float32[2, 3, 1] = aten.add.Tensor(%4, %2) {self: $0, other: $1}
  %6 "root": float32[2, 3, 1] = aten.sqrt.default(%5) {self: $0}
  %7 "factor": float32[2, 3, 1] = aten.reciprocal.default(%6) {self: $0}
  %8 "rows": float32[2, 3, 16] = aten.mul.Tensor(%0, %7) {self: $0, other: $1}
  %9 "y": float32[2, 3, 16] = aten.mul.Tensor(%1, %8) {self: $0, other: $1}

  return %9
}
"""

EPSILON = {"epsilon": torch.tensor(0.25)}

BY_QUOTIENT = {
    '  %7 "factor": float32[2, 3, 1] = aten.reciprocal.default(%6) {self: $0}\n': "",
    "aten.mul.Tensor(%0, %7)": "aten.div.Tensor(%0, %6)",
}
BY_RSQRT = {
    '  %6 "root": float32[2, 3, 1] = aten.sqrt.default(%5) {self: $0}\n': "",
    "aten.reciprocal.default(%6)": "aten.rsqrt.default(%5)",
}
BY_OTHER_SUM = {"aten.add.Tensor(%4, %2)": "aten.add.Tensor(%2, %4)"}
BY_PRODUCT = {"aten.pow.Tensor_Scalar(%0) {self: $0, exponent: 2.0}": "aten.mul.Tensor(%0, %0) {self: $0, other: $1}"}


@pytest.mark.parametrize("written", [{}, BY_QUOTIENT, BY_RSQRT, BY_PRODUCT, BY_OTHER_SUM])
def test_a_norm_and_its_weight_are_one_call(written: dict[str, str]) -> None:
    assert_becomes(
        join_compounds,
        _change(NORM, written),
        """
        %3 "y": float32[2, 3, 16] = aten.rms_norm.default(%0, %1) {
          input: $0, weight: $1, normalized_shape: [16], eps: 0.25}
        return %3
        """,
        EPSILON,
    )


def test_a_result_that_is_read_before_the_weight_is_a_norm_without_one() -> None:
    assert_becomes(
        join_compounds,
        NORM.replace("return %9", "return %9, %8"),
        """
        %3 "rows": float32[2, 3, 16] = aten.rms_norm.default(%0) {input: $0, normalized_shape: [16], eps: 0.25}
        %4 "y": float32[2, 3, 16] = aten.mul.Tensor(%1, %3) {self: $0, other: $1}
        return %4, %3
        """,
        EPSILON,
    )


@pytest.mark.parametrize(
    "written",
    [
        {"exponent: 2.0": "exponent: 3.0"},
        {"aten.pow.Tensor_Scalar(%0) {self: $0, exponent: 2.0}": "aten.mul.Tensor(%0, %1) {self: $0, other: $1}"},
        {"aten.add.Tensor(%4, %2) {self: $0, other: $1}": "aten.add.Tensor(%4, %2) {self: $0, other: $1, alpha: 2}"},
        {"aten.add.Tensor(%4, %2)": "aten.add.Tensor(%4, %4)"},
        {"aten.mul.Tensor(%0, %7)": "aten.mul.Tensor(%3, %7)"},
        {"return %9": "return %9, %7"},
        {"float32": "float16"},
    ],
    ids=["power", "no square", "alpha", "no number", "other rows", "factor is read", "half precision"],
)
def test_another_computation_is_left_alone(written: dict[str, str]) -> None:
    numbers = {"epsilon": EPSILON["epsilon"].half()} if "float32" in written else EPSILON
    assert_stays(join_compounds, _change(NORM, written), numbers)


def test_a_mean_over_another_axis_is_left_alone() -> None:
    columns = {"dim: [2]": "dim: [1]", "[2, 3, 1]": "[2, 1, 16]"}
    assert_stays(join_compounds, _change(NORM, columns), EPSILON)


SILU = """
graph "gate" (%0 "x": float32[2, 16], %1 "z": float32[2, 16]) {
  %2 "share": float32[2, 16] = aten.sigmoid.default(%0) {self: $0}
  %3 "y": float32[2, 16] = aten.mul.Tensor(%2, %0) {self: $0, other: $1}

  return %3
}
"""


def test_a_product_with_its_sigmoid_is_silu() -> None:
    assert_becomes(
        join_compounds,
        SILU,
        """
        %2 "y": float32[2, 16] = aten.silu.default(%0) {self: $0}
        return %2
        """,
    )


@pytest.mark.parametrize(("old", "new"), [("(%2, %0)", "(%2, %1)"), ("return %3", "return %3, %2")])
def test_a_gate_of_another_value_is_left_alone(old: str, new: str) -> None:
    assert_stays(join_compounds, SILU.replace(old, new))


class Block(torch.nn.Module):
    """A norm as Llama writes it, and a feed-forward layer with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 48))
        self.gate, self.up = torch.nn.Linear(48, 70, bias=False), torch.nn.Linear(48, 70, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        gate = self.gate(rows)
        return gate * torch.sigmoid(gate) * self.up(rows)


@pytest.mark.parametrize("native", [False, True])
def test_a_gated_layer_keeps_its_values(native: bool) -> None:
    """By torch and in C++. float32: sums of 48 products near 1 in their own orders, and a few roundings more."""
    if native:
        native_library()
    torch.manual_seed(0)
    block, x = Block().eval(), torch.randn(1, 1, 48)
    graph = fuse(from_torch(functionalize_program(torch.export.export(block, (x,), strict=True))))
    kinds = [op.kind for op in graph.ops]
    assert kinds.count("aten.rms_norm.default") == 1
    assert [op.attrs["activation"] for op in graph.ops if op.kind == "LinearPointwise"] == ["silu"]
    (found,) = compile_graph(graph, dict(block.state_dict()), native=native).run({"x": x}).values()
    torch.testing.assert_close(found.double(), block.double()(x.double()), atol=2e-6, rtol=2e-5)


def _change(text: str, written: dict[str, str]) -> str:
    """The text with other parts, and its values numbered without a gap."""
    for old, new in written.items():
        assert old in text
        text = text.replace(old, new)
    numbers: dict[str, int] = {}
    return re.sub(r"%\d+", lambda found: f"%{numbers.setdefault(found[0], len(numbers))}", text)


# A Gather at one constant place is a view.

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
        %2 "y": float32[2] = aten.select.int(%0) {self: $0, dim: 0, index: 2}
        return %2
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
