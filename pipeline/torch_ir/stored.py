"""Stored tensors of a model: merge the names of tied weights, and compute buffers that no checkpoint has.

torch.export makes a placeholder for each name of a tensor. Non-persistent buffers of a model on meta have no data, and
are computed again: models of `transformers` can fill such buffers (`PreTrainedModel._init_weights`: rotary frequencies,
position ids), since `from_pretrained` makes them on meta too. We fill a CPU copy of the module that owns the buffer;
the model itself is not touched. We do that twice, over different contents: what differs was not written.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.export import ExportedProgram

from pipeline.importers.from_torch.modules import every_module, every_path, every_tensor
from pipeline.ir import Graph, Payload
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble
from pipeline.torch_ir.document.nodes import stored_values


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """{name: the other names of the same parameter or buffer}, for those that have any."""
    shared = _find_shared(model)
    if not shared:
        return {}
    names: dict[int, list[str]] = {}
    for walk in (model.named_parameters, model.named_buffers):
        for name, tensor in walk(remove_duplicate=False):
            if id(tensor) in shared:
                names.setdefault(id(tensor), []).append(name)
    return _others(names)


def tied_in(program: ExportedProgram) -> dict[str, list[str]]:
    """The `tied_names` of a program without its model."""
    names: dict[int, list[str]] = {}
    for name, tensor in program.state_dict.items():
        names.setdefault(id(tensor), []).append(name)
    return _others(names)


def merge_tied(graph: Graph) -> Graph:
    """Merge the values of each stored tensor into the first, whose `sources` are all of its names.

    States that the graph updates are not merged: each update belongs to one name.
    """
    twins = _twins(graph)
    if not twins:
        return graph
    kept = [value for value in graph.values if value.vid not in twins]
    places = {value.vid: place for place, value in enumerate(kept)}
    new = {value.vid: places[twins.get(value.vid, value.vid)] for value in graph.values}
    payloads: dict[str, Payload] = {
        value.name: graph.payloads[value.vid] for value in kept if value.vid in graph.payloads
    }
    return assemble(
        graph.name,
        [ValueDecl(value.name, value.spec, value.role, value.strides) for value in kept],
        [
            replace(op, inputs=tuple(new[vid] for vid in op.inputs), outputs=tuple(new[vid] for vid in op.outputs))
            for op in graph.ops
        ],
        [new[vid] for vid in graph.inputs],
        [new[vid] for vid in graph.outputs],
        payloads,
        facts=GraphFacts(
            {new[vid]: new[after] for vid, after in graph.updates.items()},
            {new[vid]: names for vid, names in graph.sources.items() if vid not in twins},
            graph.dims,
            graph.guards,
        ),
    )


def _twins(graph: Graph) -> dict[int, int]:
    """{vid of a further placeholder: the first of the same tensor}."""
    first: dict[object, int] = {}
    twins: dict[int, int] = {}
    for value in stored_values(graph):
        names = graph.sources.get(value.vid, ())
        if len(names) < 2 or value.vid in graph.updates:
            continue
        look = (frozenset(names), value.role, value.spec, value.strides)
        if first.setdefault(look, value.vid) != value.vid:
            twins[value.vid] = first[look]
    return twins


def _others(names: Mapping[int, list[str]]) -> dict[str, list[str]]:
    groups = [group for group in names.values() if len(group) > 1]
    return {name: [twin for twin in group if twin != name] for group in groups for name in group}


def _find_shared(model: nn.Module) -> set[int]:
    """Ids of tensors in more than one place. Builds no names: a model may have 100,000 of them."""
    places = Counter(map(id, every_tensor(model)))
    return {tensor for tensor, count in places.items() if count > 1}


Fill = Callable[[nn.Module], object]


def recompute_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: value} of those non-persistent buffers on meta that their model can fill; empty for a real model."""
    found: dict[str, torch.Tensor] = {}
    if not any(_on_meta(module) for module in every_module(model) if module._non_persistent_buffers_set):
        return found
    for path, module, fill in _owners(model):
        first, second = (_fill_copy(module, fill, content) for content in (0, 1))
        for name, value in first.items():
            if name in second and torch.equal(value, second[name]):
                found[f"{path}.{name}" if path else name] = value
    return found


def find_unsaved_buffers(model: nn.Module) -> frozenset[str]:
    """The names of all non-persistent buffers, which no checkpoint has."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in every_path(model)
        if module._non_persistent_buffers_set
        for name in _lasting(module)
    )


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, Fill]]:
    """Modules that hold such buffers, each with the way to fill it that its innermost model knows."""
    fills: dict[str, Fill] = {}
    for path, module in model.named_modules():
        fill = getattr(module, "_init_weights", None)
        if callable(fill):
            fills[path] = fill
        if _on_meta(module):
            known = [fills[above] for above in fills if not above or path == above or path.startswith(f"{above}.")]
            if known:
                yield path, module, known[-1]


def _on_meta(module: nn.Module) -> bool:
    return bool(module._non_persistent_buffers_set) and any(buffer.is_meta for buffer in _lasting(module).values())


def _lasting(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that no checkpoint has."""
    names = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if name in names and buffer is not None}


def _fill_copy(module: nn.Module, fill: Fill, content: int) -> dict[str, torch.Tensor]:
    shell = copy.copy(module)
    shell._parameters = {
        name: None if parameter is None else nn.Parameter(torch.empty_like(parameter), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    shell._buffers = {
        name: None if buffer is None else torch.full_like(buffer, content, device="cpu")
        for name, buffer in module._buffers.items()
    }
    try:
        with torch.no_grad(), torch.device("cpu"):
            fill(shell)
    except Exception:  # the model's own code, on a module without its weights: the buffer stays unknown
        return {}
    return _lasting(shell)
