"""Tensors without plain memory are refused in one sentence, small and large, as inputs and as weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.errors import SourceError, UsageError
from pipeline.runtime import CompiledProgram, compile_graph
from tests.support.torch_programs import Calls, compile_module, graph_of

SMALL, LARGE = 4, 2**16
"""Elements: a small input is copied, and at a large one the operands are pointed."""


@dataclass(frozen=True)
class Sine:
    """A program that computes the sine of its input, the name of the input, and whether it replays a capture."""

    program: CompiledProgram
    name: str
    replays: bool

    def __call__(self, x: Any) -> torch.Tensor:
        call = self.program.replay if self.replays else self.program.run
        (result,) = call({self.name: x}).values()
        return result


@pytest.fixture(params=[(SMALL, False), (LARGE, False), (SMALL, True), (LARGE, True)], ids=str)
def sine(request: pytest.FixtureRequest) -> Sine:
    size, replays = request.param
    program, _ = compile_module(Calls([torch.sin]), [torch.zeros(size)])
    (entry,) = program.feed_signature
    sine = Sine(program, entry.name, replays)
    sine(torch.zeros(size))  # a replay has a capture whose signature fits
    return sine


def example(sine: Sine) -> torch.Tensor:
    (entry,) = sine.program.feed_signature
    return torch.linspace(-1, 1, entry.spec.numel)


TRANSFORMS: dict[str, Callable[[Sine, torch.Tensor], object]] = {
    "vmap": lambda sine, x: torch.vmap(sine)(torch.stack([x, x])),
    "grad": lambda sine, x: torch.func.grad(lambda y: sine(y).sum())(x),
    "functionalize": lambda sine, x: torch.func.functionalize(sine)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_see_no_plan(sine: Sine, transform: str) -> None:
    """Under functionalize a large input was read as empty memory, without an error."""
    with pytest.raises(UsageError, match=r"input '.*' is inside of torch\.vmap, torch\.func\.grad or the like"):
        TRANSFORMS[transform](sine, example(sine))
    torch.testing.assert_close(sine(example(sine)), torch.sin(example(sine)))


def as_fake(x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


def test_a_flag_that_says_negated_is_read(sine: Sine) -> None:
    """As of the imaginary part of a conjugate: the memory holds the other sign."""
    x = example(sine)
    torch.testing.assert_close(sine(torch._neg_view(x)), -torch.sin(x))


ODD: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "fake": (as_fake, "is a fake tensor"),
    "sparse": (torch.Tensor.to_sparse, r"of the layout torch\.sparse_coo; expected a dense one"),
    "mkldnn": (torch.Tensor.to_mkldnn, r"of the layout torch\._mkldnn; expected a dense one"),
    "nested": (lambda x: torch.nested.nested_tensor([x]), "is a nested tensor; expected a dense one"),
    "lazy": (lambda _: torch.nn.UninitializedParameter(), "is a parameter of a lazy module"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("kind", ODD)
def test_what_holds_no_plain_numbers_is_refused(sine: Sine, kind: str) -> None:
    make, why = ODD[kind]
    with pytest.raises(UsageError, match=why):
        sine(make(example(sine)))


def test_a_sparse_weight_is_refused() -> None:
    module = torch.nn.Linear(4, 3, bias=False)
    with pytest.raises(SourceError, match=r"'weight' is of the layout torch\.sparse_coo; expected a dense one"):
        compile_graph(graph_of(module, [torch.zeros(2, 4)]), {"weight": module.weight.detach().to_sparse()})
