"""Caches of the user's files: what a recording leaves there is taken out, and what a call keeps there is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from pipeline.errors import Unsupported
from pipeline.training import record_step

X, TARGET = torch.ones(2, 4), torch.zeros(2, 4)

TABLES: dict[int, torch.Tensor] = {}

COUNTS: dict[str, torch.Tensor] = {}

last: torch.Tensor | None = None

HIDDEN = SimpleNamespace(table=None)


@functools.cache
def table(size: int) -> torch.Tensor:
    return torch.arange(float(size))


class Cached(nn.Module):
    """A linear layer, whose result `change` computes with something that an earlier call may have kept."""

    kept: dict[str, torch.Tensor] = {}  # noqa: RUF012 - what is shared by all is what is tried here

    def __init__(self, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, self.linear(x))

    @staticmethod
    @functools.lru_cache(maxsize=2)
    def ones(size: int) -> torch.Tensor:
        return torch.ones(size)


def by_a_dict(_: Cached, x: torch.Tensor) -> torch.Tensor:
    if 4 not in TABLES:
        TABLES[4] = torch.arange(4.0)
    return x + TABLES[4]


def by_a_dict_of_the_class(module: Cached, x: torch.Tensor) -> torch.Tensor:
    return x + module.kept.setdefault("mask", x.new_ones(4))


def by_a_function(_: Cached, x: torch.Tensor) -> torch.Tensor:
    return x * table(4)


def by_a_method(module: Cached, x: torch.Tensor) -> torch.Tensor:
    return x + module.ones(4)


def by_a_default(_: Cached, x: torch.Tensor, kept: dict[str, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    return x + kept.setdefault("mask", torch.ones(4))


def by_a_global(_: Cached, x: torch.Tensor) -> torch.Tensor:
    global last
    if last is None:
        last = torch.ones(4)
    return x + last


def make_closure() -> Callable[[Cached, torch.Tensor], torch.Tensor]:
    @functools.cache
    def inner(size: int) -> torch.Tensor:
        return torch.ones(size)

    return lambda _, x: x + inner(x.shape[1])


CACHES = [by_a_dict, by_a_dict_of_the_class, by_a_function, by_a_method, by_a_default, by_a_global, make_closure()]
"""The last one has no name in this file: only the function that calls it holds it."""


@pytest.fixture(autouse=True)
def _empty_caches() -> None:
    global last
    last, HIDDEN.table = None, None
    for cache in (TABLES, COUNTS, Cached.kept, *(by_a_default.__defaults__ or ())):
        cache.clear()
    for function in (table, Cached.ones, *(cell.cell_contents for cell in CACHES[-1].__closure__ or ())):
        function.cache_clear()


def record(module: nn.Module) -> Callable[[], torch.Tensor]:
    program = record_step(module, nn.MSELoss(), SGD(module.parameters(), lr=0.1), (X, TARGET))
    return lambda: program.step((X, TARGET))


@pytest.mark.parametrize("change", CACHES)
def test_a_cache_is_a_constant_and_stays_as_it_was(change: Callable[..., torch.Tensor]) -> None:
    module = Cached(change)
    step = record(module)
    assert (TABLES, Cached.kept, last) == ({}, {}, None)
    optimizer = SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        loss = nn.functional.mse_loss(module(X), TARGET)
        torch.testing.assert_close(step(), loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("change", CACHES)
def test_a_cache_is_whole_after_a_refusal(change: Callable[..., torch.Tensor]) -> None:
    def decide(module: Cached, x: torch.Tensor) -> torch.Tensor:
        y = change(module, x)
        return y if y.sum() > 0 else -y

    module = Cached(decide)
    with pytest.raises(Unsupported, match="Python asks for a number of a tensor"):
        record(module)
    module(X)


def carry(_: Cached, x: torch.Tensor) -> torch.Tensor:
    COUNTS["sum"] = COUNTS.get("sum", torch.zeros(4)) + x.detach().sum(0)
    return x + COUNTS["sum"]


def count(_: Cached, x: torch.Tensor) -> torch.Tensor:
    return x * COUNTS.setdefault("calls", torch.zeros(())).add_(1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (carry, r"(has left a tensor in|sets) 'test_user_caches.COUNTS.sum'"),
        (count, r"writes to 'test_user_caches.COUNTS.calls', a tensor that is neither a parameter nor a buffer"),
    ],
)
def test_what_a_call_carries_to_the_next_is_refused_by_its_name(change: Any, said: str) -> None:
    module = Cached(change)
    with pytest.raises(Unsupported, match=said):
        record(module)
    assert COUNTS == {}
    module(X)


def test_a_cache_that_nothing_names_is_refused_until_it_is_filled() -> None:
    def change(_: Cached, x: torch.Tensor) -> torch.Tensor:
        if HIDDEN.table is None:
            HIDDEN.table = torch.ones(4)
        return x + HIDDEN.table

    module = Cached(change)
    with pytest.raises(Unsupported, match=r"reads a tensor that an earlier call has left .* clear that cache"):
        record(module)
    HIDDEN.table = None
    module(X)
    record(module)()
