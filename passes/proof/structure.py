"""Proof by structure alone, for a model that cannot be run here: nothing is computed, so no number is compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from passes.context import PassContext
from passes.model.canonical import Reading
from passes.model.weights import DetachedModel
from passes.proof.evidence import Measurement, Power
from passes.proof.prove import Prover
from passes.structures import Instance

__all__ = ["STRUCTURE", "StructureProver"]

STRUCTURE: Final = "structure"
"""What this level of proof is called in settings; the other one is `numbers`."""

NOTHING: Final[Measurement] = Measurement({}, {})


class StructureProver(Prover):
    """Finds no fault in any numbers, since it has none.

    The runner still checks after each change that the model is valid ONNX, takes and gives what it did, and has all
    kept structures with their weights. Whether it computes the same stays open.
    """

    def __init__(self, bench: PassContext) -> None:
        super().__init__((), bench)

    def start(self) -> None:
        self._bench.worker.start()

    def watch(self, model: DetachedModel, instances: Sequence[Instance], reading: Reading | None = None) -> None: ...

    def power(self) -> Power:
        return Power(math.inf, ())

    def measure(self, model: DetachedModel, reading: Reading | None = None) -> Measurement:
        return NOTHING

    def has_run(self, model: DetachedModel) -> bool:
        return True  # there is no run to wait for

    def rehearse(self, model: DetachedModel) -> None: ...

    def run(self, model: DetachedModel, reading: Reading | None = None, *, hold: bool = True) -> Measurement:
        return NOTHING
