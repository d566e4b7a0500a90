"""Operators that work row by row become one row program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.importers.from_torch import from_torch, functionalize_program
from pipeline.ir import InputRef, TensorSpec, check
from pipeline.lowering.fusion import fuse_rows, fuse_train_step
from pipeline.runtime import CheckedBuilder, RecordingDevice, compile_graph
from pipeline.training import record_step
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays

BEFORE = """
graph "norm" (%0 "x": float32[2, 8, 16], %1 "r": float32[2, 8, 16]) {
  const %2 "w": float32[16]

  %3 "s": float32[2, 8, 16] = aten.add.Tensor(%0, %1) {self: $0, other: $1}
  %4 "n": float32[2, 8, 16] = aten.rms_norm.default(%3, %2) {
    input: $0, normalized_shape: [16], weight: $1, eps: 1e-06
  }
  %5 "y": float32[2, 8, 16] = aten.silu.default(%4) {self: $0}

  return %5
}
"""


def test_a_sum_its_norm_and_an_activation() -> None:
    program = "add(i0, i1); square(v0); mean(v1); add(v2, 1e-06); rsqrt(v3); mul(v0, v4); mul(v5, i2); silu(v6)"
    assert_becomes(
        fuse_rows,
        BEFORE,
        f"""
        %3 "y": float32[2, 8, 16] = RowProgram(%0, %1, %2) {{program: "{program}"}}
        return %3
        """,
    )


def test_a_value_that_is_read_twice_is_computed_once() -> None:
    """It ends a program of its own, and is an operand of the next."""
    assert_becomes(
        fuse_rows,
        BEFORE.replace("return %5", "return %5, %3"),
        """
        %3 "s": float32[2, 8, 16] = aten.add.Tensor(%0, %1) {self: $0, other: $1}
        %4 "y": float32[2, 8, 16] = RowProgram(%3, %2) {
          program: "square(i0); mean(v0); add(v1, 1e-06); rsqrt(v2); mul(i0, v3); mul(v4, i1); silu(v5)"
        }
        return %4, %3
        """,
    )


ONE = """
graph "one" (%0 "x": {dtype}[2, {size}], %1 "r": {dtype}[2, {size}]) {{
  %2 "s": {dtype}[2, {size}] = {first}
  %3 "y": {dtype}[2, {size}] = {second}

  return %3
}}
"""
ADD, ADD_AGAIN = "aten.add.Tensor(%0, %1) {self: $0, other: $1}", "aten.add.Tensor(%2, %1) {self: $0, other: $1}"
AMAX = "aten.amax.default(%2) {self: $0, dim: [-1], keepdim: true}"
SOFTMAX = "aten.softmax.int(%2) {self: $0, dim: -1}"


@pytest.mark.parametrize(
    ("dtype", "size", "first", "second"),
    [
        pytest.param("int64", 4, ADD, ADD_AGAIN, id="integers"),
        pytest.param("float64", 4, ADD, ADD_AGAIN, id="float64, which a program would round"),
        pytest.param("float32", 20000, ADD, SOFTMAX, id="rows that no block holds"),
        pytest.param("float32", 4, ADD, SOFTMAX.replace("-1", "0"), id="a softmax along another axis"),
        pytest.param("float32", 4, ADD, ADD_AGAIN.replace("}", ", alpha: 2}"), id="a factor"),
        pytest.param("float32", 1, ADD, AMAX, id="a maximum, of which Triton would leave out what is not a number"),
    ],
)
def test_what_a_program_cannot_hold_stays(dtype: str, size: int, first: str, second: str) -> None:
    assert_stays(fuse_rows, ONE.format(dtype=dtype, size=size, first=first, second=second))


NO_FIRST_OPERAND = {
    "bools alone": """
        graph "g" (%0 "c": bool[2, 4]) {
          %1 "a": float32[2, 4] = aten.sqrt.default(%0) {self: $0}
          %2 "y": float32[2, 4] = aten.neg.default(%1) {self: $0}

          return %2
        }
    """,
    "a rotated operand alone": """
        graph "g" (%0 "x": float32[2, 4]) {
          %1 "b": float32[2, 2] = aten.slice.Tensor(%0) {self: $0, dim: -1, start: 2, end: 4}
          %2 "n": float32[2, 2] = aten.neg.default(%1) {self: $0}
          %3 "a": float32[2, 2] = aten.slice.Tensor(%0) {self: $0, dim: -1, start: 0, end: 2}
          %4 "r": float32[2, 4] = aten.cat.default(%2, %3) {tensors: [$0, $1], dim: -1}
          %5 "y": float32[2, 4] = aten.exp.default(%4) {self: $0}

          return %5
        }
    """,
    "a number alone": """
        graph "g" () {
          const %0 "c": float32[1]

          %1 "a": float32[1] = aten.exp.default(%0) {self: $0}
          %2 "y": float32[1] = aten.neg.default(%1) {self: $0}

          return %2
        }
    """,
}


@pytest.mark.parametrize("case", NO_FIRST_OPERAND)
def test_without_an_operand_that_the_result_may_overwrite_nothing_changes(case: str) -> None:
    assert_stays(fuse_rows, NO_FIRST_OPERAND[case], {"c": torch.ones(1)} if "number" in case else None)


def test_a_softmax_of_a_column_is_not_one_of_the_rows_to_which_it_is_spread() -> None:
    softmax = SOFTMAX.replace("%2", "%0")
    assert_becomes(
        fuse_rows,
        f"""
        graph "g" (%0 "x": float32[2, 1], %1 "z": float32[2, 4]) {{
          %2 "s": float32[2, 1] = {softmax}
          %3 "m": float32[2, 4] = aten.mul.Tensor(%2, %1) {{self: $0, other: $1}}
          %4 "y": float32[2, 4] = aten.exp.default(%3) {{self: $0}}

          return %4
        }}
        """,
        f"""
        %2 "s": float32[2, 1] = {softmax}
        %3 "y": float32[2, 4] = RowProgram(%1, %2) {{program: "mul(i1, i0); exp(v0)"}}
        return %3
        """,
    )


def test_a_sum_of_bools_is_no_sum_of_their_numbers() -> None:
    add = "aten.add.Tensor(%0, %1) {self: $0, other: $1}"
    assert_becomes(
        fuse_rows,
        f"""
        graph "g" (%0 "a": bool[2, 4], %1 "b": bool[2, 4], %2 "x": float32[2, 4]) {{
          %3 "s": bool[2, 4] = {add}
          %4 "m": float32[2, 4] = aten.mul.Tensor(%3, %2) {{self: $0, other: $1}}
          %5 "y": float32[2, 4] = aten.exp.default(%4) {{self: $0}}

          return %5
        }}
        """,
        f"""
        %3 "s": bool[2, 4] = {add}
        %4 "y": float32[2, 4] = RowProgram(%2, %3) {{program: "mul(i1, i0); exp(v0)"}}
        return %4
        """,
    )


def test_a_chain_of_many_operators_is_several_programs() -> None:
    builder = CheckedBuilder("long")
    spec = TensorSpec((2, 4), "float32")
    value = builder.input("x", spec)
    for number in range(300):
        (value,) = builder.emit("aten.sin.default", [value], [(f"v{number}", spec)], {"self": InputRef(0)})
    graph = fuse_rows(builder.build([value]))
    check(graph)
    assert [str(op.attrs["program"]).count("sin") for op in graph.ops] == [44, 64, 64, 64, 64]


class Rotary(nn.Module):
    """A layer as in a Llama: norm, rotary embedding of a transposed product, softmax with mask, gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query = nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 32)
        self.gate, self.up = nn.Linear(32, 24), nn.Linear(32, 24)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = self.query(self.norm(x)).view(2, 5, 4, 8).transpose(1, 2)
        halves = torch.cat((-heads[..., 4:], heads[..., :4]), -1)
        heads = heads * cos + halves * sin
        weights = torch.softmax(heads @ heads.transpose(2, 3) * 0.35 + mask, -1)
        mixed = (weights @ heads).transpose(1, 2).reshape(2, 5, 32)
        return nn.functional.silu(self.gate(mixed)) * self.up(mixed)


