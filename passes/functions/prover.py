"""A prover for passes that run on a laid-out model (`side_by_side.py`): it rebuilds the model, and asks another."""

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
class LayoutProver:
    """A `Prover` that answers for a laid-out graph, which has each body once: it asks `prover` about the rebuilt model.

    It ignores `canonical`, which is the form of the laid-out graph and not of the rebuilt model.

    Args:
        rebuild: makes the model for `prover` from the laid-out graph: `FunctionLayout.whole` (flat) where models run,
            `FunctionLayout.fold` (with functions) where only structures are checked. It raises StepFailed where a pass
            has changed a body so that the body cannot be a function.
    """

    prover: Prover
    rebuild: Callable[[DetachedModel], DetachedModel]
    _latest: tuple[ModelProto | None, DetachedModel | None] = field(default=(None, None), init=False)

    def start(self) -> None:
        self.prover.start()

    def watch(
        self, model: DetachedModel, instances: Sequence[Instance], canonical: CanonicalModel | None = None
    ) -> None:
        """Search the rebuilt model for the kinds of `instances`: a structure in a body is there once for each call."""
        rebuilt = self._rebuilt(model)
        view = GraphView(rebuilt)
        searches = {kind: structure_of(kind) for kind in dict.fromkeys(instance.kind for instance in instances)}
        found = {kind: search.search(view).instances for kind, search in searches.items() if search is not None}
        held = TrackedStructures(found, enforced=frozenset(found), pinned=frozenset())
        self.prover.watch(rebuilt, held.must_hold())

    def feeds(self) -> Sequence[Mapping[str, np.ndarray]]:
        return self.prover.feeds()

    def measure(self, model: DetachedModel, canonical: CanonicalModel | None = None) -> Measurement:
        return self.prover.measure(self._rebuilt(model))

    def run(self, model: DetachedModel, canonical: CanonicalModel | None = None, *, hold: bool = True) -> Measurement:
        return self.prover.run(self._rebuilt(model), hold=hold)

    def has_run(self, model: DetachedModel) -> bool:
        return self.prover.has_run(self._rebuilt(model))

    def power(self) -> Sensitivity:
        return self.prover.power()

    def coverage(self, model: DetachedModel, canonical: CanonicalModel | None = None) -> Coverage:
        return self.prover.coverage(self._rebuilt(model))

    def _rebuilt(self, model: DetachedModel) -> DetachedModel:
        """The model rebuilt from `model`, kept until another model is asked about: `prover.has_run` compares
        objects."""
        if self._latest[0] is not model.proto:
            self._latest = (model.proto, self.rebuild(model))
        rebuilt = self._latest[1]
        assert rebuilt is not None
        return rebuilt
