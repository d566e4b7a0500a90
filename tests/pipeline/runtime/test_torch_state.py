"""What the caller's thread has switched on in torch changes no result: autocast, a default dtype, a default device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise

import pytest
import torch

from pipeline.runtime import compile_graph
from pipeline.runtime.eager import run_eager
from pipeline.runtime.torch_state import FLOAT32, plain_state, without_autograd
from tests.support.torch_programs import Calls, compile_module, feed_of, graph_of

X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def autocast_of_a_card() -> Iterator[None]:
    """What `torch.autocast("cuda")` does where there is a card."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_autocast_of_a_card_is_off_in_a_run_and_on_for_its_caller() -> None:
    with autocast_of_a_card():
        with plain_state():
            assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cuda")
        with without_autograd():
            assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cuda")


SWITCHED_ON: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a default dtype": default_dtype,
    "a device": lambda: torch.device("meta"),
}


def numbers() -> torch.nn.Module:
    """Products that autocast rounds, and numbers that take torch's default dtype."""
    conv = torch.nn.Conv2d(3, 4, 3)
    return torch.nn.Sequential(conv, Calls([lambda x: x @ x.mT + torch.arange(4) / 3 + torch.full((4,), 0.1)]))


@pytest.mark.parametrize("name", SWITCHED_ON)
def test_the_plan_and_the_plain_reference_compute_as_without(name: str) -> None:
    module = numbers().eval()
    graph, held = graph_of(module, [X]), module.state_dict()
    named = {graph.values[vid].name: held[key] for vid, (key, *_) in graph.sources.items() if key in held}
    feed = feed_of(graph, [X])
    (expected,) = run_eager(graph, {**named, **feed}).outputs.values()
    weights = {
        key: tensor for key, tensor in held.items() if key in {k for keys in graph.sources.values() for k in keys}
    }
    with SWITCHED_ON[name]():
        program = compile_graph(graph, weights)
        found = [
            *run_eager(graph, {**named, **feed}).outputs.values(),
            *program.run(feed).values(),
            *program.replay(feed).values(),
        ]
    before, _ = compile_module(module, [X])
    (planned,) = before.run(feed).values()
    assert torch.equal(found[0], expected)
    assert all(torch.equal(one, planned) for one in found[1:])
    assert planned.dtype is torch.float32


def test_a_region_of_autocast_is_part_of_the_graph() -> None:
    """Its body runs inside of the shield, and has to be cast all the same."""
    layer = torch.nn.Linear(3, 3)

    def in_region(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    module = Calls([in_region])
    module.add_module("layer", layer)
    program, feed = compile_module(module, [X[0, 0, :2, :3].contiguous()])
    (plain,) = program.run(feed).values()
    with default_dtype():
        (shielded,) = program.run(feed).values()
    assert plain.dtype is shielded.dtype is torch.bfloat16
    assert torch.equal(plain, shielded)


def test_the_last_to_leave_puts_the_default_dtype_back() -> None:
    """All threads share it, and one of them may leave while another still runs."""
    seen = []
    with default_dtype():
        FLOAT32.__enter__()
        FLOAT32.__enter__()
        for _ in range(2):
            seen.append(torch.get_default_dtype())
            FLOAT32.__exit__()
        seen.append(torch.get_default_dtype())
    assert seen == [torch.float32, torch.float32, torch.float64]


def test_it_costs_no_context_where_nothing_is_on() -> None:
    assert all(one is other for one, other in pairwise([plain_state(), plain_state()]))
