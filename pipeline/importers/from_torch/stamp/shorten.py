"""A copy of the model with a few units of the run. The caller's module stays as it is, whatever happens."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pipeline.importers.from_torch.stamp.run import TRACED, Run

__all__ = ["shortened"]


def shortened(module: nn.Module, run: Run, *, counts: bool = False) -> nn.Module:
    """The modules from the root to the list are new; layers, parameters and everything beside are the caller's own.

    The layers keep their names. With `counts`, numbers of layers (COUNTS) on the way down, and in configs there, say
    how many there are now.

    Raises:
        Exception: whatever `copy.deepcopy` raises for an attribute on the way.
    """
    paths = (run.path, *run.beside)
    ways = [_way(module, path) for path in paths]
    lists = {id(way[-1]): _kept(run, path, way[-1]) for path, way in zip(paths, ways, strict=True)}
    above = {id(one): one for way in ways for one in way[:-1]}
    memo: dict[int, Any] = {**lists}
    for one in above.values():
        memo.update({id(child): child for child in one.children() if id(child) not in above.keys() | lists.keys()})
        memo.update({id(item): item for item in _tensors(one)})
    result = copy.deepcopy(module, memo)
    if counts:
        for one in _way(result, run.path)[:-1]:
            _recount(one, len(ways[0][-1]._modules), len(lists[id(ways[0][-1])]._modules))
    return result


def _kept(run: Run, path: str, layers: nn.Module) -> nn.Module:
    """The list with the units that are traced, and what is in none."""
    short = copy.copy(layers)
    places = {name: run.locate(f"{path}.{name}" if path else name) for name in layers._modules}
    kept = {name: layers._modules[name] for name, place in places.items() if place is None or place[0] < TRACED}
    short.__dict__["_modules"] = kept
    return short


def _way(module: nn.Module, path: str) -> list[nn.Module]:
    way = [module]
    for name in path.split(".") if path else ():
        way.append(way[-1].get_submodule(name))
    return way


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    held = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
    return [item for item in held if isinstance(item, torch.Tensor)]


def _recount(module: nn.Module, before: int, after: int) -> None:
    for holder in (module, getattr(module, "config", None)):
        for name in COUNTS:
            if holder is not None and getattr(holder, name, None) == before:
                setattr(holder, name, after)


COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")
