"""The proof of a model with layer functions: each model that a pass returns is run without functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto

from passes.model.canonical import CanonicalModel
from passes.proof.coverage import Coverage
from passes.proof.prover import Measurement, Prover, Sensitivity
from passes.run.tracked import TrackedStructures
from passes.structures import Instance, structure_of
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel


@dataclass
class WholeProver:
    """Asks `prover` about the model that the graph with all bodies stands for.

    A structure of a body is in the whole model once for each call, so the structures are looked for there again.

    Args:
        make_whole: the graph with all bodies → the model that the prover gets. A model that cannot be made is a failure
            of the step.
    """

    prover: Prover
    make_whole: Callable[[DetachedModel], DetachedModel]
    _latest: tuple[ModelProto | None, DetachedModel | None] = field(default=(None, None), init=False)

    def start(self) -> None:
        self.prover.start()

    def watch(
        self, model: DetachedModel, instances: Sequence[Instance], canonical: CanonicalModel | None = None
    ) -> None:
        whole = self._make_whole_once(model)
        view = GraphView(whole)
        searches = {kind: structure_of(kind) for kind in dict.fromkeys(instance.kind for instance in instances)}
        found = {kind: search.search(view).instances for kind, search in searches.items() if search is not None}
        self.prover.watch(whole, TrackedStructures(found, frozenset(found), frozenset()).must_hold())

    def feeds(self) -> Sequence[Mapping[str, np.ndarray]]:
        return self.prover.feeds()

    def measure(self, model: DetachedModel, canonical: CanonicalModel | None = None) -> Measurement:
        return self.prover.measure(self._make_whole_once(model))

    def run(self, model: DetachedModel, canonical: CanonicalModel | None = None, *, hold: bool = True) -> Measurement:
        return self.prover.run(self._make_whole_once(model), hold=hold)

    def has_run(self, model: DetachedModel) -> bool:
        return self.prover.has_run(self._make_whole_once(model))

    def power(self) -> Sensitivity:
        return self.prover.power()

    def coverage(self, model: DetachedModel, canonical: CanonicalModel | None = None) -> Coverage:
        return self.prover.coverage(self._make_whole_once(model))

    def _make_whole_once(self, model: DetachedModel) -> DetachedModel:
        """The whole model; the same object for the same model, by which the prover knows what it has run."""
        if self._latest[0] is not model.proto:
            self._latest = (model.proto, self.make_whole(model))
        whole = self._latest[1]
        assert whole is not None
        return whole
