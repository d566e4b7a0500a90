"""Check that a part of the graph still begins and ends at the same values, by their names and their sources.

It shares no code with the finder of modules: it walks back from the outputs of the part and must reach its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from passes.graph.index import GraphIndex
from passes.graph.op_facts import SIZES
from passes.graph.traversal import reads_of
from passes.structures.types import Boundary, Instance
from passes.weights.detached import DetachedModel


def with_sources(instances: Sequence[Instance], model: DetachedModel) -> tuple[Instance, ...]:
    """`instances` of the exported `model`, each with the graph inputs that bypass the inputs of its part."""
    index = model.index
    return tuple(
        replace(instance, boundary=replace(boundary, sources=frozenset(_sources(boundary, index))))
        if (boundary := instance.boundary)
        else instance
        for instance in instances
    )


def find_lost_boundaries(instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
    """Instance name → why the instance is lost, for the `instances` with a boundary.

    A boundary is kept when the model still has its values, as they were computed or as they were read, and the outputs
    of the boundary are computed only from its inputs.
    """
    index = GraphIndex(model.proto.graph, model.index.live)
    values = {*index.producers, *index.inputs, *index.initializers}
    reasons = {}
    for instance in instances:
        if instance.boundary is None:
            continue
        crossings = (*instance.boundary.inputs, *instance.boundary.outputs)
        missing = [
            crossing.value
            for crossing in crossings
            if crossing.value not in values and not values.issuperset(crossing.read_as)
        ]
        past = _sources(instance.boundary, index) - instance.boundary.sources
        if missing:
            reasons[instance.name] = f"its boundary value {missing[0]!r} is computed no more"
        elif past:
            reasons[instance.name] = f"computed from {min(past)!r} past its boundary"
    return reasons


def _sources(boundary: Boundary, index: GraphIndex) -> set[str]:
    """The graph inputs that the outputs of `boundary` are computed from without passing through its inputs."""
    seen = {name for crossing in boundary.inputs for name in (crossing.value, *crossing.read_as)}
    front = [
        name
        for crossing in boundary.outputs
        for name in ((crossing.value,) if crossing.value in index.producers else crossing.read_as)
    ]
    sources: set[str] = set()
    while front:
        name = front.pop()
        if name in seen:
            continue
        seen.add(name)
        maker = index.producer(name)
        if name in index.inputs:
            sources.add(name)
        elif maker is not None and maker.op_type not in SIZES:
            front.extend(reads_of(maker))
    return sources
