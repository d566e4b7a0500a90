"""Modules and tensors that stand under several names: recorded steps are those of torch."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipeline.errors import Unsupported
from pipeline.training import record_step

BATCH = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3)


class Tied(nn.Module):
    """A module under two names, in a list too, whose weight is a parameter of the parent as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(6, 6)
        self.weight = self.a.weight
        self.layers = nn.ModuleList([self.a, nn.Linear(6, 6), self.a])
        self.plain, self.pair = [self.b], (self.weight, {"not": "looked into"})
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.plain, self.b):
            x = torch.tanh(layer(x))
        return self.out(x @ self.weight.t() @ self.pair[0])


class OfParent(nn.Module):
    """A parameter of the parent that two children have, one of which stands under two names; and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.randn(6, 6) / 3)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.a.weight = self.b.weight = self.shared
        self.c, self.held = self.b, {"in": [self.b.bias]}
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.c(self.b(self.a(x))) @ self.shared + self.held["in"][0])


class Buffers(nn.Module):
    """A buffer under two names and as an attribute, one that is assigned, and a first BatchNorm under two names."""

    def __init__(self) -> None:
        super().__init__()
        mean = torch.zeros(6)
        self.register_buffer("mean", mean)
        self.register_buffer("same", mean)
        self.register_buffer("count", torch.zeros(()))
        self.attribute = [mean]
        self.norm = self.second = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        self.count = self.count + 1
        return self.out(self.second(torch.relu(self.norm(x))) - self.same + self.attribute[0] * self.count)


@pytest.mark.parametrize("make", [Tied, OfParent, Buffers])
def test_steps_are_those_of_torch_and_the_module_stays_as_it_was(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    eager, loss = copy.deepcopy(module), nn.CrossEntropyLoss()
    named = {name: id(one) for name, one in (*module.named_parameters(), *module.named_buffers())}
    program = record_step(module, loss, torch.optim.AdamW(module.parameters(), lr=1e-2), BATCH)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    assert named == {name: id(one) for name, one in (*module.named_parameters(), *module.named_buffers())}
    for _ in range(5):
        found = float(program.step(BATCH))
        optimizer.zero_grad()
        wanted = loss(eager(BATCH[0]), BATCH[1])
        wanted.backward()
        optimizer.step()
        assert found == pytest.approx(float(wanted.detach()), abs=1e-5)  # float32, five steps
    program.write_back()
    for tensor, other in zip(module.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, other, atol=1e-5, rtol=1e-5)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.settings = SimpleNamespace(weight=self.a.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.a(x) @ self.settings.weight)


def test_a_parameter_that_the_module_reads_from_elsewhere_is_refused() -> None:
    module = Hidden()
    with pytest.raises(Unsupported, match=r"reads 'a\.weight', which a step changes"):
        record_step(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1), BATCH)