def test_a_layer_of_a_llama() -> None:
    module = Rotary().eval().requires_grad_(False)
    mask = torch.full((5, 5), float("-inf")).triu(1)
    args = (torch.randn(2, 5, 32), torch.rand(1, 1, 5, 8), torch.rand(1, 1, 5, 8), mask)
    before = from_torch(functionalize_program(torch.export.export(module, args, strict=False)))
    graph = fuse_rows(before)
    check(graph)
    programs = [op.attrs["program"] for op in graph.ops if op.kind == "RowProgram"]
    assert programs == [
        "square(i0); mean(v0); add(v1, 1e-06); rsqrt(v2); mul(i0, v3); mul(v4, i1)",
        "mul(i2, i0); rotate(i2); mul(v1, i1); add(v0, v2)",
        "mul(i0, 0.35); add(v0, i1); amax(v1); sub(v1, v2); exp(v3); sum(v4); div(v4, v5)",
        "silu(i0); mul(v0, i1)",
    ]
    feed = {before.values[vid].name: tensor for vid, tensor in zip(before.inputs, args, strict=True)}
    (found,) = compile_graph(graph, dict(module.state_dict())).run(feed).values()
    torch.testing.assert_close(found, module(*args), atol=1e-5, rtol=1e-5)  # float32, sums of up to 32 terms


