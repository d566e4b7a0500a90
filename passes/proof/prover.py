"""What a run asks of a proof, and the proof by structure alone; `numeric.py` compares numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

from passes.context import PassContext
from passes.model.canonical import CanonicalGraph
from passes.proof.coverage import Coverage
from passes.proof.types import Measurement, Sensitivity
from passes.structures import Instance
from passes.weights.detached import DetachedModel

__all__ = ["STRUCTURE", "Prover", "StructureProver"]

STRUCTURE: Final = "structure"
"""What proof by structure is called in settings; the other level is `numbers`."""

NOTHING: Final[Measurement] = Measurement({}, {})


class Prover(Protocol):
    """Says of each model that a pass has made whether it still computes what the exported model does.

    `reading` is that of the model, where the caller has it already.
    """

    def start(self) -> None:
        """Start the workers now, so that they are ready when they are called."""

    def watch(self, model: DetachedModel, instances: Sequence[Instance], reading: CanonicalGraph | None = None) -> None:
        """Take `model` for the exported one, and look at the values at `instances` too."""

    def measure(self, model: DetachedModel, reading: CanonicalGraph | None = None) -> Measurement:
        """How far `model` is from the reference."""
        ...

    def run(self, model: DetachedModel, reading: CanonicalGraph | None = None, *, hold: bool = True) -> Measurement:
        """`measure`, always by running the whole model; `hold` what others may be proven equal to it by."""
        ...

    def has_run(self, model: DetachedModel) -> bool:
        """Whether this very object was run, and not only one that computes the same."""
        ...

    def power(self) -> Sensitivity:
        """Whether a fault in the kept weights would be seen."""
        ...

    def coverage(self, model: DetachedModel, reading: CanonicalGraph | None = None) -> Coverage:
        """What the proof has shown of the exported model, where `model` came of it in the end."""
        ...


class StructureProver:
    """For a model that cannot be run here: nothing is computed, so no number is compared.

    The runner still checks after each change that the model is valid ONNX, takes and gives what it did, and has all
    kept structures with their weights. Whether it computes the same stays open.
    """

    def __init__(self, bench: PassContext) -> None:
        self._bench = bench

    def start(self) -> None:
        self._bench.worker.start()

    def watch(
        self, model: DetachedModel, instances: Sequence[Instance], reading: CanonicalGraph | None = None
    ) -> None: ...

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
