"""An extraction leaves the caller's module as it is, and sees which module makes a call."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from pipeline.torch_ir import execute_ir, extract_ir


class Lazy(nn.Module):
    """Fills a table when it is first asked, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rows, self.table = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.rows:
            self.rows, self.table = x.shape[0], torch.arange(float(x.shape[0])).cos()[:, None]
        return self.linear(x) * self.table[: x.shape[0]]


class Counting(nn.Module):
    """Writes to buffers of whole numbers, and what a gradient flows through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.step += 1
        y = self.linear(x)
        self.mean.add_(y.mean(0))
        return y


class Registering(nn.Module):
    """Makes its buffer when it is first run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "scale" not in self._buffers:
            self.register_buffer("scale", torch.full((4,), 2.0))
        return self.linear(x) * self.scale


class Either(nn.Module):
    """The fourth layer takes another of two modules that do the same."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number
        self.left, self.right = nn.ReLU(), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left if self.number != 3 else self.right)(self.linear(x))


def stacked(layer: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(5)))


@pytest.mark.parametrize("layer", [Lazy, Counting, Registering])
def test_attributes_and_buffers_are_as_before(layer: type[nn.Module]) -> None:
    model, x = stacked(layer), torch.randn(3, 4)
    untouched = copy.deepcopy(model)
    before = [dict(vars(one)) for one in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be traced whole
        ir = extract_ir(model, (x,), strict=False, stamp=True)
    for held, one in zip(before, model.modules(), strict=True):
        assert held == vars(one)
    assert untouched.state_dict().keys() == model.state_dict().keys()
    for (name, was), (_, now) in zip(untouched.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(was, now), name
        assert now.is_leaf, name
    (found,) = execute_ir(ir, (x,), weights=untouched.state_dict())
    assert torch.equal(found, untouched(x))


def test_another_module_of_a_layer_is_another_path() -> None:
    model = nn.Sequential(*(Either(number) for number in range(5)))
    with pytest.warns(UserWarning, match=r"is called in 'unit 0\.right', not in 'unit 0\.left'"):
        ir = extract_ir(model, (torch.randn(3, 4),), strict=False, stamp=True)
    assert [op.origin for op in ir.graph.ops if "relu" in op.kind] == [
        "0.left",
        "1.left",
        "2.left",
        "3.right",
        "4.left",
    ]
