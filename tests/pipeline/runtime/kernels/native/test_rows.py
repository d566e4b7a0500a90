"""Normalisation, softmax and attention in C++ beside float64: odd sizes, strides, -inf, NaN, in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Launch
from pipeline.runtime.kernels.native import KERNELS
from tests.support.native import bind_native, native_library

COLUMNS = st.sampled_from((1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130, 513))
ROWS = st.sampled_from((1, 2, 7, 33))

ATOL, RTOL = 2e-6, 2e-5
"""float32: each result is a few roundings (6e-8) from a row sum of up to 513 numbers near 1, in four partial sums."""


def bind(kind: Kind | str, ins: list[torch.Tensor], outs: list[torch.Tensor], **attrs: Any) -> Launch | None:
    """A kind of ours, or an operator of torch."""
    if isinstance(kind, str):
        return bind_native(kind, ins, outs, **attrs)
    if kind is Kind.ScaledDotProductAttention:
        attrs = {"causal": False, "backend": "auto", **attrs}
    return KERNELS[kind](native_library(), ins, outs, attrs)


def launch(kind: Kind | str, ins: list[torch.Tensor], outs: list[torch.Tensor], **attrs: Any) -> None:
    found = bind(kind, ins, outs, **attrs)
    assert found is not None
    found()


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


@settings(max_examples=60, deadline=None)
@given(ROWS, COLUMNS, st.booleans(), st.booleans(), st.integers(0, 2**16))
def test_layer_normalisation(rows: int, columns: int, with_bias: bool, apart: bool, seed: int) -> None:
    """Also of rows with other numbers between them, and far from 0, where a sum of squares would lose the variance."""
    x = (draw(seed, rows, columns + 5)[:, :columns] if apart else draw(seed, rows, columns)) + 10
    weights = [draw(seed + 1, columns), *([draw(seed + 2, columns)] if with_bias else [])]
    out = torch.full((rows, columns), torch.nan)
    launch("aten.layer_norm.default", [x, *weights], [out], normalized_shape=tuple(x.shape[-1:]), eps=1e-5)
    wanted = functional.layer_norm(x.double(), (columns,), *(weight.double() for weight in weights), eps=1e-5)
    # Values near 10 and their mean are off by some units of 1e-6, which a row divides by its deviation.
    deviation = (x.double().var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    bound = 2e-6 / deviation * weights[0].double().abs() + 1e-5
    assert ((out.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("sizes", [(3,), (5, 3)])
def test_rows_that_lie_in_another_order_are_left_to_torch(sizes: tuple[int, ...]) -> None:
    x = draw(0, 2, 3, 5).transpose(1, 2)
    kind, outs = "aten.layer_norm.default", [torch.empty(x.shape)]
    assert bind(kind, [x, torch.ones(sizes)], outs, normalized_shape=sizes, eps=1e-5) is None


@settings(max_examples=40, deadline=None)
@given(ROWS, COLUMNS, st.booleans(), st.integers(0, 2**16))
def test_normalisation_by_the_root_of_the_mean_square(rows: int, columns: int, has_scale: bool, seed: int) -> None:
    x, weights = draw(seed, 2, rows, columns), [draw(seed + 1, columns)] * has_scale
    out = torch.full((2, rows, columns), torch.nan)
    launch("aten.rms_norm.default", [x, *weights], [out], normalized_shape=tuple(x.shape[2:]), eps=1e-6)
    wanted = functional.rms_norm(x.double(), (columns,), *(weight.double() for weight in weights), eps=1e-6)
    torch.testing.assert_close(out.double(), wanted, atol=ATOL, rtol=RTOL)


def test_a_normalisation_over_several_axes_and_in_place() -> None:
    x, scale, bias = draw(0, 5, 3, 7), draw(1, 3, 7), draw(2, 3, 7)
    wanted = functional.layer_norm(x.double(), (3, 7), scale.double(), bias.double(), 1e-5)
    launch("aten.layer_norm.default", [x, scale, bias], [x], normalized_shape=tuple(x.shape[1:]), eps=1e-5)
    torch.testing.assert_close(x.double(), wanted, atol=ATOL, rtol=RTOL)


@settings(max_examples=60, deadline=None)
@given(ROWS, COLUMNS, st.booleans(), st.integers(0, 2**16))
def test_softmax(rows: int, columns: int, apart: bool, seed: int) -> None:
    x = draw(seed, rows, columns + 3)[:, :columns] if apart else draw(seed, rows, columns)
    x = x * 30
    out = torch.full((rows, columns), torch.nan)
    launch("aten.softmax.int", [x], [out], dim=1)
    # The exponent of a number is off by its last digit, which is 8e-6 of what is near 100.
    torch.testing.assert_close(out.double(), x.double().softmax(1), atol=1e-6, rtol=2e-5)


INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize("columns", [4, 16, 21])
@pytest.mark.parametrize("odd", [[-INF], [-INF, -INF], [NAN], [NAN, -INF], [INF], [INF, -INF], [1e30, -1e30]], ids=str)
@pytest.mark.parametrize("place", ["begin", "end", "all"])
def test_softmax_of_infinities_and_nan(columns: int, odd: list[float], place: str) -> None:
    """As torch: weights of -inf are 0, and a row that is -inf everywhere, or has NaN or inf, is NaN. In place."""
    x = draw(0, 1, columns)
    numbers = torch.tensor(odd * columns)[:columns] if place == "all" else torch.tensor(odd)
    at = slice(None, len(numbers)) if place != "end" else slice(-len(numbers), None)
    x[0, at] = numbers
    wanted = x.double().softmax(1)
    launch("aten.softmax.int", [x], [x], dim=-1)
    torch.testing.assert_close(x.double(), wanted, atol=1e-6, rtol=2e-5, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from((1, 2, 13, 15, 32, 33)),
    st.sampled_from((1, 3, 16, 17, 40)),
    st.sampled_from((1, 4, 16, 31, 32, 64)),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_attention(batch: int, heads: int, queries: int, keys: int, width: int, by_token: bool, seed: int) -> None:
    """The operands as a product with three parts leaves them, token by token, or head by head."""

    def operand(of: int, tokens: int) -> torch.Tensor:
        if by_token:
            return draw(seed + of, batch, tokens, heads, width).transpose(1, 2)
        return draw(seed + of, batch, heads, tokens, width)

    query, key, value = operand(0, queries), operand(1, keys), operand(2, keys)
    out, scores = torch.full((batch, queries, heads, width), NAN), torch.full((batch, heads, queries, keys), NAN)
    launch(Kind.SmallAttention, [query, key, value], [out, scores], scale=0.25)
    weights = (query.double() @ key.double().transpose(2, 3) * 0.25).softmax(-1)
    torch.testing.assert_close(scores.double(), weights, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.double(), (weights @ value.double()).transpose(1, 2), atol=2e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((1, 5, 64, 65, 130)),
    st.sampled_from((1, 3, 16, 17, 70)),
    st.sampled_from((1, 8, 33, 64)),
    st.sampled_from(((), (1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 0), (2, 3, 0))),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_attention_with_a_mask(
    queries: int, keys: int, width: int, mask: tuple[int, ...], by_token: bool, seed: int
) -> None:
    """Of sizes that no score is kept for. The mask is spread over batch, heads or queries (0 for: not over these)."""

    def operand(of: int, tokens: int) -> torch.Tensor:
        if by_token:
            return draw(seed + of, 2, tokens, 3, width).transpose(1, 2)
        return draw(seed + of, 2, 3, tokens, width)

    ins = [operand(0, queries), operand(1, keys), operand(2, keys)]
    added = torch.zeros(1, 1, 1, 1)
    if mask:
        added = draw(seed + 3, *mask[:2], mask[2] or queries, keys)
        added[added < -0.7] = -INF
    out = torch.full((2, queries, 3, width), NAN)
    attrs = {"scale": 0.25, "mask": bool(mask)}
    launch(Kind.ScaledDotProductAttention, [*ins, *([added] if mask else [])], [out], **attrs)
    query, key, value = (item.double() for item in ins)
    weights = (query @ key.transpose(2, 3) * 0.25 + added.double()).softmax(-1).nan_to_num(0)
    torch.testing.assert_close(out.double(), (weights @ value).transpose(1, 2), atol=2e-5, rtol=1e-4)


def test_a_query_that_no_key_answers_is_0_and_nan_stays() -> None:
    """As torch's kernel has it."""
    query, key, value = (draw(of, 1, 1, 3, 8) for of in range(3))
    key[0, 0, 2, 1] = NAN
    mask = torch.tensor([[0.0, -INF, -INF], [-INF, -INF, -INF], [0.0, 0.0, 0.0]]).view(1, 1, 3, 3)
    out = torch.empty(1, 3, 1, 8)
    launch(Kind.ScaledDotProductAttention, [query, key[:, :, :], value, mask], [out], scale=1.0, mask=True)
    assert out[0, 2].isnan().all()
    key = key.nan_to_num(1.0)
    launch(Kind.ScaledDotProductAttention, [query, key, value, mask], [out], scale=1.0, mask=True)
    wanted = functional.scaled_dot_product_attention(query, key, value, mask, scale=1.0).transpose(1, 2)
    assert torch.equal(out[0, 1], torch.zeros(1, 8))
    torch.testing.assert_close(out, wanted, atol=ATOL, rtol=RTOL)


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("hidden", [-INF, LOWEST, -1e4])
@pytest.mark.parametrize("seen", [(1, 1, 1), (40, 41, 42), (70, 3, 17), (5, 0, 9)], ids=str)
def test_attention_to_the_first_rows_of_a_cache(hidden: float, seen: tuple[int, ...]) -> None:
    """Each query sees the first keys; one that sees none has the mean of all values, or 0 where it adds -inf."""
    query, key, value = draw(0, 1, 2, 3, 8), draw(1, 1, 2, 70, 8), draw(2, 1, 2, 70, 8)
    mask = torch.zeros(1, 1, 3, 70)
    for row, count in enumerate(seen):
        mask[..., row, count:] = hidden
    out = torch.full((1, 3, 2, 8), NAN)
    launch(Kind.ScaledDotProductAttention, [query, key, value, mask], [out], scale=0.5, mask=True)
    wanted = functional.scaled_dot_product_attention(query, key, value, mask, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(out, wanted, atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("has_row_for_each", [False, True])
def test_free_rows_of_a_cache_are_not_read(has_row_for_each: bool) -> None:
    query, key, value = draw(0, 1, 1, 3, 8), draw(1, 1, 1, 70, 8), draw(2, 1, 1, 70, 8)
    mask = torch.zeros(1, 1, 3 if has_row_for_each else 1, 70)
    mask[..., 20:], key[:, :, 20:], value[:, :, 20:] = LOWEST, NAN, NAN
    out = torch.full((1, 3, 1, 8), NAN)
    launch(Kind.ScaledDotProductAttention, [query, key, value, mask], [out], scale=0.5, mask=True)
    wanted = functional.scaled_dot_product_attention(query, key[:, :, :20], value[:, :, :20], scale=0.5)
    torch.testing.assert_close(out, wanted.transpose(1, 2), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("number", [NAN, -INF])
def test_attention_to_a_key_that_is_no_number(number: float) -> None:
    """One query times -inf is -inf or inf by its sign, so only queries above 0 are free of the second key."""
    query, key, value = draw(0, 1, 1, 3, 8).abs(), draw(1, 1, 1, 5, 8), draw(2, 1, 1, 5, 8)
    key[0, 0, 1, 2] = number
    out, scores = torch.empty(1, 3, 1, 8), torch.empty(1, 1, 3, 5)
    launch(Kind.SmallAttention, [query, key, value], [out, scores], scale=1.0)
    weights = (query.double() @ key.double().transpose(2, 3)).softmax(-1)
    torch.testing.assert_close(scores.double(), weights, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert out.isnan().all() == (number != number)


@pytest.mark.parametrize("size", [1e5, 1e9, 1e30])
@pytest.mark.parametrize("scale", [0.3, 3.7, 0.0])
@pytest.mark.parametrize("keys", [5, 16, 37])
def test_attention_with_large_scores(size: float, scale: float, keys: int) -> None:
    """One key has the whole weight then. A product that is not rounded before a difference gives it none, or more."""
    query, key, value = draw(0, 1, 2, 9, 32) * size, draw(1, 1, 2, keys, 32), draw(2, 1, 2, keys, 32)
    out, scores = torch.empty(1, 9, 2, 32), torch.empty(1, 2, 9, keys)
    wanted = functional.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2)
    launch(Kind.SmallAttention, [query, key, value], [out, scores], scale=scale)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=1e-4)
    launch(Kind.ScaledDotProductAttention, [query, key, value], [out], scale=scale, mask=False)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=1e-4)


def test_other_operands_are_left_to_torch() -> None:
    x, scale = draw(0, 4, 8), draw(1, 8)
    narrow, over = draw(2, 8, 4).t(), {"normalized_shape": (8,), "eps": 1e-5}
    assert bind("aten.layer_norm.default", [x.double(), scale.double()], [x.double()], **over) is None
    assert bind("aten.layer_norm.default", [x, draw(0, 1)], [x.clone()], **over) is None
    assert bind("aten.layer_norm.default", [narrow, scale], [torch.empty(8, 4).t()], **over) is None
    assert bind("aten.softmax.int", [x], [x.clone()], dim=0) is None
    assert bind("aten.softmax.int", [narrow], [torch.empty(4, 8)], dim=1) is None
    assert bind("aten.softmax.int", [x.half()], [x.half()], dim=1) is None
    assert bind("aten.softmax.int", [x[:0]], [x[:0]], dim=1) is None
    heads = draw(3, 1, 2, 5, 8)
    outs = [torch.empty(1, 5, 2, 8), torch.empty(1, 2, 5, 5)]
    assert bind(Kind.SmallAttention, [heads, heads, heads.bfloat16()], outs, scale=1.0) is None
    assert bind(Kind.SmallAttention, [heads, heads, heads], outs, scale=-1.0) is None
    assert bind(Kind.ScaledDotProductAttention, [heads, heads, heads], outs[:1], scale=-1.0, mask=False) is None
    causal = {"scale": 1.0, "mask": False, "causal": True}
    assert bind(Kind.ScaledDotProductAttention, [heads, heads, heads], outs[:1], **causal) is None
    spread = [heads, heads, heads, torch.zeros(1, 1, 5, 1)]
    assert bind(Kind.ScaledDotProductAttention, spread, outs[:1], scale=1.0, mask=True) is None
    assert bind(Kind.SmallAttention, [heads, heads, draw(3, 1, 2, 8, 5).transpose(2, 3)], outs, scale=1.0) is None
