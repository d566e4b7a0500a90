"""Attention becomes one call; what is no attention, or differs from the fused kernel, does not."""

from __future__ import annotations

import pytest
import torch

from pipeline.importers.from_torch import from_torch, functionalize_program
from pipeline.ir import check, from_text
from pipeline.lowering.fusion import fuse_attention, keep_scores
from pipeline.runtime import compile_graph
from pipeline.runtime.slots import with_weights
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays

BEFORE = """
graph "attention" (%0 "q": float32[1, 2, 3, 4], %1 "k": float32[1, 2, 4, 5], %2 "v": float32[1, 2, 5, 4]) {
  const %3 "half": float32[1]
  const %4 "zero": float32[]
  const %5 "mask": float32[1, 1, 1, 5]

  %6 "scaled": float32[1, 2, 3, 4] = aten.mul.Tensor(%0, %3) {self: $0, other: $1}
  %7 "scores": float32[1, 2, 3, 5] = aten.matmul.default(%6, %1) {self: $0, other: $1}
  %8 "masked": float32[1, 2, 3, 5] = aten.add.Tensor(%7, %5) {self: $0, other: $1}
  %9 "weights": float32[1, 2, 3, 5] = aten.softmax.int(%8) {self: $0, dim: -1}
  %10 "bad": bool[1, 2, 3, 5] = aten.ne.Tensor(%9, %9) {self: $0, other: $1}
  %11 "good": float32[1, 2, 3, 5] = aten.where.self(%10, %4, %9) {condition: $0, self: $1, other: $2}
  %12 "y": float32[1, 2, 3, 4] = aten.matmul.default(%11, %2) {self: $0, other: $1}

  return %12
}
"""

HALF = {"half": torch.tensor([0.5]), "zero": torch.tensor(0.0)}


@pytest.mark.parametrize(
    "mask", [torch.zeros(1, 1, 1, 5), torch.tensor([0, 0, -torch.inf, 0, -torch.inf]), torch.full((5,), -torch.inf)]
)
def test_scale_mask_softmax_and_both_products_are_one_call(mask: torch.Tensor) -> None:
    """Rows without any score are 0, which the traced form says by IsNaN and Where."""
    assert_becomes(
        fuse_attention,
        BEFORE,
        """
        %7 "k transposed": float32[1, 2, 5, 4] = aten.permute.default(%1) {self: $0, dims: [0, 1, 3, 2]}
        %8 "y by token": float32[1, 3, 2, 4] = ScaledDotProductAttention(%0, %7, %2, %5) {
          scale: 0.5, mask: true, causal: false, backend: "auto"}
        %6 "y": float32[1, 2, 3, 4] = aten.permute.default(%8) {self: $0, dims: [0, 2, 1, 3]}
        return %6
        """,
        {**HALF, "mask": mask.view(1, 1, 1, 5)},
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dim: -1", "dim: 2"),
        ("aten.where.self(%10, %4, %9)", "aten.where.self(%10, %3, %9)"),  # rows without a score are not 0
        ("aten.matmul.default(%11, %2)", "aten.matmul.default(%9, %2)"),  # and are NaN
        ("return %12", "return %12, %7"),
    ],
)
def test_another_computation_is_left_alone(old: str, new: str) -> None:
    assert old in BEFORE
    assert_stays(fuse_attention, BEFORE.replace(old, new), HALF)


def test_half_precision_is_joined_too() -> None:
    """For a GPU, where models run in float16."""
    text = GROUPED.replace("float32", "float16").replace("TOKENS", "3")
    stored = {"zero": torch.tensor(0.0), "lowest": torch.tensor(torch.finfo(torch.float16).min)}
    fused = fuse_attention(with_weights(from_text(text), {name: t.half() for name, t in stored.items()}))
    check(fused)
    assert [op.kind for op in fused.ops if op.kind == "ScaledDotProductAttention"] == ["ScaledDotProductAttention"]
    assert {value.spec.dtype for value in fused.values} == {"float16", "bool"}


