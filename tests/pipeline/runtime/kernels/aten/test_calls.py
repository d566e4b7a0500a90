"""Calls of operators of every shape, as eager torch runs them: the planned runtime gives the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as f

from tests.support.torch_programs import Calls, run_both

NAN, INF = math.nan, math.inf

X = torch.tensor([[1.5, -2.0, 0.0], [INF, NAN, 3.25]])
FLOATS = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
MORE = torch.linspace(3, -1, 24).reshape(2, 3, 4)
INTS = torch.arange(-6, 6).reshape(3, 4)
BOOLS = INTS > 0

OF_ONE = """
abs acos asin atan ceil cos cosh erf erfc exp expm1 floor log log1p neg reciprocal relu round rsqrt sigmoid sign sin
sinh sqrt square tan tanh trunc frac isnan isinf isfinite
"""

Function = Callable[..., Any]


def table(*rows: Function) -> tuple[Function, ...]:
    return rows


CASES: dict[str, tuple[tuple[torch.Tensor, ...], tuple[Function, ...]]] = {
    "dtypes are promoted as torch promotes them": (
        (FLOATS[0], INTS, BOOLS),
        table(
            lambda x, i, b: i + 0.5,
            lambda x, i, b: i + x,
            lambda x, i, b: b + i,
            lambda x, i, b: b + 2,
            lambda x, i, b: i / 2,
            lambda x, i, b: torch.true_divide(i, 3),
            lambda x, i, b: i // 4,
            lambda x, i, b: torch.div(i, 4, rounding_mode="trunc"),
            lambda x, i, b: x * b,
            lambda x, i, b: x.double() + x,
            lambda x, i, b: x + torch.tensor(2.0, dtype=torch.float64),
            lambda x, i, b: i.to(torch.int8) + 300,
            lambda x, i, b: i % 4,
            lambda x, i, b: -i,
            lambda x, i, b: ~b,
            lambda x, i, b: ~i,
            lambda x, i, b: i & 3,
            lambda x, i, b: i ^ 5,
            lambda x, i, b: i << 2,
            lambda x, i, b: torch.where(b, x, 0),
            lambda x, i, b: torch.where(b, x, i),
            lambda x, i, b: x.masked_fill(b, -INF),
            lambda x, i, b: i.abs().sqrt(),
        ),
    ),
    "scalars keep what they are": (
        (X, FLOATS),
        table(
            lambda x, y: torch.add(x, y[0, 0, :3], alpha=0.3),
            lambda x, y: torch.sub(x, x, alpha=-2),
            lambda x, y: torch.rsub(x, 2),
            lambda x, y: x * INF,
            lambda x, y: x + NAN,
            lambda x, y: x * (1 + 2j),
            lambda x, y: torch.full_like(x, -INF),
            lambda x, y: torch.full((2,), 1 - 1j),
            lambda x, y: torch.full((2,), True),
            lambda x, y: torch.full((), 7),
            lambda x, y: torch.nan_to_num(x, nan=5.0, posinf=None, neginf=-1.0),
            lambda x, y: x**2,
            lambda x, y: x**0.5,
            lambda x, y: 2**x,
            lambda x, y: x.clamp(min=-1),
            lambda x, y: x.clamp(max=1),
            lambda x, y: x.clamp(max=torch.tensor(1.0)),
            lambda x, y: x.clamp(torch.tensor([-1.0, 0, 1]), None),
            lambda x, y: torch.isclose(x, x, equal_nan=True),
            lambda x, y: torch.addcmul(x, x, x, value=0.5),
            lambda x, y: torch.lerp(x, x, 0.3),
            lambda x, y: f.elu(y, alpha=0.7),
            lambda x, y: f.leaky_relu(y, 0.2),
            lambda x, y: f.hardtanh(y, -0.5, 0.5),
            lambda x, y: f.softplus(y, beta=2, threshold=1),
            lambda x, y: f.threshold(y, 0.1, 20),
        ),
    ),
    "functions of one tensor": (
        (FLOATS, X),
        table(
            *(lambda x, _, name=name: getattr(torch, name)(x) for name in OF_ONE.split()),
            lambda x, y: torch.relu(y),
            lambda x, y: f.gelu(x),
            lambda x, y: f.gelu(x, approximate="tanh"),
            lambda x, y: f.silu(x),
            lambda x, y: f.mish(x),
            lambda x, y: f.hardswish(x),
            lambda x, y: f.hardsigmoid(x),
            lambda x, y: f.relu6(x),
            lambda x, y: f.glu(x),
            lambda x, y: torch.logit(x.sigmoid(), eps=1e-3),
        ),
    ),
    "reductions": (
        (FLOATS, INTS, X),
        table(
            lambda x, i, n: x.sum(),
            lambda x, i, n: x.sum((0, -1), keepdim=True),
            lambda x, i, n: i.sum(),
            lambda x, i, n: i.sum(0, dtype=torch.int32),
            lambda x, i, n: x.sum(1, dtype=torch.float64),
            lambda x, i, n: (i > 0).sum(1),
            lambda x, i, n: i.float().mean(0),
            lambda x, i, n: x.mean(),
            lambda x, i, n: x.var(1),
            lambda x, i, n: x.std((0, 2), unbiased=False, keepdim=True),
            lambda x, i, n: torch.var_mean(x, 1, correction=0),
            lambda x, i, n: x.prod(2),
            lambda x, i, n: x.max(1),
            lambda x, i, n: n.max(),
            lambda x, i, n: x.min(2, keepdim=True),
            lambda x, i, n: x.amax((0, 1)),
            lambda x, i, n: x.argmax(),
            lambda x, i, n: x.argmin(1),
            lambda x, i, n: x.cumsum(1),
            lambda x, i, n: (i > 0).cumsum(0),
            lambda x, i, n: x.norm(),
            lambda x, i, n: torch.linalg.vector_norm(x, 3, dim=1),
            lambda x, i, n: x.logsumexp(1),
            lambda x, i, n: (i > 0).any(),
            lambda x, i, n: (i > 0).all(1),
            lambda x, i, n: torch.topk(x, 2),
            lambda x, i, n: torch.sort(x, dim=1, descending=True),
            lambda x, i, n: x.softmax(-1),
            lambda x, i, n: x.softmax(1, dtype=torch.float64),
            lambda x, i, n: x.log_softmax(0),
            lambda x, i, n: x.median(2),
        ),
    ),
    "moves of elements": (
        (FLOATS, INTS),
        table(
            lambda x, i: x.view(6, 4),
            lambda x, i: x.transpose(0, 2),
            lambda x, i: x.transpose(0, 2).reshape(4, 6),
            lambda x, i: x.transpose(-1, 1).contiguous().view(2, -1) + 1,
            lambda x, i: x.permute(2, 0, 1),
            lambda x, i: i.t(),
            lambda x, i: x.mT,
            lambda x, i: x.movedim((0, 1), (1, -1)),
            lambda x, i: x[:, 1:, ::2],
            lambda x, i: x[..., -1],
            lambda x, i: x[:, -3:-1].exp(),
            lambda x, i: x[1],
            lambda x, i: x[:, None, 1],
            lambda x, i: x.narrow(2, -3, 2),
            lambda x, i: x.split(2, -1),
            lambda x, i: x.split([1, 0, 3], 2),
            lambda x, i: x.chunk(2, 2)[1] * x.chunk(2, 2)[0],
            lambda x, i: torch.tensor_split(i, (1, 3), dim=1),
            lambda x, i: torch.tensor_split(i, (3, 1), dim=1),
            lambda x, i: x.unbind(1),
            lambda x, i: i[:, :1].expand(-1, 5),
            lambda x, i: i[:, :1].expand(3, 5) + 1,
            lambda x, i: i.expand_as(x.new_zeros(2, 3, 4)),
            lambda x, i: x.view_as(x.new_zeros(4, 6)),
            lambda x, i: x.unsqueeze(1).squeeze(),
            lambda x, i: x.flatten(1),
            lambda x, i: x.unflatten(2, (2, 2)),
            lambda x, i: x.unfold(2, 2, 1),
            lambda x, i: x.diagonal(1, 0, 2),
            lambda x, i: torch.diagonal(i, -1) * 2,
            lambda x, i: x.flip(0, 2),
            lambda x, i: x.roll(1, 2),
            lambda x, i: x.repeat(1, 2, 1),
            lambda x, i: i.repeat_interleave(2, dim=1),
            lambda x, i: i.tril(-1),
            lambda x, i: f.pad(x, (1, -1, 0, 2), value=-INF),
            lambda x, i: f.pad(x, (2, 1), mode="reflect"),
            lambda x, i: torch.cat([x, x[:, :0], x[:, 1:]], 1),
            lambda x, i: torch.stack([i, i + 1], -1),
            lambda x, i: x.clone(memory_format=torch.contiguous_format),
            lambda x, i: x.to(torch.float16),
            lambda x, i: x.to(torch.float32),
            lambda x, i: x.type_as(i),
            lambda x, i: x.detach().abs(),
            lambda x, i: torch.view_as_complex(x.view(2, 3, 2, 2)),
            lambda x, i: torch.view_as_real(torch.complex(x, x + 1)),
            lambda x, i: x.view(torch.int32),
            lambda x, i: x.as_strided((2, 2), (1, 4), 3),
            lambda x, i: x,
            lambda x, i: torch.meshgrid(i[0], i[1], indexing="ij"),
            lambda x, i: f.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
        ),
    ),
    "picks by index": (
        (FLOATS, torch.tensor([[2, 0], [1, 1]]), INTS),
        table(
            lambda x, at, i: x[:, at],
            lambda x, at, i: x[at[0, 1:], :, at[1, :1]],
            lambda x, at, i: x[..., at],
            lambda x, at, i: x.repeat(2, 1, 999)[at, at - 1],
            lambda x, at, i: x.index_select(1, at[0]),
            lambda x, at, i: i.gather(1, at),
            lambda x, at, i: i[:2].take_along_dim(at, 1),
            lambda x, at, i: i.scatter(1, at, 99),
            lambda x, at, i: i.scatter_add(0, at, torch.ones_like(at)),
            lambda x, at, i: x.index_add(1, at[0], x[:, :2], alpha=2),
            lambda x, at, i: i.index_copy(0, at[0], i[:2]),
            lambda x, at, i: i.slice_scatter(i[:1] * 9, 0, 1, 2),
            lambda x, at, i: i.select_scatter(i[0] * 9, dim=0, index=2),
            lambda x, at, i: torch.ops.aten.index_put(i * 2, [None, at[0]], i[:, :1]),
            lambda x, at, i: (i * 2).index_fill(0, at[0], torch.tensor(5)),
            lambda x, at, i: (x * 2).masked_scatter(x > 0, x * 9),
            lambda x, at, i: (x * 2).masked_fill(x > 0, torch.tensor(0.5)),
            lambda x, at, i: (i + 1).scatter_add(0, at, torch.ones_like(at)),
            lambda x, at, i: torch.index_put(i, (at[0], at[1]), torch.tensor(-1), accumulate=True),
            lambda x, at, i: f.embedding(at, x[0]),
            lambda x, at, i: f.embedding_bag(at.flatten(), x[0], at[:, 0] * 0, mode="sum", include_last_offset=True),
            lambda x, at, i: f.embedding(at.t(), x[1], padding_idx=0),
            lambda x, at, i: f.one_hot(at, 4),
            lambda x, at, i: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
            lambda x, at, i: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x, right=True),
            lambda x, at, i: x.masked_fill(x > 0, 0.0),
        ),
    ),
    "norms and attention": (
        (FLOATS, MORE),
        table(
            lambda x, y: f.layer_norm(x, (4,)),
            lambda x, y: f.layer_norm(x, (4,), None, y[0, 0]),
            lambda x, y: f.layer_norm(x, (3, 4), y[0], None, 1e-3),
            lambda x, y: f.rms_norm(x, (4,), y[0, 0]),
            lambda x, y: f.group_norm(x, 3, y[0, :, 0]),
            lambda x, y: f.batch_norm(x, y[0, :, 0], y[1, :, 0].abs()),
            lambda x, y: f.instance_norm(x),
            lambda x, y: f.normalize(x, dim=1),
            lambda x, y: f.scaled_dot_product_attention(x[None], y[None], x[None], scale=0.3),
            lambda x, y: f.scaled_dot_product_attention(x[None], y[None], y[None], is_causal=True),
            lambda x, y: f.scaled_dot_product_attention(x[None], y[None], y[None], (x[:1, :, :3] > 0)[None]),
            lambda x, y: f.cosine_similarity(x, y, dim=2),
            lambda x, y: f.mse_loss(x, y),
            lambda x, y: f.cross_entropy(x[0], torch.tensor([1, 2, 0]), label_smoothing=0.1),
            lambda x, y: f.dropout(x, 0.5, training=True),
            lambda x, y: f.dropout(x, 0.5, training=False),
            lambda x, y: torch.rand(3),
            lambda x, y: torch.randn_like(x),
            lambda x, y: torch.bernoulli(x.sigmoid()),
        ),
    ),
    "losses": (  # numbers beside each other, which their overloads with `out=` use as room for the differences
        (FLOATS, MORE.sigmoid(), FLOATS.sigmoid()),
        table(
            lambda x, y, p: f.mse_loss(x, y),
            lambda x, y, p: f.l1_loss(x, y),
            lambda x, y, p: f.huber_loss(x, y, delta=0.5),
            lambda x, y, p: f.smooth_l1_loss(x, y),
            lambda x, y, p: f.soft_margin_loss(x, y),
            lambda x, y, p: f.binary_cross_entropy(p, y),
            lambda x, y, p: f.binary_cross_entropy(p, y, reduction="sum"),
            lambda x, y, p: f.binary_cross_entropy_with_logits(x, y),
            lambda x, y, p: f.kl_div(p.log(), y, reduction="batchmean"),
            lambda x, y, p: f.poisson_nll_loss(x, y),
            lambda x, y, p: f.hinge_embedding_loss(x, y.round() * 2 - 1),
            lambda x, y, p: f.margin_ranking_loss(x, y, p),
            lambda x, y, p: f.multilabel_soft_margin_loss(x[0], y[0]),
            lambda x, y, p: f.huber_loss(x, y, reduction="none"),
        ),
    ),
    "operands of equal sizes that lie otherwise": (
        (torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16.0).view(4, 4) - 7),
        table(
            lambda x, y: (x * 2).t() + (y * 3),
            lambda x, y: (y * 3) - (x * 2).t(),
            lambda x, y: torch.where((x > 0).t(), x * 2, y * 3),
            lambda x, y: torch.addcmul((x * 2).t(), y * 3, y * 5),
            lambda x, y: (y * 3).masked_fill((x > 0).t(), 1.0),
            lambda x, y: (x * 2)[None].transpose(1, 2).tanh() * (y * 3)[None],
            lambda x, y: (x @ y).t() + y * y,
            lambda x, y: (x * 2).t().scatter(0, torch.zeros(4, 4, dtype=torch.long), y * 3),
            lambda x, y: (x * 2).t().slice_scatter((y * 3)[:2], 0, 0, 2),
            lambda x, y: ((x > 0).t()) & (y > 0),
        ),
    ),
    "products of matrices": (
        (FLOATS, MORE, INTS.float()),
        table(
            lambda x, y, m: f.linear(x, m),
            lambda x, y, m: f.linear(x, m, y[0, :, 0]),
            lambda x, y, m: f.linear(x[0, 0], m, y[0, :, 0]),
            lambda x, y, m: x @ m.t(),
            lambda x, y, m: x @ y.mT,
            lambda x, y, m: x[0] @ y[0].t(),
            lambda x, y, m: x[0] @ y[0, 0],
            lambda x, y, m: x[0, 0] @ y[0, 0],
            lambda x, y, m: torch.bmm(x, y.transpose(1, 2)),
            lambda x, y, m: torch.baddbmm(x[:, :, :3], x, y.mT, beta=0.5, alpha=2),
            lambda x, y, m: torch.addmm(m[:, :3], m, m.t(), alpha=0.5),
            lambda x, y, m: torch.addmm(m[:, :3], m, m.t(), beta=0.5),
            lambda x, y, m: torch.einsum("bij,bkj->bik", x, y),
            lambda x, y, m: torch.outer(x[0, 0], y[0, 0]),
            lambda x, y, m: torch.matmul(x[:, None], y.mT),
            lambda x, y, m: INTS @ INTS.t(),
            lambda x, y, m: m[:, :0] @ m[:0],
        ),
    ),
    "convolutions and pools": (
        (
            torch.linspace(-1, 1, 2 * 4 * 6 * 6).reshape(2, 4, 6, 6),
            torch.linspace(-1, 1, 8 * 4 * 9).reshape(8, 4, 3, 3),
        ),
        table(
            lambda x, w: f.conv2d(x, w),
            lambda x, w: f.conv2d(x, w[:, :2], w[:, 0, 0, 0], stride=2, padding=1, groups=2),
            lambda x, w: f.conv2d(x, w, padding="same", dilation=2),
            lambda x, w: f.conv1d(x[:, :, 0], w[..., 0], padding=1),
            lambda x, w: f.conv_transpose2d(x, w[:4], stride=2, output_padding=1),
            lambda x, w: f.max_pool2d(x, 2),
            lambda x, w: f.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True),
            lambda x, w: f.avg_pool2d(x, 2, padding=1, count_include_pad=False),
            lambda x, w: f.adaptive_avg_pool2d(x, 2),
            lambda x, w: f.interpolate(x, scale_factor=2.0, mode="nearest"),
            lambda x, w: f.interpolate(x, size=(9, 4), mode="bilinear", align_corners=True),
            lambda x, w: f.unfold(x, 3),
            lambda x, w: f.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False),
        ),
    ),
    "no elements, no axes": (
        (torch.empty(0, 3), torch.tensor(2.5)),
        table(
            lambda e, s: e + 1,
            lambda e, s: e.sum(),
            lambda e, s: e.sum(0),
            lambda e, s: e @ e.new_ones(3, 2),
            lambda e, s: f.linear(e, e.new_ones(2, 3), e.new_ones(2)),
            lambda e, s: torch.cat([e, e]),
            lambda e, s: e.t(),
            lambda e, s: e.view(3, 0),
            lambda e, s: f.softmax(e, 1),
            lambda e, s: f.layer_norm(e, (3,)),
            lambda e, s: f.embedding(e.long(), e.new_ones(4, 2)),
            lambda e, s: s * 2,
            lambda e, s: s.expand(2, 3),
            lambda e, s: s.softmax(0),
            lambda e, s: s.t().contiguous(),
            lambda e, s: s.reshape(1, 1),
        ),
    ),
    "narrow and complex dtypes": (
        (FLOATS.to(torch.bfloat16), FLOATS.half(), FLOATS.to(torch.float8_e4m3fn), torch.complex(FLOATS, MORE)),
        table(
            lambda b, h, q, c: b + b.float(),
            lambda b, h, q, c: b * 1.1,
            lambda b, h, q, c: b.softmax(-1, dtype=torch.float32).to(b.dtype),
            lambda b, h, q, c: f.linear(b, b[0]),
            lambda b, h, q, c: f.layer_norm(b, (4,)),
            lambda b, h, q, c: h.mean(1),
            lambda b, h, q, c: h @ h.mT,
            lambda b, h, q, c: q.float() * 2,
            lambda b, h, q, c: q[:, 1:],
            lambda b, h, q, c: q.transpose(0, 1).contiguous(),
            lambda b, h, q, c: b.to(torch.float8_e5m2),
            lambda b, h, q, c: c * c.conj(),
            lambda b, h, q, c: c.abs(),
            lambda b, h, q, c: c.real + c.imag,
            lambda b, h, q, c: c @ c.mT,
            lambda b, h, q, c: torch.fft.fft(c),
            lambda b, h, q, c: torch.fft.ihfftn(c.real),  # of one axis, a conjugate view
            lambda b, h, q, c: torch.fft.ihfftn(c.real, dim=-1),
            lambda b, h, q, c: torch.fft.ihfft2(c.real),
            lambda b, h, q, c: torch.fft.ihfft2(c.real, dim=(-1,)),
            lambda b, h, q, c: torch.polar(c.abs(), c.angle()),
        ),
    ),
    "made of nothing": (
        (FLOATS,),
        table(
            lambda x: torch.arange(5),
            lambda x: torch.arange(0, 1, 0.3),
            lambda x: torch.zeros(2, 2, dtype=torch.int8),
            lambda x: torch.ones_like(x, dtype=torch.bool),
            lambda x: torch.eye(3),
            lambda x: torch.linspace(0, 1, 4),
            lambda x: torch.arange(4)[None] <= torch.arange(4)[:, None],
            lambda x: x + torch.arange(4),
            lambda x: torch.tensor([1.0, INF]) * 2,
            lambda x: x.new_full((2, 2), NAN),
        ),
    ),
}


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, though every NaN is as good as another."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    if actual.dtype.itemsize == 1 and actual.is_floating_point():
        actual, expected = actual.float(), expected.float()
    return torch.equal(actual, expected) or bool(torch.isclose(actual, expected, rtol=0, atol=0, equal_nan=True).all())


@pytest.mark.parametrize("name", CASES)
def test_every_call_gives_the_bits_of_eager_torch(name: str) -> None:
    inputs, functions = CASES[name]
    planned, plain, expected = run_both(Calls(functions), inputs)
    assert len(planned) == len(plain) == len(expected)
    assert [at for at, pair in enumerate(zip(plain, expected, strict=True)) if not same(*pair)] == []
    assert [at for at, pair in enumerate(zip(planned, expected, strict=True)) if not same(*pair)] == []
