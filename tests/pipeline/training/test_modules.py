"""Modules and losses that are awkward to record do what they do in torch: losses, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from pipeline.training import record_step
from tests.pipeline.training.steps import LOSS, MODELS, mlp, seeded

BATCHES = [MODELS["mlp"].batch(number) for number in range(5)]


class Module(nn.Module):
    """Parts, and a forward over them."""

    def __init__(self, forward: Callable[..., torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            is_buffer = isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if is_buffer else setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def normalized(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), norm, nn.ReLU(), nn.Linear(32, 10))


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    return Module(
        lambda m, x: m.head(m.cells(x.view(8, 4, 4))[0][:, -1]),
        cells=kind(4, 8, 2, batch_first=True),
        head=nn.Linear(8, 10),
    )


def masked() -> nn.Module:
    """torch's own encoder asks of its mask whether it is causal, as a Python bool."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    parts = {"layers": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "head": nn.Linear(16, 10)}
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return Module(lambda m, x: m.head(m.layers(x.view(2, 4, 16), mask=m.mask)).flatten(0, 1), mask=mask, **parts)


def average(m: Module, x: torch.Tensor) -> torch.Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.mean(0)
    return m.mlp(x - m.mean)


def only_exports(m: Module, x: torch.Tensor) -> torch.Tensor:
    """Recorded as it is written it asks for a number; by torch.export it does not."""
    if not torch.compiler.is_compiling() and x.abs().max() > 1e9:
        raise ValueError("an input is out of range")
    return m.head(torch.relu(m.norm(m.second(m.drop(m.first(x))))))


def exported() -> nn.Module:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    parts = {"norm": nn.BatchNorm1d(16), "drop": nn.Dropout(0.2), "head": nn.Linear(16, 10)}
    return Module(only_exports, first=first, second=second, **parts)


def frozen_norm() -> nn.Module:
    module = normalized(nn.BatchNorm1d(32))
    module[1].eval()  # type: ignore[operator]
    return module


def half_frozen() -> nn.Module:
    module = mlp()
    module[0].requires_grad_(False)  # type: ignore[operator]
    return module


class RoundThrough(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.round()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def in_bfloat16(m: Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.mlp(x).float()


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm with a cumulative average": lambda: normalized(nn.BatchNorm1d(32, momentum=None)),
    "BatchNorm without statistics": lambda: normalized(nn.BatchNorm1d(32, track_running_stats=False)),
    "a layer in evaluation mode": frozen_norm,
    "a frozen layer": half_frozen,
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 10)),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 10)),
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "a mask without is_causal": masked,
    "a buffer that is replaced": lambda: Module(average, mlp=mlp(), mean=torch.zeros(16)),
    "a number of a stored tensor": lambda: Module(lambda m, x: m.mlp(x) * int(m.n), mlp=mlp(), n=torch.tensor(3)),
    "a checkpoint": lambda: Module(lambda m, x: checkpoint(m.mlp, x, use_reentrant=False), mlp=mlp()),
    "a gradient of one's own": lambda: Module(lambda m, x: m.mlp(RoundThrough.apply(x * 4) / 4), mlp=mlp()),
    "a gradient of zeros": lambda: Module(lambda m, x: m.mlp(x) + m.a.sgn(), mlp=mlp(), a=nn.Parameter(torch.ones(10))),
    "autocast": lambda: Module(in_bfloat16, mlp=mlp()),
    "what only torch.export records": exported,
}  # fmt: skip


def compare(make: Callable[[], nn.Module], loss_of: Callable[[nn.Module], Callable[..., torch.Tensor]]) -> None:
    module, twin = seeded(make), seeded(make)
    program = record_step(module, loss_of(module), SGD(module.parameters(), lr=0.1), BATCHES[0])
    optimizer, loss = SGD(twin.parameters(), lr=0.1), loss_of(twin)
    torch.manual_seed(1)
    ours = [program.step(batch).item() for batch in BATCHES]
    torch.manual_seed(1)
    theirs = []
    for x, label in BATCHES:
        optimizer.zero_grad()
        value = loss(twin(x), label)
        value.backward()
        optimizer.step()
        theirs.append(value.item())
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert len(set(theirs)) == len(theirs)
    found = program.state_dict()["module"]
    assert found.keys() == twin.state_dict().keys()
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.parametrize("name", MAKERS)
def test_an_awkward_module_does_what_it_does_in_torch(name: str) -> None:
    compare(MAKERS[name], lambda _: LOSS)


def weight_decay_by_hand(module: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda output, label: LOSS(output, label) + 0.01 * sum(p.pow(2).sum() for p in module.parameters())


WEIGHTED = nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0))


@pytest.mark.parametrize(
    "loss_of",
    [lambda _: WEIGHTED, lambda _: lambda output, label: WEIGHTED(output, label).reshape(1), weight_decay_by_hand],
    ids=["a loss with a tensor of its own", "one element with a dimension", "a loss that reads parameters"],
)
def test_an_awkward_loss_does_what_it_does_in_torch(
    loss_of: Callable[[nn.Module], Callable[..., torch.Tensor]],
) -> None:
    compare(mlp, loss_of)


def test_a_tensor_that_forward_keeps_for_itself_is_not_that_of_the_recording() -> None:
    """Caches that are made by the first call, as those of rotary positions."""

    def cached(m: Module, x: torch.Tensor) -> torch.Tensor:
        if getattr(m, "cache", None) is None:
            m.cache = torch.arange(10.0)
        return m.mlp(x) * m.cache

    module = seeded(lambda: Module(cached, mlp=mlp()))
    record_step(module, LOSS, SGD(module.parameters(), lr=0.1), BATCHES[0])
    assert not hasattr(module, "cache")
    assert module(BATCHES[0][0]).isfinite().all()
