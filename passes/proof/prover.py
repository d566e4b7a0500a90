"""The protocol of provers, and the prover that checks structure only; `numeric.py` compares numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from passes.context import PassContext
from passes.model.canonical import CanonicalGraph
from passes.proof.coverage import Coverage
from passes.proof.types import Measurement, Sensitivity
from passes.structures import Instance
from passes.weights.detached import DetachedModel

STRUCTURE: Final = "structure"
"""The name of this level of proof in settings; the other level is `numbers`."""

NOTHING: Final[Measurement] = Measurement({}, {})


class Prover(Protocol):
    """Decides for each model that a pass returns whether it still computes what the exported model computes.

    `reading` is the canonical graph of `model`, where the caller has it already.
    """

    def start(self) -> None:
        """Start the workers ahead of the first call."""

    def watch(self, model: DetachedModel, instances: Sequence[Instance], reading: CanonicalGraph | None = None) -> None:
        """Take `model` as the exported model, and compare the values at `instances` too.

        Raises:
            ModelError: it does not run.
        """
        ...

    def feeds(self) -> Sequence[Mapping[str, np.ndarray]]:
        """The inputs of all draws; none where nothing is run."""
        ...

    def measure(self, model: DetachedModel, reading: CanonicalGraph | None = None) -> Measurement:
        """How far `model` is from the reference."""
        ...

    def run(self, model: DetachedModel, reading: CanonicalGraph | None = None, *, hold: bool = True) -> Measurement:
        """`measure` by running the whole model; with `hold`, keep values that later proofs compare with."""
        ...

    def has_run(self, model: DetachedModel) -> bool:
        """Whether this object itself was run, and not only a model that computes the same."""
        ...

    def power(self) -> Sensitivity:
        """Whether a fault in the kept weights would be detected."""
        ...

    def coverage(self, model: DetachedModel, reading: CanonicalGraph | None = None) -> Coverage:
        """What the proof covered of the exported model; `model` is the final result."""
        ...


class StructureProver:
    """The prover for a model that cannot be run here: it computes nothing and compares no numbers.

    The runner still checks after each change that the model is valid ONNX, has the same signature, and has all kept
    structures with their weights. Whether the model computes the same stays open.
    """

    def __init__(self, context: PassContext) -> None:
        self._context = context

    def start(self) -> None:
        self._context.worker.start()

    def watch(
        self, model: DetachedModel, instances: Sequence[Instance], reading: CanonicalGraph | None = None
    ) -> None: ...

    def feeds(self) -> Sequence[Mapping[str, np.ndarray]]:
        return ()

    def measure(self, model: DetachedModel, reading: CanonicalGraph | None = None) -> Measurement:
        return NOTHING

    def run(self, model: DetachedModel, reading: CanonicalGraph | None = None, *, hold: bool = True) -> Measurement:
        return NOTHING

    def has_run(self, model: DetachedModel) -> bool:
        return True  # there is no run to wait for

    def power(self) -> Sensitivity:
        return Sensitivity(math.inf, ())

    def coverage(self, model: DetachedModel, reading: CanonicalGraph | None = None) -> Coverage:
        return Coverage()
