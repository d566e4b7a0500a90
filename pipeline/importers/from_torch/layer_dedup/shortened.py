"""Build the short copy of a model that is traced in its place, with only a few units of a run.

The caller's module is never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipeline.importers.from_torch.layer_dedup.layer_runs import TRACED, LayerRun, NotRepeatable
from pipeline.importers.from_torch.layer_dedup.meta_trace import Call, MetaTrace, walk
from pipeline.importers.from_torch.layer_dedup.proof import Proof, match_outputs
from pipeline.importers.from_torch.layer_dedup.recorder import Event


def shorten_model(module: nn.Module, run: LayerRun, *, counts: bool = False) -> nn.Module:
    """A copy of `module` with few units of `run`. Only the modules from the root to the list are new objects.

    Layers keep their names. With `counts`, the attributes that count layers (COUNTS) of those modules and of their
    configs are set to the new number.

    Raises:
        Exception: whatever `copy.deepcopy` raises for an attribute on the way.
    """
    paths = (run.path, *run.beside)
    ways = [_way(module, path) for path in paths]
    lists = {id(way[-1]): _shorten_list(run, path, way[-1]) for path, way in zip(paths, ways, strict=True)}
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


def _shorten_list(run: LayerRun, path: str, layers: nn.Module) -> nn.Module:
    """A copy of the list with only the traced units and the layers in no unit."""
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


@dataclass(frozen=True, slots=True)
class TracedModule:
    """A module, its call, and the meta trace of that call."""

    module: nn.Module
    call: Call
    walk: MetaTrace


def trace_module(module: nn.Module, call: Call, runs: Sequence[LayerRun]) -> TracedModule:
    """Trace `module` on meta, with spans of the layers of `runs`.

    Raises:
        NotRepeatable: it cannot run without numbers.
    """
    return TracedModule(module, call, walk(module, call, _layers(module, runs)))


def find_short_model(run: LayerRun, others: Sequence[LayerRun], whole: TracedModule, proof: Proof) -> TracedModule:
    """The first shortened model that makes the calls of the whole model around its layers.

    It has spans of the layers of `others` too, since it is the whole model when they are shortened.

    Raises:
        NotRepeatable: there is none.
    """
    parts = [whole.call]
    if spare := _spare(run, whole, proof):
        parts.append(whole.call.without(spare))
    reasons: list[NotRepeatable] = []
    for counts in (False, True):
        for part in parts:
            try:
                return _try_shortened(run, others, whole, proof, part, counts)
            except NotRepeatable as reason:
                reasons.append(reason)
    raise reasons[0]


def _try_shortened(
    run: LayerRun, others: Sequence[LayerRun], whole: TracedModule, proof: Proof, part: Call, counts: bool
) -> TracedModule:
    try:
        module = shorten_model(whole.module, run, counts=counts)
    except Exception as error:
        raise NotRepeatable(f"no copy of it can be made: {type(error).__name__}: {error}") from error
    try:
        found = trace_module(module, part, (replace(run, count=TRACED), *others))
    except NotRepeatable as reason:
        raise NotRepeatable(
            f"with {TRACED * run.period} layers in place of {run.count * run.period} {reason}"
        ) from reason
    match_outputs(run, whole.walk, found.walk, proof)
    return found


def _spare(run: LayerRun, whole: TracedModule, proof: Proof) -> set[int]:
    """Keys of inputs that only units without a trace read, and that the call can be made without."""
    later = range(proof.frames[TRACED - 1][1].start, proof.frames[-1][1].stop)
    events = whole.walk.events
    inside = _inputs_of(events[later.start : later.stop])
    around = _inputs_of((*events[: later.start], *events[later.stop :]))
    return whole.call.spare(whole.module).keys() & (inside - around)


def _inputs_of(events: Sequence[Event]) -> set[int]:
    return {ref[1] for event in events for ref in event.refs if ref[0] == "given"}


def _layers(module: nn.Module, runs: Sequence[LayerRun]) -> dict[str, nn.Module]:
    paths = [run.layer(unit, offset) for run in runs for unit in range(run.count) for offset in run.offsets]
    layers = {path: module.get_submodule(path) for path in paths}
    inside = [child for item in layers.items() for child in _modules_inside(*item)]
    return layers | dict(inside)


def _modules_inside(path: str, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a layer that is a list or a dict, which cannot be called itself."""
    if isinstance(layer, nn.ModuleList | nn.ModuleDict):
        for name, child in layer.named_children():
            yield f"{path}.{name}", child
            yield from _modules_inside(f"{path}.{name}", child)