SMALL = """
graph "small" (%0 "q": float32[1, 2, 3, 4], %1 "k": float32[1, 2, 4, 5], %2 "v": float32[1, 2, 5, 4]) {
  const %3 "two": float32[1]

  %5 "k transposed": float32[1, 2, 5, 4] = aten.permute.default(%1) {self: $0, dims: [0, 1, 3, 2]}
  %6 "t by token": float32[1, 3, 2, 4], %7 "t scores": float32[1, 2, 3, 5] = SmallAttention(%0, %5, %2) {scale: 2.0}
  %4 "t": float32[1, 2, 3, 4] = aten.permute.default(%6) {self: $0, dims: [0, 2, 1, 3]}

  return %4
}
"""


def test_few_tokens_without_a_mask_keep_their_scores_in_the_plan() -> None:
    assert_becomes(
        lambda graph: keep_scores(fuse_attention(graph)),
        """
        graph "small" (%0 "q": float32[1, 2, 3, 4], %1 "k": float32[1, 2, 4, 5], %2 "v": float32[1, 2, 5, 4]) {
          const %3 "two": float32[1]

          %4 "scaled": float32[1, 2, 3, 4] = aten.mul.Tensor(%0, %3) {self: $0, other: $1}
          %5 "scores": float32[1, 2, 3, 5] = aten.matmul.default(%4, %1) {self: $0, other: $1}
          %6 "weights": float32[1, 2, 3, 5] = aten.softmax.int(%5) {self: $0, dim: -1}
          %7 "t": float32[1, 2, 3, 4] = aten.matmul.default(%6, %2) {self: $0, other: $1}

          return %7
        }
        """,
        SMALL,
        {"two": torch.tensor([2.0])},
    )


JOINED = """
graph "joined" (%0 "q": float32[1, 2, 5, 4], %1 "k": float32[1, 2, 5, 4], %2 "v": float32[1, 2, 5, 4]) {
  %3 "y": float32[1, 5, 2, 4] = ScaledDotProductAttention(%0, %1, %2) {
    scale: 0.5, mask: false, causal: true, backend: "auto"}

  return %3
}
"""


def test_only_attention_that_sees_all_keys_keeps_its_scores() -> None:
    assert_stays(keep_scores, JOINED)
    fused = keep_scores(from_text(JOINED.replace("causal: true", "causal: false")))
    assert [op.kind for op in fused.ops] == ["SmallAttention"]


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.0)


class Causal(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("module", "tokens", "kinds"),
    [
        (Attention(), 5, ["SmallAttention", "aten.permute.default"]),
        (Attention(), 200, ["aten.scaled_dot_product_attention.default"]),
        (Causal(), 5, ["aten.scaled_dot_product_attention.default"]),
    ],
)
def test_the_operator_of_torch_is_joined_where_it_is_small_and_plain(
    module: torch.nn.Module, tokens: int, kinds: list[str]
) -> None:
    operands = tuple(torch.randn(1, 2, tokens, 4) for _ in range(3))
    graph = keep_scores(from_torch(functionalize_program(torch.export.export(module, operands, strict=True))))
    assert [op.kind for op in graph.ops] == kinds
    feed = {graph.values[vid].name: tensor for vid, tensor in zip(graph.inputs, operands, strict=True)}
    (found,) = compile_graph(graph).run(feed).values()
    torch.testing.assert_close(found, module(*operands), atol=1e-5, rtol=1e-5)


