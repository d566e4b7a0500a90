"""One tensor under several names is one weight: torch.export forgets that, and makes a placeholder of each name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from torch.export import ExportedProgram

from pipeline.importers.from_torch.modules import every_tensor
from pipeline.ir import Graph, Payload
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble
from pipeline.torch_ir.nodes import stored

__all__ = ["merged", "tied_in", "tied_names"]


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """{name: the other names of the same parameter or buffer}, for those that have any."""
    shared = _shared(model)
    if not shared:
        return {}
    names: dict[int, list[str]] = {}
    for walk in (model.named_parameters, model.named_buffers):
        for name, tensor in walk(remove_duplicate=False):
            if id(tensor) in shared:
                names.setdefault(id(tensor), []).append(name)
    return _others(names)


def tied_in(program: ExportedProgram) -> dict[str, list[str]]:
    """`tied_names`, of a program whose model is not at hand."""
    names: dict[int, list[str]] = {}
    for name, tensor in program.state_dict.items():
        names.setdefault(id(tensor), []).append(name)
    return _others(names)


def merged(graph: Graph) -> Graph:
    """`graph` with one value for each stored tensor, the first, whose `sources` are all of its names.

    States that the graph updates are left alone: an update is of one name.
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
    for value in stored(graph):
        names = graph.sources.get(value.vid, ())
        if len(names) < 2 or value.vid in graph.updates:
            continue
        look = (frozenset(names), value.role, value.spec, value.strides)
        if first.setdefault(look, value.vid) != value.vid:
            twins[value.vid] = first[look]
    return twins


def _others(names: Mapping[int, list[str]]) -> dict[str, list[str]]:
    groups = [group for group in names.values() if len(group) > 1]
    return {name: [one for one in group if one != name] for group in groups for name in group}


def _shared(model: nn.Module) -> set[int]:
    """Ids of tensors that stand in more than one place. Names are not made for it: a model may have 100,000 of them."""
    places = Counter(map(id, every_tensor(model)))
    return {tensor for tensor, count in places.items() if count > 1}