def test_pieces_are_rotated_as_slices_are() -> None:
    class Turn(nn.Module):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, -1)
            return x * cos + torch.cat([-right, left], -1) * sin

    module, args = Turn(), (torch.randn(3, 8), torch.rand(8), torch.rand(8))
    graph = fuse_rows(from_torch(functionalize_program(torch.export.export(module, args, strict=False))))
    (program,) = (op.attrs["program"] for op in graph.ops if op.kind == "RowProgram")
    assert str(program).count("rotate") == 1
    feed = {graph.values[vid].name: tensor for vid, tensor in zip(graph.inputs, args, strict=True)}
    (found,) = compile_graph(graph).run(feed).values()
    torch.testing.assert_close(found, module(*args), atol=1e-6, rtol=1e-6)  # float32, one rounding in place of three


def test_halves_whose_outer_ends_are_left_out_are_rotated() -> None:
    assert_becomes(
        fuse_rows,
        """
        graph "g" (%0 "x": float32[2, 4], %1 "y": float32[2, 4]) {
          %2 "b": float32[2, 2] = aten.slice.Tensor(%0) {self: $0, dim: -1, start: 2}
          %3 "n": float32[2, 2] = aten.neg.default(%2) {self: $0}
          %4 "a": float32[2, 2] = aten.slice.Tensor(%0) {self: $0, dim: -1, end: 2}
          %5 "r": float32[2, 4] = aten.cat.default(%3, %4) {tensors: [$0, $1], dim: -1}
          %6 "z": float32[2, 4] = aten.mul.Tensor(%5, %1) {self: $0, other: $1}

          return %6
        }
        """,
        """
        %2 "z": float32[2, 4] = RowProgram(%1, %0) {program: "rotate(i1); mul(v0, i0)"}
        return %2
        """,
    )


def test_half_precision_is_rounded_once() -> None:
    """A program is closer to float64 than operators that round in turn."""

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.sigmoid(x * 1.7) * x + 0.3) * x

    module, x = Chain(), torch.randn(64, 33, dtype=torch.float16)
    graph = fuse_rows(from_torch(functionalize_program(torch.export.export(module, (x,)))))
    assert [op.kind for op in graph.ops] == ["RowProgram"]
    (found,) = compile_graph(graph).run({graph.values[graph.inputs[0]].name: x}).values()
    exact = module(x.double())
    assert (found - exact).abs().max() < (module(x) - exact).abs().max()
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=2**-11)  # half a step of float16


def test_rounded_elements_are_compared_as_torch_does() -> None:
    """In float16 the number 0.1 is rounded too: it is no larger than the element that is 0.1."""

    class Threshold(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x * 2 >= 0.1, x, x + 5) * 3

    module, x = Threshold(), torch.tensor([[0.05, 0.04, 0.06]], dtype=torch.float16)
    graph = fuse_rows(from_torch(functionalize_program(torch.export.export(module, (x,)))))
    (found,) = compile_graph(graph).run({graph.values[graph.inputs[0]].name: x}).values()
    torch.testing.assert_close(found, module(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.product(x) + x) * 0.5 + torch.tanh(x * 2)


def test_a_train_step_on_a_gpu_has_row_programs_and_learns_as_on_the_cpu() -> None:
    losses = []
    for device in ("cpu", RecordingDevice()):
        torch.manual_seed(0)
        module, batch = Residual(), (torch.randn(6, 8), torch.randn(6, 8))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        program = record_step(module, nn.functional.mse_loss, optimizer, batch, device=device)
        losses.append([float(program.step(batch)) for _ in range(5)])
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-5)  # float32, sums of eight terms
    fused = fuse_train_step(program.graph, rows=True)
    assert [op.attrs["program"] for op in fused.ops if op.kind == "RowProgram"] == [
        "add(i0, i1); mul(v0, 0.5); mul(i1, 2.0); tanh(v2); add(v1, v3)"
    ]
