"""Each rule of the pass `rows`, by a call that it is about: what becomes a program, and that its numbers stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as f

from pipeline.ir import Graph, check
from pipeline.ir.graph import TensorSpec, devices_of, to_device
from pipeline.lowering.fusion import fuse_rows
from pipeline.ops import GraphBuilder
from pipeline.runtime import compile_graph, compile_open_graph
from tests.support.torch_programs import Calls, feed_of, graph_of

Function = Callable[..., torch.Tensor]

X, Y = torch.linspace(-2, 3, 24).view(2, 3, 4), torch.linspace(0.1, 2, 24).view(2, 3, 4)
ROW, COLUMN = torch.tensor([0.5, -1.0, 2.0, 3.0]), torch.tensor([[0.5], [-1.0], [2.0]])
HALF, WHOLE = X.half(), torch.arange(24).view(2, 3, 4)
MASK = (torch.arange(24) % 3 == 0).view(2, 3, 4)
WEIGHT, TWO = torch.tensor([1.0, 2.0, 0.5, -1.0]), torch.tensor([2.0])


def programs_of(graph: Graph) -> list[str]:
    return [str(op.attrs["program"]) for op in graph.ops if op.kind == "RowProgram"]


def fused(function: Function, ins: list[torch.Tensor]) -> list[str]:
    """The programs of `function` after the pass, whose results are those of torch."""
    graph = graph_of(Calls([function]), ins)
    after = fuse_rows(graph)
    check(after)
    (found,) = compile_graph(after).run(feed_of(graph, ins)).values()
    expected = function(*ins)
    # float32: sums of four terms in another order; float16: one rounding in place of several
    tolerance = 4e-3 if torch.float16 in {operand.dtype for operand in ins} else 1e-5
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    return programs_of(after)


def rotated(x: torch.Tensor, *parts: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """A sum with what the result may be written over, since a row that is rotated is read out of order."""
    return torch.cat(parts, dim) * 2 + x.roll(1, 0)


def rotated_part(x: torch.Tensor, longer: torch.Tensor) -> torch.Tensor:
    return rotated(x, -longer[..., 2:4], longer[..., :2])


NORM = "square(i0); mean(v0); add(v1, 0.001); rsqrt(v2); mul(i0, v3)"
LAYER_NORM = "mean(i0); sub(i0, v0); square(v1); mean(v2); add(v3, 1e-05); rsqrt(v4); mul(v1, v5)"
SOFTMAX = "amax(v0); sub(v0, v1); exp(v2); sum(v3); div(v3, v4)"

HELD: dict[str, tuple[Function, list[torch.Tensor], str]] = {
    "a row of the result's shape or less": (lambda x, r: (x + r).exp(), [X, ROW], "add(i0, i1); exp(v0)"),
    "a column": (lambda x, c: (x * c).exp(), [X, COLUMN], "mul(i0, i1); exp(v0)"),
    "a number": (lambda x: (3 - x).sin(), [X], "sub(3.0, i0); sin(v0)"),
    "a constant of one element": (lambda x: (x * TWO).sin(), [X], "mul(i0, 2.0); sin(v0)"),
    "a truth value as a number": (lambda x: torch.add(x, True).sin(), [X], "add(i0, 1.0); sin(v0)"),
    "an operand that is read twice": (lambda x: x * x + x, [X], "mul(i0, i0); add(v0, i0)"),
    "powers": (
        lambda x: x**2 + x**0.5 + x**-0.5 + x**-1,
        [Y],
        "square(i0); sqrt(i0); add(v0, v1); rsqrt(i0); add(v2, v3); reciprocal(i0); add(v4, v5)",
    ),
    "a power by a constant": (lambda x: x**TWO + 1, [Y], "square(i0); add(v0, 1.0)"),
    "both forms of GELU": (
        lambda x: f.gelu(x) + f.gelu(x, approximate="tanh"),
        [X],
        "gelu(i0); gelu_tanh(i0); add(v0, v1)",
    ),
    "a clamp whose bounds have changed places": (
        lambda x: x.clamp(1, -1) * 2,
        [X],
        "maximum(i0, 1.0); minimum(v0, -1.0); mul(v1, 2.0)",
    ),
    "one bound": (lambda x: x.clamp(max=1) + x.clamp_min(0), [X], "minimum(i0, 1.0); maximum(i0, 0.0); add(v0, v1)"),
    "what a mask fills": (
        lambda x, m: (x + 1).masked_fill(m, -2.0),
        [X, MASK],
        "add(i0, 1.0); where(i1, -2.0, v0)",
    ),
    "a choice by a comparison": (
        lambda x, y: torch.where(x > y, x, y + 1),
        [X, Y],
        "gt(i0, i1); add(i1, 1.0); where(v0, i0, v1)",
    ),
    "casts between floats": (
        lambda x, y: ((x.float() + 1).to(torch.float16) * y.to(x)).type_as(y),
        [HALF, Y],
        "add(i0, 1.0); float16(v0); float16(i1); mul(v1, v2); float16(v3)",
    ),
    "a cast whose rounding is read": (lambda x: x.bfloat16().float() - x, [X], "bfloat16(i0); sub(v0, i0)"),
    "what is too large for a cast": (
        lambda x: (x * 1e5).half().float() * 2,
        [X],
        "mul(i0, 100000.0); float16(v0); mul(v1, 2.0)",
    ),
    "a comparison of what was rounded before a cast": (
        lambda x: torch.where((x / 3).float() * 3 >= x.float(), 1.0, x.float()),
        [HALF],
        "div(i0, 3.0); float16(v0); mul(v1, 3.0); ge(v2, i0); where(v3, 1.0, i0)",
    ),
    "what was rounded before another dtype joined": (
        lambda x, y: (x * 3 + y - y * 2 > 2).float() * y,
        [HALF, Y],
        "",
    ),
    "a narrow sum of wide rows": (
        lambda x: x / x.sum(-1, keepdim=True, dtype=torch.float16),
        [Y],
        "float16(i0); sum(v0); float16(v1); div(i0, v2)",
    ),
    "a narrow softmax of wide rows": (
        lambda x: (x * 1e5).softmax(-1, dtype=torch.float16).float() * 2,
        [X],
        "",
    ),
    "truth values as numbers": (lambda x, y: (x > y).float() * x, [X, Y], "gt(i0, i1); mul(v0, i0)"),
    "a softmax that begins with large numbers": (lambda x: (x * 100).softmax(2), [X], f"mul(i0, 100.0); {SOFTMAX}"),
    "a layer norm alone": (lambda x: f.layer_norm(x, (4,)), [X], LAYER_NORM),
    "an RMS norm with a weight": (lambda x: f.rms_norm(x, (4,), WEIGHT, 1e-3), [X], f"{NORM}; mul(v4, i1)"),
    "a mean of rows that are read too": (lambda x: x - (x * 2).mean(2, keepdim=True), [X], ""),
    "a softmax of rounded scores in float32": (
        lambda x: (x * 3).softmax(-1, dtype=torch.float32).half(),
        [HALF],
        "mul(i0, 3.0); float16(v0); amax(v1); sub(v1, v2); exp(v3); sum(v4); div(v4, v5)",
    ),
    "a sum of truth values": (
        lambda x, m: x / m.sum(-1, keepdim=True, dtype=torch.float32),
        [Y, MASK],
        "sum(i1); div(i0, v0)",
    ),
    "a sum of rows": (lambda x: x / x.sum(-1, keepdim=True), [Y], "sum(i0); div(i0, v0)"),
}
"""What a program holds → a function, its operands and the program; empty where the test only looks for one program."""


@pytest.mark.parametrize("case", HELD)
def test_a_program_holds(case: str) -> None:
    function, ins, program = HELD[case]
    (found,) = fused(function, ins)
    assert not program or found == program


STAYS: dict[str, tuple[Function, list[torch.Tensor]]] = {
    "casts alone": (lambda x: x.float().half().float(), [HALF]),
    "a cast of integers": (lambda x: x.float() + 1, [WHOLE]),
    "an operand of integers": (lambda x, w: (x + w) * 2, [X, WHOLE]),
    "a quotient that is rounded": (lambda x, y: torch.div(x, y, rounding_mode="floor") * 2, [X, Y]),
    "a power by another number": (lambda x: x**3 * 2, [X]),
    "a result of truth values": (lambda x, y: x * 2 > y, [X, Y]),
    "a result of float64": (lambda x: (x * 2).double(), [X]),
    "a clamp by a tensor": (lambda x, r: x.clamp(r, r + 1), [X, ROW]),
    "a softmax in another dtype": (lambda x: x.softmax(-1, dtype=torch.float64), [X]),
    "a norm of two axes": (lambda x: f.layer_norm(x, (3, 4)), [X]),
    "a norm of a long row": (lambda x: f.layer_norm(x, (16385,)), [torch.ones(1, 16385)]),
    "an RMS norm whose epsilon is that of its dtype": (lambda x: f.rms_norm(x, (4,)), [X]),
    "a mean in another dtype": (lambda x: x.mean(-1, keepdim=True, dtype=torch.float64), [X]),
}


@pytest.mark.parametrize("case", STAYS)
def test_no_program_holds(case: str) -> None:
    assert not fused(*STAYS[case])


OTHER_ROTATIONS: dict[str, Function] = {
    "along another axis": lambda x: rotated(x, -x[:, 1:], x[:, :1], dim=1),
    "of three parts": lambda x: rotated(x, -x[..., 2:], x[..., :1], x[..., 1:2]),
    "without a sign": lambda x: rotated(x, x[..., 2:] * 1.5, x[..., :2]),
    "of two tensors": lambda x: rotated(x, -(x * 2)[..., 2:], x[..., :2]),
    "of other parts": lambda x: rotated(x, -x[..., 1:], x[..., :1]),
    "in the other order": lambda x: rotated(x, -x[..., :2], x[..., 2:]),
    "with a step": lambda x: rotated(x, -x[..., ::2], x[..., :2]),
    "whose first half is another one": lambda x: rotated(x, -x[..., 1:3], x[..., :2]),
    "whose second half is another one": lambda x: rotated(x, -x[..., 2:], x[..., 1:3]),
    "of longer rows": lambda x: rotated_part(x, x.repeat(1, 1, 2)),
}


@pytest.mark.parametrize("case", OTHER_ROTATIONS)
def test_what_is_no_rotation(case: str) -> None:
    assert "rotate" not in "".join(fused(OTHER_ROTATIONS[case], [X]))


def test_a_clamp_by_a_size_that_is_open_stays_and_the_rest_is_a_program() -> None:
    """A program has numbers; the size of another input is one when that is fed."""

    def clamped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.clamp(max=y.shape[0] - 4) * 2 + x.clamp(min=y.shape[0] - 5, max=9).sin()

    ins = [X, torch.ones(5, 2)]
    graph = graph_of(Calls([clamped]), ins, dynamic_shapes=(({}, {0: torch.export.Dim("n")}),))
    after = fuse_rows(graph)
    check(after)
    assert programs_of(after) == ["mul(i0, 2.0); sin(i1); add(v0, v1)"]
    (found,) = compile_open_graph(after).run(feed_of(graph, ins)).values()
    torch.testing.assert_close(found, clamped(*ins))


def test_an_odd_row_has_no_halves_and_an_open_end_is_the_end() -> None:
    x = torch.linspace(-2, 3, 10).view(2, 5)
    assert "rotate" not in "".join(fused(lambda x: rotated(x, -x[:, 2:], x[:, :2]), [x]))
    assert "rotate" in "".join(fused(lambda x: rotated(x, -x[:, 2:100], x[:, :2]), [X[0]]))


def test_a_row_is_as_long_as_a_block_and_no_longer() -> None:
    for size, is_held in ((16384, True), (16385, False)):
        found = fused(lambda x: (x * 0.5).softmax(-1), [torch.linspace(-1, 1, size).view(1, size)])
        assert bool(found) is is_held
        found = fused(lambda x: x / x.square().mean(-1, keepdim=True), [torch.linspace(-1, 1, size).view(1, size)])
        assert any("mean" in text for text in found) is is_held
    x = torch.linspace(-1, 1, 16386).view(1, 16386)
    assert fused(lambda x: rotated(x, -x[:, 8193:], x[:, :8193]), [x]) == ["mul(i0, 2.0); add(v0, i1)"]


def test_what_is_one_for_all_rows_is_computed_once() -> None:
    found = fused(lambda x, r: (x + (r * 2).exp()).sin(), [X, ROW])
    assert found == ["mul(i0, 2.0); exp(v0)", "add(i0, i1); sin(v0)"]
    assert fused(lambda x: (x * 2).sum(-1, keepdim=True).exp().sin(), [X]) == ["exp(i0); sin(v0)"]


def test_twelve_operands_are_a_program_and_thirteen_are_left() -> None:
    def add(*terms: torch.Tensor) -> torch.Tensor:
        return torch.stack([sum(terms[1:], terms[0])])[0]  # type: ignore[return-value]

    for count in (12, 13):
        found = fused(add, [X * number for number in range(1, count + 1)])
        assert max((text.count("add") for text in found), default=0) == 11


def test_what_lies_in_another_order_is_computed_where_it_lies() -> None:
    """Operands of several rows are moved, a row stays; a result whose rows lie in pieces has no program."""

    def heads(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return ((x.transpose(0, 1) + y.transpose(0, 1)) * r).exp()

    assert fused(heads, [X, Y, ROW]) == ["add(i0, i1); mul(v0, i2); exp(v1)"]
    assert fused(lambda x, y: (x.transpose(1, 2) + y.transpose(1, 2)).exp(), [X, Y]) == []
    order = torch.linspace(-1, 1, 120).view(2, 3, 4, 5)
    assert fused(lambda x, r: (x.permute(2, 0, 1, 3) * r).exp(), [order, torch.ones(5) * 2]) == ["mul(i0, i1); exp(v0)"]


def test_heads_are_rotated_by_angles_of_fewer_axes() -> None:
    """The angles of each token, for all batches and heads; the product by heads lies in the order of tokens."""

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, 3, 2, 4).transpose(1, 2)
        return (heads * cos + torch.cat((-heads[..., 2:], heads[..., :2]), -1) * sin) * weight

    ins = [torch.linspace(-2, 3, 48).view(2, 3, 8), X[0], Y[1], WEIGHT]
    assert fused(rotate, ins) == ["mul(i3, i0); rotate(i3); mul(v1, i1); add(v0, v2); mul(v3, i2)"]
    kinds = [op.kind for op in fuse_rows(graph_of(Calls([rotate]), ins)).ops]
    assert kinds.count("aten.permute.default") == 4, "one row is the same for all axes: x, cos and sin, and back"


def test_values_without_rows_or_elements_have_no_program() -> None:
    assert fused(lambda x: (x + 1).exp(), [torch.tensor(2.0)]) == []
    assert fused(lambda x: (x + 1).exp(), [torch.empty(2, 0)]) == []


def test_a_program_that_grew_too_long_gives_back_what_it_took() -> None:
    """At its 65th instruction a program ends at an operand, whose own operands are none of the program's."""

    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(58):
            x = x.sin()
        return (x + y.cos().softmax(-1)) * 2

    assert max(text.count(";") + 1 for text in fused(chain, [X, Y])) <= 64


def test_what_is_declared_anew_lies_where_the_graph_does() -> None:
    graph = graph_of(Calls([lambda x, y: ((x.transpose(0, 1) + y.transpose(0, 1)) * 2).exp()]), [X, Y])
    assert devices_of(fuse_rows(to_device(graph, "cuda:0"))) == ("cuda:0",)


def test_a_constant_whose_value_is_not_there_is_an_operand() -> None:
    """As in a graph that gets its weights when it is compiled."""
    builder, row = GraphBuilder("open"), TensorSpec((2, 3), "float32")
    x, number = builder.input("x", row), builder.const("number", TensorSpec((1,), "float32"), None)
    (product,) = builder.emit("aten.mul.Tensor", [x, number], [("product", row)])
    graph = fuse_rows(builder.build(builder.emit("aten.exp.default", [product], [("y", row)])))
    assert programs_of(graph) == ["mul(i0, i1); exp(v0)"]
    (found,) = compile_graph(graph, {"number": torch.tensor([0.5])}).run({"x": torch.zeros(2, 3)}).values()
    assert found.eq(1).all()
