"""Small models whose layers do what layers of real models do: caches, buffers, constants, things between layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 4


def x() -> Tensor:
    return torch.zeros(2, WIDTH)


class Layer(nn.Module):
    """y = x + relu(fc(x)); `does` may be something else."""

    def __init__(self, index: int, does: Callable[[Layer, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.index = index
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.fc(x)) if self.does is None else self.does(self, x)


class Stack(nn.Module):
    """Something before the layers, the layers, something after them."""

    def __init__(self, count: int, does: Callable[[Layer, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(index, does) for index in range(count)])
        self.after = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.after(x)


class RegionsByTurns(Stack):
    """A region has no module: it belongs to the layer whose ops are in it."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            with torch.set_grad_enabled(index % 2 == 0):
                x = layer(x)
        return x


class StatefulLayer(nn.Module):
    """All that a layer can have: buffers of both kinds, a plain tensor, a constant in the code, writes in place."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH) * index, persistent=False)
        self.register_buffer("calls", torch.zeros(WIDTH))
        self.plain = torch.ones(WIDTH) / (index + 1)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        cache.add_(x)
        left, right = (self.fc(x) * torch.tensor(3.0) + self.table + self.plain).split(2, -1)
        return torch.cat([right, left], -1) + cache


class Stateful(nn.Module):
    """Between the layers it adds a tensor that is nobody's parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([StatefulLayer(index) for index in range(count)])
        self.between = torch.ones(WIDTH)

    def forward(self, x: Tensor, *caches: Tensor, scale: Tensor, shift: Tensor) -> dict[str, Any]:
        for layer, cache in zip(self.layers, caches, strict=False):
            x = layer(x, cache) + self.between
        return {"y": x * scale + shift + torch.tensor(7.0), "nothing": None, "caches": caches}


class CachedLayer(nn.Module):
    """Writes its states into a cache that it finds by its index."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False)
        self.values = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, caches: list[Tensor], position: Tensor, mask: Tensor) -> Tensor:
        for place, project in ((2 * self.index, self.keys), (2 * self.index + 1, self.values)):
            caches[place] = caches[place].index_copy(0, position, project(x))
        keys, values = caches[2 * self.index : 2 * self.index + 2]
        return x + functional.softmax(x @ keys.T + mask, -1) @ values


class Decode(nn.Module):
    """A wrapper as in seed document 000: logits and caches out, as many as `count` says.

    With `strict`, each cache that is given has to be written.
    """

    def __init__(self, count: int, strict: bool = False, last: nn.Module | None = None) -> None:
        super().__init__()
        self.num_layers = count
        self.strict = strict
        layers: list[nn.Module] = [CachedLayer(index) for index in range(count)]
        self.layers = nn.ModuleList(layers if last is None else [*layers[:-1], last])

    def forward(self, x: Tensor, mask: Tensor, position: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        caches = list(past) if self.strict else [past[index] for index in range(2 * self.num_layers)]
        for layer in self.layers:
            x = layer(x, caches, position, mask)
        if self.strict and any(cache is given for cache, given in zip(caches, past, strict=True)):
            raise ValueError("a cache was not written")
        return (x, *caches)

    def inputs(self) -> tuple[Tensor, ...]:
        past = [torch.zeros(3, WIDTH) for _ in range(2 * self.num_layers)]
        return torch.zeros(1, WIDTH), torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), *past


class LastLayer(CachedLayer):
    """Another class, which does something more."""

    def forward(self, x: Tensor, caches: list[Tensor], position: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, caches, position, mask).sigmoid()