GROUPED = """
graph "grouped" (%0 "q": float32[2, 6, TOKENS, 4], %1 "k": float32[2, 2, 5, 4], %2 "v": float32[2, 2, 5, 4],
                 %3 "seen": bool[1, 1, TOKENS, 5]) {
  const %4 "zero": float32[]
  const %5 "lowest": float32[]

  %6 "k1": float32[2, 2, 1, 5, 4] = aten.reshape.default(%1) {self: $0, shape: [2, 2, 1, 5, 4]}
  %7 "k3": float32[2, 2, 3, 5, 4] = aten.expand.default(%6) {self: $0, size: [2, 2, 3, 5, 4]}
  %8 "flat": float32[12, 5, 4] = aten.reshape.default(%7) {self: $0, shape: [12, 5, 4]}
  %9 "turned": float32[12, 4, 5] = aten.permute.default(%8) {self: $0, dims: [0, 2, 1]}
  %10 "keys": float32[2, 6, 4, 5] = aten.reshape.default(%9) {self: $0, shape: [2, 6, 4, 5]}
  %11 "v1": float32[2, 2, 1, 5, 4] = aten.reshape.default(%2) {self: $0, shape: [2, 2, 1, 5, 4]}
  %12 "v3": float32[2, 2, 3, 5, 4] = aten.expand.default(%11) {self: $0, size: [2, 2, 3, 5, 4]}
  %13 "values": float32[2, 6, 5, 4] = aten.reshape.default(%12) {self: $0, shape: [2, 6, 5, 4]}
  %14 "mask": float32[1, 1, TOKENS, 5] = aten.where.self(%3, %4, %5) {condition: $0, self: $1, other: $2}
  %15 "scores": float32[2, 6, TOKENS, 5] = aten.matmul.default(%0, %10) {self: $0, other: $1}
  %16 "masked": float32[2, 6, TOKENS, 5] = aten.add.Tensor(%15, %14) {self: $0, other: $1}
  %17 "weights": float32[2, 6, TOKENS, 5] = aten.softmax.int(%16) {self: $0, dim: 3}
  %18 "y": float32[2, 6, TOKENS, 4] = aten.matmul.default(%17, %13) {self: $0, other: $1}

  return %18
}
"""
"""Six heads of the query over two of the cache, as the exporter writes it."""

LOWEST = {"zero": torch.tensor(0.0), "lowest": torch.tensor(torch.finfo(torch.float32).min)}


@pytest.mark.parametrize("tokens", [1, 3])
def test_heads_of_a_group_are_tokens_of_one_head(tokens: int) -> None:
    graph = with_weights(from_text(GROUPED.replace("TOKENS", str(tokens))), LOWEST)
    fused = fuse_attention(graph)
    check(fused)
    (call,) = (op for op in fused.ops if op.kind == "ScaledDotProductAttention")
    assert [fused.values[vid].name for vid in call.inputs[1:3]] == ["k", "v"]
    assert fused.values[call.inputs[0]].spec.shape == (2, 2, 3 * tokens, 4)
    assert ("aten.expand.default" in {op.kind for op in fused.ops}) is (tokens > 1), "one row serves all tokens"
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 6, tokens, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4)}
    feed = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    feed["seen"] = torch.rand(1, 1, tokens, 5, generator=generator) > 0.4
    feed["seen"][0, 0, 0] = False  # a token that sees nothing weighs all alike, since the mask is finite
    expected = compile_graph(graph).run(feed)["y"]
    torch.testing.assert_close(compile_graph(fused).run(feed)["y"], expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[2, 2, 3, 5, 4] = aten.expand.default(%11)", "[2, 2, 3, 5, 4] = aten.repeat.default(%11)"),
        (
            "aten.permute.default(%8) {self: $0, dims: [0, 2, 1]}",
            "aten.reshape.default(%8) {self: $0, shape: [12, 4, 5]}",
        ),
    ],
)
def test_heads_that_are_spread_otherwise_are_no_groups(old: str, new: str) -> None:
    text = GROUPED.replace("TOKENS", "3")
    assert old in text
    if "repeat" in new:
        text = text.replace("%11) {self: $0, size: [2, 2, 3, 5, 4]}", "%11) {self: $0, repeats: [1, 1, 3, 1, 1]}")
    fused = fuse_attention(with_weights(from_text(text.replace(old, new)), LOWEST))
    (call,) = (op for op in fused.ops if op.kind == "ScaledDotProductAttention")
    assert fused.values[call.inputs[0]].spec.shape == (2, 6, 3, 4)


def test_a_mask_that_may_be_infinite_is_left_alone() -> None:
    graph = with_weights(from_text(GROUPED.replace("TOKENS", "3")), {**LOWEST, "lowest": torch.tensor(-torch.inf)})
    assert fuse_attention(graph) is graph


@pytest.mark.parametrize("role", ["param", "state"])
def test_a_mask_that_may_become_infinite_is_left_alone(role: str) -> None:
    """Its owner may write to it between two runs, and a run to a state."""
    text = GROUPED.replace("TOKENS", "3").replace('const %5 "lowest"', f'{role} %5 "lowest"')
    graph = with_weights(from_text(text), LOWEST)
    assert fuse_attention(graph) is graph
