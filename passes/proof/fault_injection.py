"""Fault injection: the part of a model that shows whether zeroed kept weights change the values at the pins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from passes.graph.index import GraphIndex, computed_values, extract, values_read
from passes.graph.traversal import reads_of
from passes.proof.types import Sensitivity
from passes.structures import Instance
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """The part of a model between the kept weights and the pins that depend on them.

    `cuts` are computed values that the part reads, `zeroed` the initializers to set to zero; `seen` maps an instance
    to its pins that depend on its kept weights.
    """

    model: DetachedModel
    cuts: tuple[str, ...]
    zeroed: tuple[str, ...]
    seen: dict[str, tuple[str, ...]]

    @property
    def values(self) -> list[str]:
        """All pins to compare."""
        return list(dict.fromkeys(name for names in self.seen.values() for name in names))

    def unseen(self) -> Sensitivity:
        """The sensitivity where the part cannot be run: every instance is blind."""
        return Sensitivity(0.0, tuple(self.seen)) if self.seen else Sensitivity(math.inf, ())

    def sensitivity(self, excess: Sequence[float]) -> Sensitivity:
        """The sensitivity, given by how much (in tolerances) the fault moved each of `values`."""
        if not self.seen:
            return Sensitivity(math.inf, ())
        by_name = dict(zip(self.values, excess, strict=True))
        ratios = {instance: min(by_name[name] for name in names) for instance, names in self.seen.items()}
        return Sensitivity(min(ratios.values()), tuple(name for name, ratio in ratios.items() if ratio <= 1.0))


def build_fault(model: DetachedModel, instances: Sequence[Instance]) -> InjectedFault:
    """The fault in all weights of `instances` at once. It is observed at the values that they make, and ends there."""
    graph = model.proto.graph
    weights = {weight.name for instance in instances for weight in instance.weights}
    results = {name for instance in instances for name in instance.weight_results}
    touched, touching = set(weights), []
    for node in graph.node:
        if touched.intersection(reads_of(node)):
            touching.append(node)
            # The fault ends there: the values after it belong to other instances.
            touched.update(name for name in node.output if name not in results)
    reached = computed_values(touching).keys() & results
    nodes = GraphIndex(graph, touching).ancestors(reached)
    index, read = GraphIndex(graph), values_read(nodes)
    cuts = tuple(name for name in read if name not in index.initializers and name not in index.inputs)
    fed = [info for name, info in index.required_inputs.items() if name in read]
    part = extract(model.proto, nodes, inputs=(*fed, *cuts))
    observed = {
        instance.name: tuple(filter(reached.__contains__, instance.weight_results))
        for instance in instances
        if instance.weights
    }
    zeroed = tuple(name for name in read if name in weights)
    return InjectedFault(
        model.with_proto(part), cuts, zeroed, {name: values for name, values in observed.items() if values}
    )
