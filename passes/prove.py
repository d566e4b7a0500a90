"""Numeric proof: the model against references that were computed once, by another program than the one under test.

A proof is worth what it can see. Random tiny weights hide faults (zeroing a layer's Q and K moved a random BEiT's
output by 1.6e-5), so the values at kept structures are compared too, and `watch` plants a fault in every kept weight
and looks whether it shows.

Most changes are small, so most of a model need not be run again: `proof/claims.py` says when that is enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self
from uuid import uuid4

import numpy as np
import onnx

from passes.base import Workbench
from passes.canonical import Meanings, meanings_of
from passes.errors import ModelMistake, StepFailed
from passes.numbers import Tolerance
from passes.proof.base import Base, small_values
from passes.proof.claims import Claims, claims_by_name, claims_refined
from passes.proof.evidence import Measurement, Power, Reference, worst_errors
from passes.proof.faults import fault_in
from passes.proof.part import part_of
from passes.reads import live_nodes
from passes.sharing import portable
from passes.structures import Instance
from passes.weights import DetachedModel

__all__ = ["Measurement", "Power", "Prover", "Reference", "worst_errors"]


class Prover:
    """Measures models against references; at kept structures, against the values of the exported model itself.

    Args:
        references: what to compare with.
        bench: models run in its proof worker.
        tolerances: by dtype, in place of the documented ones.
    """

    def __init__(
        self, references: Sequence[Reference], bench: Workbench, tolerances: Mapping[str, Tolerance] | None = None
    ) -> None:
        self._references = tuple(references)
        self._tolerances = dict(tolerances or {})
        self._bench = bench
        self._owner = uuid4().hex
        self._opened = self._is_own = False
        self._probes: tuple[str, ...] = ()
        self._watched: DetachedModel | None = None
        self._measured: dict[str, Measurement] = {}
        self._equal: dict[str, str] = {}
        self._base: Base | None = None
        self._held: frozenset[str] = frozenset()
        self._ran: onnx.ModelProto | None = None

    @classmethod
    def of_itself(
        cls,
        feeds: Sequence[Mapping[str, np.ndarray]],
        bench: Workbench,
        tolerances: Mapping[str, Tolerance] | None = None,
    ) -> Self:
        """The first model that is watched is the reference."""
        draws = [Reference(one, {}, f"draw {index}") for index, one in enumerate(feeds)]
        prover = cls(draws, bench, tolerances)
        prover._is_own = True
        return prover

    def measure(self, model: DetachedModel) -> Measurement:
        """Compare every draw. What computes the very same thing as before is not run again.

        Raises:
            StepFailed: onnxruntime refuses or stops.
        """
        meanings = self._meanings(model)
        if meanings.whole not in self._measured:
            known = self._proven_equal(model)
            self._measured[meanings.whole] = known or self.run(model)
        return self._measured[meanings.whole]

    def has_run(self, model: DetachedModel) -> bool:
        """Whether this very object was run, and not only one that computes the same."""
        return self._ran is model.proto

    def run(self, model: DetachedModel) -> Measurement:
        """`measure`, always by running the whole model."""
        self._ran = model.proto
        made = {name for node in live_nodes(model.proto.graph) for name in node.output}
        return self._run(model, [name for name in self._probes if name in made])

    def watch(self, model: DetachedModel, instances: Sequence[Instance]) -> Power:
        """From now on compare the values at `instances` too; say how visible a fault in their weights is.

        `model` is the exported model, whose outputs have been compared with the reference. The fault is planted in all
        kept weights at once and read at each one's own pins.

        Raises:
            ModelMistake: the model is its own reference, and does not run, or computes NaN.
        """
        tiers = [tier for one in instances for tier in (one.pins, one.loose_pins, one.wide_pins)]
        probes = tuple(dict.fromkeys(pin.name for tier in tiers for pin in tier))
        if not self._references:
            return Power(math.inf, ())
        fault = fault_in(model, instances)
        self._measured.clear()
        try:
            self._run(model, [*probes, *fault.cuts], as_expected=True)
        except StepFailed as failure:
            raise ModelMistake(f"the model does not run as it is: {failure}") from failure
        self._refuse_nan()
        self._probes, self._watched = probes, model
        if not fault.seen:
            return Power(math.inf, ())
        seen = list(dict.fromkeys(name for names in fault.seen.values() for name in names))
        excess = self._ask(
            "fault",
            part=portable(fault.model, self._bench.spill),
            given={name: name for name in fault.cuts},
            zeroed=fault.zeroed,
            seen=seen,
        )
        by_name = dict(zip(seen, excess, strict=True))
        ratios = {instance: min(by_name[name] for name in names) for instance, names in fault.seen.items()}
        return Power(min(ratios.values()), tuple(name for name, ratio in ratios.items() if ratio <= 1.0))

    def _refuse_nan(self) -> None:
        nan = self._ask("nan_outputs")
        if nan:
            raise ModelMistake(
                f"output {nan[0]!r} of the reference holds NaN, so nothing can be compared with it; "
                "check the weights and the input ranges"
            )

    def _meanings(self, model: DetachedModel) -> Meanings:
        return meanings_of(model, lambda _, digest: self._equal.get(digest, digest))

    def _run(self, model: DetachedModel, inner: Sequence[str], *, as_expected: bool = False) -> Measurement:
        meanings = self._meanings(model)
        keep = {name: meanings.values[name] for name in (*small_values(model), *inner)}
        source = portable(model, self._bench.spill)
        expect = {"as_expected": as_expected, "is_reference": as_expected and self._is_own}
        draws = self._ask("run", model=source, inner=list(dict.fromkeys(inner)), keep=keep, **expect)
        measurement = Measurement(worst_errors([one for one, _ in draws]), worst_errors([one for _, one in draws]))
        if not measurement.why:
            self._base, self._held = Base(model, meanings), self._ask("held")
            self._measured[meanings.whole] = measurement
        return measurement

    def _proven_equal(self, model: DetachedModel) -> Measurement | None:
        """What the base measured, when every claim that makes `model` equal to it holds."""
        base = self._base
        if base is None or not self._references:
            return None
        by_name = claims_by_name(base, model, self._equal)
        if by_name is None:
            return None
        for claims in (claims_refined(base, by_name, self._equal), by_name):
            if claims is not None and self._holds(base, claims):
                measurement = self._measured[base.meanings.whole]
                self._base = Base(model, claims.learned(base, self._equal))
                self._measured[self._base.meanings.whole] = measurement
                return measurement
        return None

    def _holds(self, base: Base, claims: Claims) -> bool:
        if not claims.cover(base, self._probes):
            return False
        if not claims.claims:
            return True
        part = part_of(base, claims, self._held)
        if part is None:
            return False
        source = portable(part.model, self._bench.spill)
        try:
            return all(self._ask("equal", part=source, given=part.given, pairs=part.pairs))
        except StepFailed:  # the pieces do not run by themselves; the whole model may
            return False

    def _ask(self, question: str, **arguments: Any) -> Any:
        """Put a question to the desk; set one up first if there is none, or if the last one has died."""
        if not self._opened:
            self._set_up()
        try:
            return self._put(question, **arguments)
        except StepFailed as failure:
            self._opened = failure.status == "failed"
            raise

    def _set_up(self) -> None:
        self._held = frozenset()
        self._put("open", feeds=[dict(one.feeds) for one in self._references], tolerances=self._tolerances)
        self._put("expect", outputs=[dict(one.outputs) for one in self._references])
        if self._watched is not None:
            source = portable(self._watched, self._bench.spill)
            self._put("run", model=source, inner=self._probes, keep={}, as_expected=True, is_reference=self._is_own)
        self._opened = True

    def _put(self, question: str, **arguments: Any) -> Any:
        return self._bench.proofs.call("passes.proof.desk:ask", owner=self._owner, question=question, **arguments)
