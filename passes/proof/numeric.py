"""Proof by running: the outputs of models are compared with references that another program computed once.

A comparison of outputs may miss faults: with tiny random weights, zeroing a layer's Q and K moved a random BEiT's
output by 1.6e-5. So the values at kept structures are compared too, and a fault in every kept weight is injected, to
measure whether it is detected (`exported_run.py`). Most changes are small, so most of a model need not be run again:
`claims.py` decides what has to be run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Self

import numpy as np
import onnx

from passes.context import PassContext
from passes.errors import ModelError, StepCrashed, StepFailed, StepTimedOut
from passes.graph.op_facts import opset_of
from passes.model.analysis import AnalyzedModel
from passes.model.canonical import ValueDigests
from passes.proof.claims import ProvenModel, make_claims, part_of, small_values, tail_of
from passes.proof.coverage import Coverage, coverage_of
from passes.proof.draws import BROUGHT_DOWN, DrawPlan, Trait
from passes.proof.exported_run import MOST_WEAK, ExportedRun
from passes.proof.gauges import Gauges, Readings, gauges_of_changes
from passes.proof.noise import FixedNoise
from passes.proof.numbers import Errors, Tolerance
from passes.proof.precision import Precisions, computed_types
from passes.proof.prover import (
    NOTHING,
    Measurement,
    Reference,
    Sensitivity,
    describe_failure,
    describe_nan,
    describe_random,
    ranges_of,
    worst_errors,
)
from passes.proof.runs import Criteria, ProofClient, RunAnswer
from passes.proof.tables import Match, TableCheck, TablesPart, match_tables, tables_of
from passes.proof.weak_blocks import SumTerm
from passes.structures import Instance
from passes.weights.detached import DetachedModel
from passes.weights.sharing import portable


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
        self._client = ProofClient(self._references, Criteria(dict(tolerances or {})), context)
        self._is_own = False
        """Whether the first model is the reference."""
        self._source_types = computed_in
        self._exported: ExportedRun | None = None
        self._answer: Callable[[], RunAnswer] | None = None
        """Waits for the run of the exported model, until its values are taken."""
        self._readings = Readings()
        self._tables: TableCheck | None = None
        self._probes: tuple[str, ...] = ()
        """Values inside of models to compare."""
        self._weak: tuple[SumTerm, ...] = ()
        self._power: Sensitivity | None = None
        self._measured: dict[str, Measurement] = {}
        self._equal = defaultdict[int, dict[str, str]](dict)
        """Opset → the digest of a value → the digest of a value that was proven to be equal."""
        self._before: ProvenModel | None = None
        self._ran: onnx.ModelProto | None = None

    @classmethod
    def of_itself(cls, feeds: Sequence[Mapping[str, np.ndarray]], context: PassContext) -> Self:
        """A prover whose reference is the first model that it watches."""
        draws = [Reference(arrays, {}, f"draw {index}") for index, arrays in enumerate(feeds)]
        prover = cls(draws, context)
        prover._is_own = True
        return prover

    @classmethod
    def of_plan(cls, plan: DrawPlan, context: PassContext) -> Self:
        """`of_itself`, on the draws of `plan` on which that model runs."""
        prover = cls((), context)
        prover._is_own, prover._plan = True, plan
        return prover

    def watch(self, model: AnalyzedModel, instances: Sequence[Instance]) -> None:
        """Compare the values at `instances` too, and measure whether a fault in their weights is detected.

        `model` is the exported model, whose outputs have been compared with the reference. The worker runs it while the
        first step runs; a model that cannot be run is refused at the first question about it.

        Raises:
            ModelError: all of its outputs depend on random values.
        """
        self._measured.clear()
        self._answer = None
        if not self._references and self._plan is None:
            return
        self._power = None
        run = self._exported = ExportedRun(model, instances, self._source_types, self._digests)
        self._probes = run.probes
        self._judge_by({name: run.types[name] for name in (*run.outputs, *run.inner) if name in run.types})
        own, left = run.random_outputs(self._client.criteria.computed_in)
        if len(left) == len(run.outputs) > 0:
            raise ModelError(describe_random(run.outputs, self._context.run_advice))
        if left:
            shown = ", ".join(map(repr, left))
            self._skipped = (*self._skipped, f"not compared: {shown} (random values; shape and dtype are compared)")
        run.own_outputs = run.outputs if self._is_own else own
        self._answer = self._run_exported(run)

    def _run_exported(self, run: ExportedRun) -> Callable[[], RunAnswer]:
        return self._client.run_exported(run.model, (*run.own_outputs, *run.inner), run.small, run.gauges, self._plan)

    def _take_exported(self) -> None:
        """Wait for the run of the exported model, which the worker does while the first step runs.

        Raises:
            ModelError: it does not run, or computes NaN where it is its own reference.
        """
        run, answer = self._exported, self._answer
        if run is None or answer is None:
            return
        try:
            try:
                answered = answer()
            except (StepCrashed, StepTimedOut) as failure:
                if self._plan is None:
                    raise
                self._plan, self._skipped = self._plan.reduce_to_needed(), (BROUGHT_DOWN.format(failure),)
                answered = self._run_exported(run)()
        except StepFailed as failure:
            raise ModelError(describe_failure(failure, self._context.run_advice)) from failure
        self._record_exported(run, answered)
        self._answer = None

    def _fix_noise(self, model: AnalyzedModel) -> AnalyzedModel:
        """`model` with the noise of the exported model."""
        noise = self._exported.noise if self._exported is not None else FixedNoise(())
        fixed = noise.apply(model.model) if noise.nodes else model.model
        return model if fixed is model.model else AnalyzedModel(fixed)

    def _judge_by(self, types: Precisions) -> None:
        """Take the tolerances of values from the types that the exported model computes them in.

        They hold for all models that passes return: a pass that computes in a less precise type does not get that
        type's tolerance.
        """
        self._client.criteria = replace(self._client.criteria, computed_in=types)

    def feeds(self) -> Sequence[Mapping[str, np.ndarray]]:
        if self._plan is not None:  # the run chooses from it
            self._take_exported()
        given = [known for known in self._references if known.draw is not None and known.draw.source]
        return [reference.feeds for reference in given or self._references]

    def measure_export(self, model: DetachedModel) -> Measurement:
        """`run` the exported model, before any pass; no later model is compared with its values.

        Raises:
            StepFailed: onnxruntime refuses or stops.
        """
        self._judge_by(computed_types(model, model.index.outputs, self._source_types))
        return self.run(AnalyzedModel(model), hold=False)

    def measure_reference(self, model: DetachedModel) -> Measurement:
        """`measure_export` of the very model that computed the references: nothing is run."""
        self._judge_by(computed_types(model, model.index.outputs, self._source_types))
        errors = self._client.criteria.errors
        outputs = [dict(reference.outputs) for reference in self._references]
        return Measurement(worst_errors([errors(arrays, arrays) for arrays in outputs]), {})

    def power(self) -> Sensitivity:
        """Whether a fault in the kept weights would be detected; measured at the first call."""
        self._take_exported()
        if self._power is None:
            fault = self._exported.fault if self._exported is not None else None
            self._power = Sensitivity(math.inf, ()) if fault is None else fault.unseen()
            if fault is not None and fault.seen:
                try:
                    self._power = fault.sensitivity(self._client.excess(fault))
                except StepFailed:  # with zeros as weights the model may not run
                    self._power = fault.unseen()
        return replace(self._power, weak=tuple(dict.fromkeys(term.name for term in self._weak)))

    def measure(self, model: AnalyzedModel) -> Measurement:
        """Compare every draw. A model that computes the same as one before is not run again.

        Raises:
            StepFailed: onnxruntime refuses or stops.
        """
        self._take_exported()
        fixed = self._fix_noise(model)
        digests = self._digests(fixed)
        if digests.whole not in self._measured:
            wrong = self._wrong_tables(model, digests)
            if wrong:
                return Measurement({}, {}, wrong)
            self._measured[digests.whole] = (
                self._prove_equal(fixed) or self._run_tail(fixed, digests) or self.run(model)
            )
        return self._measured[digests.whole]

    def run(self, model: AnalyzedModel, *, hold: bool = True) -> Measurement:
        self._take_exported()
        analyzed = self._fix_noise(model)
        fixed, digests = analyzed.model, self._digests(analyzed)
        computed = fixed.index.live_values
        inner = [name for name in self._probes if name in computed]
        held = self._client.held_digests()
        names = (*small_values(fixed), *inner) if hold and self._has_exported_opset(fixed) else ()
        fresh = {name: digest for name in names if (digest := digests.values[name]) not in held}
        answer = self._client.run(fixed, inner, fresh)
        self._ran = model.model.proto
        return self._record(fixed, digests, answer, inner)

    def _has_exported_opset(self, model: DetachedModel) -> bool:
        """Whether a digest means the same value in `model` as in those whose values are held: no digest says of which
        opset an operator is."""
        return self._exported is not None and opset_of(model.proto) == opset_of(self._exported.model.proto)

    def has_run(self, model: DetachedModel) -> bool:
        return self._ran is model.proto

    def coverage(self, model: AnalyzedModel) -> Coverage:
        self._take_exported()
        draws = [reference.draw for reference in self._references if reference.draw is not None]
        labels = [reference.label for reference in self._references]
        analyzed = self._fix_noise(model)
        self._wrong_tables(model, self._digests(analyzed))
        tables, uncovered = (self._tables.tables, self._tables.uncovered) if self._tables else ((), ())
        computed = analyzed.model.index.live_values
        lost = [term for term in self._weak if computed.intersection(self._probes).isdisjoint(term.compared)]
        weak = dict.fromkeys(WEAK.format(term.name) for term in lost)
        gauges = self._exported.gauges if self._exported is not None else Gauges()
        known = (self._inputs, (*self._skipped, *weak), gauges, self._readings, tables, uncovered)
        return coverage_of(draws, labels, *known, self._measure_changes(analyzed.model), ranges_of(self._references))

    def _measure_changes(self, model: DetachedModel) -> tuple[Gauges, Readings]:
        """Gauges in the nodes that passes have brought into the final `model`, and what they read."""
        gauges = Gauges() if self._exported is None else gauges_of_changes(self._exported.model, model)
        if self._tables is not None and any(table.is_partial for table in self._tables.tables):
            gauges = replace(gauges, lookups=())  # tables are compared with those of the source
        return gauges, Readings() if gauges == Gauges(nested=gauges.nested) else self._client.read_gauges(model, gauges)

    def _wrong_tables(self, model: AnalyzedModel, digests: ValueDigests) -> str:
        """The fault in the rows of tables that no draw reads; empty for none."""
        return "" if self._tables is None else self._tables.fault_of(model.model, digests, self._match_tables)

    def _match_tables(self, tables: TablesPart) -> Sequence[Match]:
        source, tolerances = portable(tables.model, self._context.spill), self._client.criteria.tolerances
        asked = {"part": source, "olds": tables.olds, "news": tables.news, "tolerances": tolerances}
        try:
            return self._context.proofs.ask(match_tables, **asked)
        except StepFailed:  # the report then lists them as unknown
            return [Match(is_unknown=True)] * len(tables.news)

    def _record_exported(self, run: ExportedRun, answer: RunAnswer) -> None:
        if self._plan is not None:
            plan, self._plan, self._skipped = self._plan, None, (*self._skipped, *answer.skipped)
            self._inputs = {known.name: known.traits for known in plan.inputs}
            self._references = tuple(Reference(plan.feeds(draw), {}, draw.label, draw) for draw in answer.drawn)
            self._client.take_draws(self._references)
        hold = {name: run.digests.values[name] for name in (*run.small, *run.inner)}
        self._client.note(answer, run.own_outputs, run.inner, hold)
        broken = self._client.has_nan()
        if broken:
            raise ModelError(describe_nan(broken, self._context.run_advice))
        self._readings = answer.readings
        self._tables = TableCheck(run.model, tables_of(run.gauges, answer.readings, run.model, run.digests))
        self._record(run.model, run.digests, answer, run.inner)
        self._watch_weak_terms(run)

    def _watch_weak_terms(self, run: ExportedRun) -> None:
        """Compare the own values of terms that are too small to be seen in what they are added to.

        They are compared before constant factors, and after them by a tolerance of their own size.
        """
        criteria = self._client.criteria
        self._weak, shares = run.find_weak(self._readings, criteria.tolerances)
        compared = (name for term in self._weak[:MOST_WEAK] for name in term.compared)
        names = dict.fromkeys(name for name in compared if name not in self._probes)
        types = {name: run.types[name] for name in names if name in run.types}
        self._client.criteria = replace(criteria, shares=shares, computed_in={**criteria.computed_in, **types})
        if not names:
            return
        try:
            answer = self._client.run_exported(run.model, (*names,), (), Gauges(), None)()
        except StepFailed:  # its values are too many: the coverage names them
            return
        self._client.note(answer, (), (*names,), {name: run.digests.values[name] for name in names})
        self._probes = (*self._probes, *names)

    def _run_tail(self, model: AnalyzedModel, digests: ValueDigests) -> Measurement | None:
        """The measurement of `model` by the nodes after held values alone; None where they are most of it.

        Values with the digest that they had in the model before have the errors that they had there, in the same opset.
        """
        before, fixed = self._before, model.model
        if before is None or not self._references or not self._has_exported_opset(fixed):
            return None
        inner = [name for name in self._probes if name in fixed.index.live_values]
        old, known = before.digests.values, {**before.measurement.errors, **before.measurement.inner}
        is_same_opset = self._has_exported_opset(before.model)
        same = {name for name in known if is_same_opset and name in old and digests.values.get(name) == old[name]}
        names = [name for name in (*fixed.index.outputs, *inner) if name not in same]
        part = tail_of(fixed, digests, names, self._client.held_digests())
        try:
            answer = None if part is None else self._client.run_part(part, names)
        except StepFailed:  # the part does not run by itself; the whole model may
            return None
        return None if answer is None else self._record(fixed, digests, answer, inner, before.measurement)

    def _record(
        self,
        model: DetachedModel,
        digests: ValueDigests,
        answer: RunAnswer,
        inner: Sequence[str],
        known: Measurement = NOTHING,
    ) -> Measurement:
        """The measurement of a run; values that it did not compute have the errors that are `known`. A model within
        tolerance is the reference of the next ones."""
        outputs = [info.name for info in model.proto.graph.output]

        def worst(names: Sequence[str], known: Mapping[str, Errors]) -> Mapping[str, Errors]:
            found = [{name: draw.errors[name] for name in names if name in draw.errors} for draw in answer.draws]
            return {**{name: known[name] for name in names if name in known}, **worst_errors(found)}

        measurement = Measurement(worst(outputs, known.errors), worst(inner, known.inner))
        if not measurement.why:
            self._before = ProvenModel(model, digests, measurement)
            self._measured[digests.whole] = measurement
        return measurement

    def _digests(self, model: AnalyzedModel) -> ValueDigests:
        equal = self._equal[opset_of(model.model.proto)]
        return model.canonical.value_digests(lambda _, digest: equal.get(digest, digest))

    def _prove_equal(self, model: AnalyzedModel) -> Measurement | None:
        """The measurement of the model before, if every claim that makes `model` equal to it holds; else None."""
        before, equal = self._before, self._equal[opset_of(model.model.proto)]
        claims = make_claims(before, model, equal) if before is not None and self._references else None
        if before is None or claims is None or not claims.cover(before, self._probes):
            return None
        if claims.names:
            held = self._client.held_digests() if self._has_exported_opset(model.model) else frozenset[str]()
            part = part_of(before, claims, held)
            try:
                if part is None or not self._client.are_equal(part):
                    return None
            except StepFailed:  # the part does not run by itself; the whole model may
                return None
        equal |= {digest: before.digests.values[name] for name, digest in claims.names.items()}
        self._before = ProvenModel(model.model, claims.digests, before.measurement)
        self._measured[self._digests(model).whole] = before.measurement
        return before.measurement


WEAK: Final = (
    "a fault in {}: what it computes is below the tolerance of what it is added to, and has no value of its own in the "
    "final model to be compared"
)
