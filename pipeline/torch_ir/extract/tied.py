"""One tensor under several names is one weight: the placeholders that torch.export makes of the names are merged."""

from __future__ import annotations

from dataclasses import replace

from pipeline.ir import Graph, Payload
from pipeline.ir.assemble import Facts, Stub, assemble
from pipeline.torch_ir.nodes import stored

__all__ = ["merged"]


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
        [Stub(value.name, value.spec, value.role, value.strides) for value in kept],
        [
            replace(op, inputs=tuple(new[vid] for vid in op.inputs), outputs=tuple(new[vid] for vid in op.outputs))
            for op in graph.ops
        ],
        [new[vid] for vid in graph.inputs],
        [new[vid] for vid in graph.outputs],
        payloads,
        facts=Facts(
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
