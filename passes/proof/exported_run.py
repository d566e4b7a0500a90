"""The run of the exported model, with which all later models are compared, and what it measures.

Its gauges measure coverage, its random values become fixed, its values at kept structures become the expected values,
and a fault in its kept weights shows whether the proof has power: whether zeroed weights change the values at the pins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from onnx import NodeProto

from passes.graph.index import GraphIndex, computed_values, extract, values_read
from passes.graph.op_facts import ARRANGING, BIAS, ONNX_DOMAINS, PRODUCTS, input_of
from passes.graph.traversal import reads_of
from passes.model.analysis import AnalyzedModel
from passes.model.canonical import ValueDigests
from passes.proof.claims import small_values
from passes.proof.gauges import Readings, gauges_of
from passes.proof.noise import FixedNoise
from passes.proof.numbers import DRAWN, Tolerance, tolerance_for
from passes.proof.precision import Precisions, computed_types
from passes.proof.prover import Sensitivity
from passes.proof.weak_blocks import SumTerm
from passes.structures import Instance
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """The part of a model between the kept weights and the pins that depend on them.

    `cuts` are computed values that the part reads, `zeroed` the initializers to set to zero; `seen` maps an instance
    to its pins that depend on its kept weights. Of these `vanishing` are zero by arithmetic, so the part has only the
    nodes of the others.
    """

    model: DetachedModel
    cuts: tuple[str, ...]
    zeroed: tuple[str, ...]
    seen: dict[str, tuple[str, ...]]
    vanishing: frozenset[str] = frozenset()

    @property
    def computed(self) -> list[str]:
        """The pins whose values with the fault are to be computed."""
        return list(dict.fromkeys(name for names in self.seen.values() for name in names if name not in self.vanishing))

    def unseen(self) -> Sensitivity:
        """The sensitivity where the part cannot be run: every instance is blind."""
        return Sensitivity(0.0, tuple(self.seen)) if self.seen else Sensitivity(math.inf, ())

    def sensitivity(self, excess: Mapping[str, float]) -> Sensitivity:
        """The sensitivity, given by how much (in tolerances) the fault moved each pin of `seen`."""
        if not self.seen:
            return Sensitivity(math.inf, ())
        ratios = {instance: min(excess[name] for name in names) for instance, names in self.seen.items()}
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
    index = GraphIndex(graph)
    vanishing = _vanishing(weights & index.initializers.keys(), touching) & reached
    nodes = GraphIndex(graph, touching).ancestors(reached - vanishing)
    read = values_read(nodes)
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
        *(model.with_proto(part), cuts, zeroed, {name: values for name, values in observed.items() if values}),
        vanishing=vanishing,
    )


def _vanishing(weights: AbstractSet[str], touching: Sequence[NodeProto]) -> frozenset[str]:
    """The values that are zero if `weights` are: moved zeros, and products with zeros, unless a bias is left."""
    zeros = set(weights)
    for node in touching:
        bias = input_of(node, BIAS)
        is_product = node.op_type in PRODUCTS and (not bias or bias in zeros)
        factors = node.input[:BIAS] if is_product else node.input[: node.op_type in ARRANGING]
        if node.domain in ONNX_DOMAINS and not zeros.isdisjoint(factors):
            zeros.update(node.output)
    return frozenset(zeros - weights)


class ExportedRun:
    """What is measured on the exported model.

    Args:
        analyzed: the exported model, the source of all others.
        instances: structures whose values are compared, and whose weights get the fault, all at once.
        source_types: the floating types that the source of the model computes in; None: all floating types in it.
        digest: gives the digests of the values of a model.
    """

    def __init__(
        self,
        analyzed: AnalyzedModel,
        instances: Sequence[Instance],
        source_types: Collection[str] | None,
        digest: Callable[[AnalyzedModel], ValueDigests],
    ) -> None:
        source = analyzed.model
        self.noise = FixedNoise.of(source)
        self.model = self.noise.apply(source) if self.noise.nodes else source
        """The exported model, with its noise fixed."""
        self.gauges = gauges_of(source)
        self.fault = build_fault(self.model, instances)
        self.digests = digest(analyzed if self.model is source else AnalyzedModel(self.model))
        self.outputs = tuple(info.name for info in source.proto.graph.output)
        self.own_outputs: tuple[str, ...] = ()
        """Outputs that become the expected outputs."""
        self.probes = tuple(dict.fromkeys(value for instance in instances for value in instance.values))
        self.inner = tuple(dict.fromkeys((*self.probes, *self.fault.cuts)))
        """Values inside of the model that become the expected values."""
        self.small = small_values(self.model)
        """Computed values that are cheap to hold."""
        self.types = computed_types(self.model, computed_in=source_types)
        """The type that each value is computed in."""
        types = computed_types(source, self.outputs) if self.noise.nodes else {}
        self._drawn = [name for name, dtype in types.items() if dtype == DRAWN]

    def random_outputs(self, computed_in: Precisions) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The outputs that depend on random values: first the outputs whose noise is fixed, so that this run gives
        their expected values; then the outputs that cannot be compared.

        Args:
            computed_in: the types that the model with fixed noise computes in.
        """
        left = tuple(name for name in self._drawn if computed_in.get(name) == DRAWN)
        return tuple(name for name in self._drawn if name not in left), left

    def find_weak(
        self, readings: Readings, tolerances: Mapping[str, Tolerance]
    ) -> tuple[tuple[SumTerm, ...], dict[str, float]]:
        """The terms of sums in which a fault would stay within the tolerance of what they are added to, and the factor
        on the absolute tolerance of each value that such a term adds."""
        terms = self.gauges.terms
        weak = {}
        for index, term in enumerate(terms):
            dtype, ratio = self.types.get(term.trunk) or self.types.get(term.added), readings.ratios.get(index)
            if dtype and dtype != DRAWN and ratio is not None and ratio <= tolerance_for(dtype, tolerances).rtol:
                weak[term] = ratio
        return tuple(weak), {term.added: term.share(ratio) for term, ratio in weak.items()}


MOST_WEAK: Final = 32
"""Weak terms whose own values are compared; the coverage names the others."""
