"""Proof by numbers: models are compared with references that another program computed once.

A comparison of outputs may miss faults: with tiny random weights, zeroing a layer's Q and K moved a random BEiT's
output by 1.6e-5. So the values at kept structures are compared too, and `watch` injects a fault into every kept weight
and measures whether it is detected.

Most changes are small, so most of a model need not be run again: `claims.py` decides what has to be run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Self

import numpy as np
import onnx

from passes.context import PassContext
from passes.errors import ModelError, StepCrashed, StepFailed, StepTimedOut
from passes.graph.traversal import live_nodes
from passes.model.canonical import CanonicalGraph, ValueDigests, read
from passes.proof.claims import BaseModelRun, Claims, claims_by_name, refine_claims, small_values
from passes.proof.client import ProofClient
from passes.proof.coverage import Coverage, coverage_of
from passes.proof.draws import BROUGHT_DOWN, DrawPlan, Trait
from passes.proof.fault_injection import InjectedFault, build_fault
from passes.proof.gauges import Gauges, Readings, gauges_of, gauges_of_changes
from passes.proof.noise import FixedNoise
from passes.proof.numbers import DRAWN, Tolerance, tolerance_for
from passes.proof.part import parts_of
from passes.proof.precision import Precisions, computed_types
from passes.proof.tables import Match, TableCheck, TablesPart, tables_of
from passes.proof.types import BaselineRun, DrawErrors, Measurement, Reference, RunRequest, Sensitivity, worst_errors
from passes.proof.weak_blocks import ResidualBranch
from passes.structures import Instance
from passes.weights.detached import DetachedModel
from passes.worker.messages import REFUSED


class NumericProver:
    """Measures models against references; at kept structures, against the values of the exported model itself.

    Args:
        references: what to compare with.
        context: models run in its proof worker.
        tolerances: by dtype, in place of the documented ones.
        computed_in: the floating types that the source of the models computes in; None for all that are in the first
            model itself.
        inputs: the traits that each input can be drawn with, for the coverage.
        skipped: sentences on what was not drawn, and why, for the coverage.
    """

    def __init__(
        self,
        references: Sequence[Reference],
        context: PassContext,
        tolerances: Mapping[str, Tolerance] | None = None,
        computed_in: Collection[str] | None = None,
        *,
        inputs: Mapping[str, frozenset[Trait]] | None = None,
        skipped: Sequence[str] = (),
    ) -> None:
        self._references = tuple(references)
        self._plan: DrawPlan | None = None
        """The draws to choose from, until the first model has been run."""
        self._inputs: Mapping[str, frozenset[Trait]] = inputs or {}
        self._skipped: Sequence[str] = tuple(skipped)
        self._context = context
        self._client = ProofClient(self._references, tolerances or {}, context, self._restore)
        self._is_own = False
        """Whether the first model is the reference."""
        self._noise = FixedNoise(())
        """The noise of the first model; every model is run with it."""
        self._own_outputs: tuple[str, ...] = ()
        """Outputs that depend on random numbers: expected is what the first model computes with its fixed noise."""
        self._source_types = computed_in
        self._computed_in: Precisions = {}
        self._probes: tuple[str, ...] = ()
        self._watched: DetachedModel | None = None
        self._begin_baseline: Callable[[DrawPlan | None], None] = lambda _: None
        self._fault: InjectedFault | None = None
        self._power = Sensitivity(math.inf, ())
        self._measured: dict[str, Measurement] = {}
        self._equal: dict[str, str] = {}
        self._base: BaseModelRun | None = None
        self._held: frozenset[str] = frozenset()
        self._ran: onnx.ModelProto | None = None
        self._gauges = Gauges()
        self._readings = Readings()
        self._tables: TableCheck | None = None
        self._tolerances = dict(tolerances or {})
        self._weak: tuple[ResidualBranch, ...] = ()
        """Residual branches in which a fault would stay within the tolerance of what they are added to."""
        self._shares: dict[str, float] = {}
        """The value that such a branch adds → its norm relative to the norm of the value it is added to."""

    @classmethod
    def of_itself(
        cls,
        feeds: Sequence[Mapping[str, np.ndarray]],
        context: PassContext,
        tolerances: Mapping[str, Tolerance] | None = None,
    ) -> Self:
        """A prover whose reference is the first model that it watches."""
        draws = [Reference(arrays, {}, f"draw {index}") for index, arrays in enumerate(feeds)]
        prover = cls(draws, context, tolerances)
        prover._is_own = True
        return prover

    @classmethod
    def of_plan(cls, plan: DrawPlan, context: PassContext) -> Self:
        """`of_itself`, on the draws of `plan` on which that model runs."""
        prover = cls((), context)
        prover._is_own, prover._plan = True, plan
        return prover

    def start(self) -> None:
        self._context.start()

    def watch(self, model: DetachedModel, instances: Sequence[Instance], reading: CanonicalGraph | None = None) -> None:
        """Compare the values at `instances` too from now on, and measure whether a fault in their weights is detected.

        `model` is the exported model, whose outputs have been compared with the reference. It runs in the background:
        the first call that needs a number blocks until it finishes, and gets its error. The fault is planted in all
        kept weights at once and observed at the values that each instance's own weights make.
        """
        self._measured.clear()
        if not self._references and self._plan is None:
            return
        self._gauges, self._noise = gauges_of(model), FixedNoise.of(model)
        names = [info.name for info in model.proto.graph.output]
        drawn = [name for name, dtype in computed_types(model, names).items() if dtype == DRAWN]
        model, reading = self._fix_noise(model, reading)
        fault, meanings = build_fault(model, instances), self._meanings(reading or read(model))
        self._probes = tuple(dict.fromkeys(value for instance in instances for value in instance.values))
        inner = list(dict.fromkeys((*self._probes, *fault.cuts)))
        self._judge_by(model, inner)
        self._own_outputs = tuple(name for name in drawn if self._computed_in.get(name) != DRAWN)
        if len(drawn) - len(self._own_outputs) == len(names) > 0:
            raise ModelError(RANDOM.format(", ".join(map(repr, names))))
        left = [name for name in drawn if name not in self._own_outputs]
        if left:
            shown = ", ".join(map(repr, left))
            self._skipped = (*self._skipped, f"not compared: {shown} (random numbers; shape and dtype are compared)")
        request = replace(self._expecting(inner), keep=_values_to_hold(model, meanings, inner))
        on_answer = partial(self._record_baseline, model, meanings, fault)
        self._begin_baseline = partial(
            self._client.begin_baseline, on_answer, model, request, self._computed_in, self._gauges
        )
        self._begin_baseline(self._plan)

    def _fix_noise(
        self, model: DetachedModel, reading: CanonicalGraph | None
    ) -> tuple[DetachedModel, CanonicalGraph | None]:
        """`model` with the noise of the first model, and its reading; both as they are where nothing is random."""
        fixed = self._noise.apply(model) if self._noise.nodes else model
        return fixed, reading if fixed is model else None

    def _expecting(self, inner: Sequence[str]) -> RunRequest:
        """A run of the first model, whose values become the expected ones."""
        return RunRequest(inner, as_expected=True, is_reference=self._is_own, own_outputs=self._own_outputs)

    def _judge_by(self, model: DetachedModel, inner: Sequence[str] = ()) -> None:
        """Take the tolerances of outputs, and of `inner` values, from the types that `model` computes them in.

        The types of the exported model hold for all models that passes return: a pass that computes in a less precise
        type does not get that type's tolerance.
        """
        outputs = (info.name for info in model.proto.graph.output)
        self._computed_in = computed_types(model, (*outputs, *inner), self._source_types)

    def feeds(self) -> Sequence[Mapping[str, np.ndarray]]:
        self._settle()
        return [reference.feeds for reference in self._references]

    def measure_export(self, model: DetachedModel) -> Measurement:
        """`measure` the exported model, before any pass.

        Raises:
            StepFailed: onnxruntime refuses or stops.
        """
        self._judge_by(model)
        return self.measure(model)

    def power(self) -> Sensitivity:
        """
        Raises:
            ModelError: the exported model does not run, or computes NaN where it is its own reference.
        """
        self._settle()
        fault = self._fault
        if fault is not None:
            try:
                self._power = fault.sensitivity(self._client.excess())
            except StepFailed:  # with zeros as weights the model may not run
                self._power = fault.unseen()
            self._fault = None
        return replace(self._power, weak=tuple(dict.fromkeys(branch.name for branch in self._weak)))

    def measure(self, model: DetachedModel, reading: CanonicalGraph | None = None) -> Measurement:
        """Compare every draw. A model that computes the same as one before is not run again.

        Raises:
            StepFailed: onnxruntime refuses or stops.
            ModelError: see `power`.
        """
        self._settle()
        fixed, reading = self._fix_noise(model, reading)
        reading = reading or read(fixed)
        meanings = self._meanings(reading)
        if meanings.whole not in self._measured:
            wrong = self._wrong_tables(model, meanings)
            if wrong:
                return Measurement({}, {}, wrong)
            known = self._proven_equal(fixed, reading)
            self._measured[meanings.whole] = known or self.run(model, reading)
        return self._measured[meanings.whole]

    def _wrong_tables(self, model: DetachedModel, meanings: ValueDigests) -> str:
        """The fault in the rows of tables that no draw reads; empty for none."""
        if self._tables is None:
            return ""
        return self._tables.fault_of(model, meanings, self._match_tables)

    def _match_tables(self, tables: TablesPart) -> Sequence[Match]:
        try:
            return self._client.match_tables(tables)
        except StepFailed:  # the report then lists them as unknown
            return [Match(is_unknown=True)] * len(tables.news)

    def coverage(self, model: DetachedModel, reading: CanonicalGraph | None = None) -> Coverage:
        self._settle()
        draws = [reference.draw for reference in self._references if reference.draw is not None]
        labels = [reference.label for reference in self._references]
        fixed, reading = self._fix_noise(model, reading)
        self._wrong_tables(model, self._meanings(reading or read(fixed)))
        tables, uncovered = (self._tables.tables, self._tables.uncovered) if self._tables else ((), ())
        computed = {name for node in live_nodes(fixed.proto.graph) for name in node.output}
        lost = [branch for branch in self._weak if computed.intersection(self._probes).isdisjoint(branch.compared)]
        weak = dict.fromkeys(WEAK.format(branch.name) for branch in lost)
        known = (self._inputs, (*self._skipped, *weak), self._gauges, self._readings, tables, uncovered)
        return coverage_of(draws, labels, *known, self._measure_changes(fixed))

    def _measure_changes(self, model: DetachedModel) -> tuple[Gauges, Readings]:
        """Gauges in the nodes that passes have brought into the final `model`, and what they read."""
        gauges = Gauges() if self._watched is None else gauges_of_changes(model, self._watched)
        return gauges, Readings() if gauges == Gauges(nested=gauges.nested) else self._client.read_gauges(model, gauges)

    def has_run(self, model: DetachedModel) -> bool:
        return self._ran is model.proto

    def run(self, model: DetachedModel, reading: CanonicalGraph | None = None, *, hold: bool = True) -> Measurement:
        self._settle()
        fixed, reading = self._fix_noise(model, reading)
        meanings = self._meanings(reading or read(fixed))
        computed = {name for node in live_nodes(fixed.proto.graph) for name in node.output}
        inner = [name for name in self._probes if name in computed]
        request = RunRequest(inner, _values_to_hold(fixed, meanings, inner) if hold else {})
        errors = self._client.run(fixed, request)
        self._ran = model.proto
        return self._record(fixed, meanings, errors, self._client.held_meanings())

    def _settle(self) -> None:
        """Wait for the run of the exported model, and record its results, if that is still to be done."""
        try:
            try:
                self._client.settle()
            except (StepCrashed, StepTimedOut) as failure:
                if self._plan is None or self._watched is not None:
                    raise
                self._plan, self._skipped = self._plan.reduce_to_needed(), (BROUGHT_DOWN.format(failure),)
                self._begin_baseline(self._plan)
                self._client.settle()
        except StepFailed as failure:
            if self._watched is not None:
                raise
            raise ModelError(f"the model does not run as it is: {failure}{advice_on(failure)}") from failure

    def _record_baseline(
        self, model: DetachedModel, meanings: ValueDigests, fault: InjectedFault, baseline: BaselineRun
    ) -> None:
        if baseline.nan_outputs:
            raise ModelError(
                f"output {baseline.nan_outputs[0]!r} of the reference holds NaN, so nothing can be compared with it; "
                "check the weights and the input ranges"
            )
        self._watched = model
        self._begin_baseline = lambda _: None  # it refers to this prover, which would outlive its run
        if self._plan is not None:
            self._take_draws(self._plan, baseline)
        self._readings = baseline.readings
        self._tables = TableCheck(model, tables_of(self._gauges, baseline.readings, model, meanings))
        self._record(model, meanings, baseline.draws, baseline.held)
        self._watch_weak_branches(model, meanings)
        if fault.seen:
            self._fault = fault  # first: a server that has to be set up anew for the question restores what it reads
            self._client.plant(fault)

    def _watch_weak_branches(self, model: DetachedModel, meanings: ValueDigests) -> None:
        """Compare the own values of branches that are too small to be seen in what they are added to.

        They are compared before constant factors, and after them by a tolerance of their own size.
        """
        names = [branch.trunk for branch in self._gauges.branches_added]
        types = computed_types(model, names, self._source_types) if names else {}
        self._weak = tuple(
            branch
            for place, branch in enumerate(self._gauges.branches_added)
            if (ratio := self._readings.ratios.get(place)) is not None
            and ratio <= tolerance_for(types.get(branch.trunk, "float32"), self._tolerances).rtol
        )[:MOST_WEAK]
        ratios = zip(self._gauges.branches_added, self._readings.ratios.values(), strict=False)
        self._shares = {branch.added: branch.share(ratio) for branch, ratio in ratios if branch in self._weak}
        values = [name for branch in self._weak for name in branch.compared if name not in self._probes]
        if not values:
            return
        self._computed_in = {**self._computed_in, **computed_types(model, values, self._source_types)}
        self._probes = (*self._probes, *dict.fromkeys(values))
        self._client.judge(self._computed_in, self._shares)
        request = replace(self._expecting(self._probes), keep={name: meanings.values[name] for name in values})
        try:
            self._client.run(model, request)
            self._held = self._client.held_meanings()
        except StepFailed:  # its values are too many: the coverage names them
            self._probes = tuple(name for name in self._probes if name not in values)

    def _take_draws(self, plan: DrawPlan, baseline: BaselineRun) -> None:
        """Replace the plan by the draws that were chosen from it."""
        self._plan, self._skipped = None, (*self._skipped, *baseline.skipped)
        self._inputs = {known.name: known.traits for known in plan.inputs}
        self._references = tuple(Reference(plan.feeds(draw), {}, draw.label, draw) for draw in baseline.drawn)
        self._client.replace_references(self._references)

    def _record(
        self, model: DetachedModel, meanings: ValueDigests, draws: Sequence[DrawErrors], held: frozenset[str]
    ) -> Measurement:
        """The measurement of a run. A model within tolerance becomes the base that the next ones are compared with."""
        measurement = Measurement(
            worst_errors([errors for errors, _ in draws]), worst_errors([errors for _, errors in draws])
        )
        if not measurement.why:
            self._base, self._held = BaseModelRun(model, meanings), held
            self._measured[meanings.whole] = measurement
        return measurement

    def _restore(self) -> None:
        """Give a new server the values of the exported model; it holds nothing else."""
        self._held = frozenset()
        self._client.judge(self._computed_in, self._shares)
        if self._watched is not None:
            cuts = self._fault.cuts if self._fault is not None else ()
            inner = list(dict.fromkeys((*self._probes, *cuts)))
            self._client.run(self._watched, self._expecting(inner))
        if self._fault is None:
            return
        if self._context.proofs.was_killed:
            self._client.plant(self._fault)
        else:  # the fault was lost with the last server, which it may have crashed
            self._power, self._fault = self._fault.unseen(), None

    def _meanings(self, reading: CanonicalGraph) -> ValueDigests:
        return reading.meanings(lambda _, digest: self._equal.get(digest, digest))

    def _proven_equal(self, model: DetachedModel, reading: CanonicalGraph) -> Measurement | None:
        """The measurement of the base, if every claim that makes `model` equal to it holds; else None."""
        base = self._base
        if base is None or not self._references:
            return None
        by_name = claims_by_name(base, model, reading, self._equal)
        if by_name is None:
            return None
        for claims in (refine_claims(base, by_name, self._equal), by_name):
            if claims is not None and self._holds(base, claims):
                measurement = self._measured[base.meanings.whole]
                self._base = BaseModelRun(model, claims.resolve_meanings(base, self._equal))
                self._measured[self._base.meanings.whole] = measurement
                return measurement
        return None

    def _holds(self, base: BaseModelRun, claims: Claims) -> bool:
        if not claims.cover(base, self._probes):
            return False
        if not claims.claims:
            return True
        parts = parts_of(base, claims, self._held)
        try:
            return parts is not None and all(map(self._client.are_equal, parts))
        except StepFailed:  # the parts do not run by themselves; the whole model may
            return False


def _values_to_hold(model: DetachedModel, meanings: ValueDigests, inner: Sequence[str]) -> dict[str, str]:
    """The values of a run to hold for later proofs: name → meaning."""
    return {name: meanings.values[name] for name in (*small_values(model), *inner)}


MOST_WEAK: Final = 32
"""Residual branches whose own values are compared."""

WEAK: Final = (
    "a fault in {}: what it computes is below the tolerance of what it is added to, and has no value of its own in the "
    "final model to be compared"
)


def advice_on(failure: StepFailed) -> str:
    """What to do about a model that does not run as it is."""
    return SPACE if REFUSED in str(failure) else STRUCTURE_ONLY


SPACE: Final = "; free space in the folder of temporary files, which TMPDIR names, or raise the limits of the process"

STRUCTURE_ONLY: Final = (
    "; if nothing here can run it, prove by structure alone: --proof structure (proof='structure', "
    "verify.proof: structure)"
)

RANDOM: Final = (
    "every output of the model depends on random numbers that cannot be fixed ({}), so nothing can be compared; make "
    "the noise an input, take opset 11 or later, or prove by structure alone (proof: structure)"
)
"""The error where nothing could be compared; takes the outputs."""
