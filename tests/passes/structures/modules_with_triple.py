"""Attention as torch modules in forms beside softmax(Q·Kᵀ)·V: each has one triple of projections, q, k and v."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, LENGTH = 16, 2, 2

Tensor = torch.Tensor
Form = Callable[..., Tensor]
"""(module, x, q, k, v) → the context; x and the projections are [batch, length, width]."""


class Attention(nn.Module):
    """Projects x to Q, K and V, and hands them to the function of a form."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q2, self.k2 = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.taps = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH) for _ in range(3))
        self.gate = nn.Linear(WIDTH, HEADS)
        self.decay = nn.Parameter(torch.rand(HEADS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, *cache: Tensor) -> Tensor:
        x = self.norm(x)
        return self.o(self.form(self, x, self.q(x), self.k(x), self.v(x), *cache))


def heads(z: Tensor) -> Tensor:
    return z.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)


def join(z: Tensor) -> Tensor:
    return z.transpose(1, 2).flatten(2)


def cached_and_new(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    scores = torch.cat([q @ kc.transpose(-1, -2), q @ k.transpose(-1, -2)], -1).softmax(-1)
    old, new = scores.split([kc.shape[2], k.shape[2]], -1)
    return join(old @ vc + new @ v)


def differential(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (q1, q2), (k1, k2) = (heads(z).chunk(2, -1) for z in (q, k))
    first, second = ((a @ b.transpose(-1, -2)).softmax(-1) for a, b in ((q1, k1), (q2, k2)))
    return join((first - m.decay.view(1, -1, 1, 1) * second) @ heads(v))


def differential_apart(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = (heads(q) @ heads(k).transpose(-1, -2)).softmax(-1)
    second = (heads(m.q2(x)) @ heads(m.k2(x)).transpose(-1, -2)).softmax(-1)
    return join((first - m.decay.view(1, -1, 1, 1) * second) @ heads(v))


def primer(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (
        tap(z.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2) for tap, z in zip(m.taps, (q, k, v), strict=True)
    )
    return join((heads(q) @ heads(k).transpose(-1, -2)).softmax(-1) @ heads(v))


def primer_shifted(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The depthwise convolution as a sum of shifted products."""

    def mix(z: Tensor, weight: Tensor) -> Tensor:
        shifted = [functional.pad(z, (0, 0, at, 0))[:, : z.shape[1]] * weight[:, 0, at] for at in range(3)]
        return shifted[0] + shifted[1] + shifted[2]

    q, k, v = (mix(z, tap.get_parameter("weight")) for tap, z in zip(m.taps, (q, k, v), strict=True))
    return join((heads(q) @ heads(k).transpose(-1, -2)).softmax(-1) @ heads(v))


def einsum_3d(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bqd,bkd->bqk", q, k).softmax(-1)
    return torch.einsum("bqk,bkd->bqd", weights, v)


def einsum_heads(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (z.unflatten(-1, (HEADS, WIDTH // HEADS)) for z in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


def cumulative(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = heads(q).relu() + 0.1, heads(k).relu() + 0.1, heads(v)
    state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
    return join((q.unsqueeze(-2) @ state).squeeze(-2) / (q * k.cumsum(2)).sum(-1, keepdim=True))


def cumulative_einsum(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = functional.elu(heads(q)) + 1, functional.elu(heads(k)) + 1, heads(v)
    state = torch.einsum("bhld,bhlm->bhldm", k, v).cumsum(2)
    return join(torch.einsum("bhld,bhldm->bhlm", q, state))


def summed_by_hand(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Outer products, summed over positions, and read by a product and a sum."""
    q, k, v = heads(q).exp(), heads(k).exp(), heads(v)
    state = (k.unsqueeze(-1) * v.unsqueeze(-2)).sum(2, keepdim=True)
    return join((q.unsqueeze(-1) * state).sum(-2))


def random_features(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Performer: features of a fixed random projection."""
    rows = torch.linspace(-1, 1, 24 * WIDTH // HEADS).view(24, -1).sin()
    q, k = ((z @ rows.T - z.square().sum(-1, keepdim=True) / 2).exp() + 1e-4 for z in (heads(q), heads(k)))
    return join(q @ (k.transpose(-1, -2) @ heads(v)))


def retention(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """RetNet, parallel: no softmax, a decay by distance."""
    at = torch.arange(x.shape[1])
    mask = (at[:, None] >= at) * m.decay.view(-1, 1, 1) ** (at[:, None] - at).clamp(min=0)
    return join((heads(q) @ heads(k).transpose(-1, -2) * mask) @ heads(v))


def retention_by_steps(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    state, rows = x.new_zeros(x.shape[0], HEADS, WIDTH // HEADS, WIDTH // HEADS), []
    for at in range(x.shape[1]):
        state = state * m.decay.view(1, -1, 1, 1) + k[:, :, at, :, None] * v[:, :, at, None, :]
        rows.append((q[:, :, at, None, :] @ state).squeeze(2))
    return join(torch.stack(rows, 2))


def delta_rule(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gated DeltaNet: the state forgets what it holds under a key before it takes the new value."""
    q, k, v = functional.normalize(heads(q), dim=-1), functional.normalize(heads(k), dim=-1), heads(v)
    gates = m.gate(x).sigmoid().transpose(1, 2)
    state, rows = x.new_zeros(x.shape[0], HEADS, WIDTH // HEADS, WIDTH // HEADS), []
    for at in range(x.shape[1]):
        state = state * m.decay.view(1, -1, 1, 1)
        held = (state * k[:, :, at, :, None]).sum(-2)
        delta = (v[:, :, at] - held) * gates[:, :, at, None]
        state = state + k[:, :, at, :, None] * delta[:, :, None, :]
        rows.append((state * q[:, :, at, :, None]).sum(-2))
    return join(torch.stack(rows, 2))


def delta_rule_by_products(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = heads(q), heads(k), heads(v)
    state, rows = x.new_zeros(x.shape[0], HEADS, WIDTH // HEADS, WIDTH // HEADS), []
    for at in range(x.shape[1]):
        q_, k_, v_ = q[:, :, at], k[:, :, at], v[:, :, at]
        held = torch.einsum("bhd,bhdm->bhm", k_, state)
        state = state + torch.einsum("bhd,bhm->bhdm", k_, v_ - held)
        rows.append(torch.einsum("bhd,bhdm->bhm", q_, state))
    return join(torch.stack(rows, 2))


def weighted_keys(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """RWKV-4: values weighted by keys, element by element, and let through by a receptance."""
    weights = k.exp()
    return q.sigmoid() * ((weights * v).cumsum(1) / weights.cumsum(1))


def weighted_keys_by_steps(m: Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    top, bottom, rows = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
    decay = m.decay.repeat_interleave(WIDTH // HEADS)
    for at in range(x.shape[1]):
        weight = k[:, at].exp()
        top, bottom = top * decay + weight * v[:, at], bottom * decay + weight
        rows.append(q[:, at].sigmoid() * top / bottom)
    return torch.stack(rows, 1)


FORMS: dict[str, Form] = {
    form.__name__: form
    for form in (
        *(cached_and_new, differential, differential_apart, primer, primer_shifted, einsum_3d, einsum_heads),
        *(cumulative, cumulative_einsum, summed_by_hand, random_features, retention, retention_by_steps),
        *(delta_rule, delta_rule_by_products, weighted_keys, weighted_keys_by_steps),
    )
}


class Zoo(nn.Module):
    """One module of each form, so that one export has them all."""

    def __init__(self) -> None:
        super().__init__()
        self.forms = nn.ModuleDict({name: Attention(form) for name, form in FORMS.items()})

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        cached = {"cached_and_new": (keys, values)}
        return [module(x, *cached.get(name, ())) for name, module in self.forms.items()]


def make_zoo() -> tuple[Zoo, tuple[Tensor, ...]]:
    """The module, with weights from a seed, and its arguments."""
    torch.manual_seed(0)
    cache = torch.randn(1, HEADS, 3, WIDTH // HEADS)
    return Zoo().eval(), (torch.randn(1, LENGTH, WIDTH), cache, cache.flip(2))
