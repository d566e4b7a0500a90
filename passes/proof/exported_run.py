"""The run of the exported model, which all later models are compared with: what it has to bring to light.

Its gauges measure coverage, its random numbers become fixed, its values at kept structures become the expected ones,
and a fault in its kept weights shows whether the proof has power.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from passes.model.canonical import CanonicalGraph, ValueDigests, read
from passes.proof.fault_injection import build_fault
from passes.proof.gauges import Readings, gauges_of
from passes.proof.noise import FixedNoise
from passes.proof.numbers import DRAWN, Tolerance, tolerance_for
from passes.proof.precision import Precisions, computed_types
from passes.proof.weak_blocks import SumTerm
from passes.structures import Instance
from passes.weights.detached import DetachedModel


class ExportedRun:
    """What is measured on the exported model.

    Args:
        source: the exported model.
        instances: structures whose values are compared, and whose weights get the fault, all at once.
        source_types: the floating types that the source of the model computes in; None for all that are in it.
        digest: gives the digests of the values of a canonical graph.
        reading: the canonical graph of `source`, where the caller has it already.
    """

    def __init__(
        self,
        source: DetachedModel,
        instances: Sequence[Instance],
        source_types: Collection[str] | None,
        digest: Callable[[CanonicalGraph], ValueDigests],
        reading: CanonicalGraph | None,
    ) -> None:
        self.noise = FixedNoise.of(source)
        self.model = self.noise.apply(source) if self.noise.nodes else source
        """The exported model, with its noise fixed."""
        self.gauges = gauges_of(source)
        self.fault = build_fault(self.model, instances)
        self.digests = digest(reading if reading is not None and self.model is source else read(self.model))
        self.outputs = tuple(info.name for info in source.proto.graph.output)
        self.own_outputs: tuple[str, ...] = ()
        """Outputs that become the expected ones."""
        self.probes = tuple(dict.fromkeys(value for instance in instances for value in instance.values))
        self.inner = tuple(dict.fromkeys((*self.probes, *self.fault.cuts)))
        """Values inside of the model that become the expected ones."""
        types = computed_types(source, self.outputs) if self.noise.nodes else {}
        self._drawn = [name for name, dtype in types.items() if dtype == DRAWN]
        self._source_types = source_types

    def random_outputs(self, computed_in: Precisions) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The outputs that depend on random numbers: those whose noise is fixed, so that this run says what is
        expected of them, and those that cannot be compared.

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
        names = [name for term in terms for name in (term.added, term.trunk)]
        types = computed_types(self.model, names, self._source_types) if names else {}
        weak = {}
        for place, term in enumerate(terms):
            dtype, ratio = types.get(term.trunk) or types.get(term.added), readings.ratios.get(place)
            if dtype and dtype != DRAWN and ratio is not None and ratio <= tolerance_for(dtype, tolerances).rtol:
                weak[term] = ratio
        return tuple(weak), {term.added: term.share(ratio) for term, ratio in weak.items()}


MOST_WEAK: Final = 32
"""Weak terms whose own values are compared; the coverage names the others."""
