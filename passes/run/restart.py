"""Run a step that makes a reference: what it was asked for changes inputs, outputs or types, so that it is proven by
the relation of its result to the model before. The steps after it are compared with that result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from passes.context import PassContext
from passes.errors import ModelError, StepFailed
from passes.model.analysis import AnalyzedModel
from passes.model.canonical import CanonicalModel
from passes.model.signature import describe_lost_training, drop_stale_training
from passes.policy.policy import Policy
from passes.proof.coverage import Coverage, coverage_of
from passes.proof.gauges import Gauges, Readings
from passes.proof.numbers import Errors
from passes.proof.relation import ModelInputs, RelationProof, prove_relation, same_inside
from passes.provenance import Carrier
from passes.run.apply_step import apply_step, keep_ir_version
from passes.run.result import PassRow, PassRun, Status, op_changes
from passes.step import Relation, Repeat, Step
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class Restart:
    """The model from which the run goes on, the inputs to compare on, the row of the step, and what its proof drew.

    `same`: the values with an encoding that both models have under one name, and that the proof has compared.
    """

    model: DetachedModel
    row: PassRow
    feeds: Sequence[Mapping[str, np.ndarray]]
    coverage: Coverage = field(default_factory=Coverage)
    same: frozenset[str] = frozenset()


def restart(
    step: Step,
    model: DetachedModel,
    inputs: ModelInputs,
    policy: Policy,
    context: PassContext,
    *,
    is_last: bool,
    encoded: Iterable[str] = (),
) -> Restart:
    """Run `step` on `model` and prove its relation on `inputs`.

    Args:
        step: changes what the model takes or gives.
        model: the model before.
        inputs: none where the proof is by structure alone.
        policy: whether the step is skipped.
        context: the workers.
        is_last: no step comes after it, which would be compared on the same inputs.
        encoded: the values that have an encoding.

    Returns:
        The model that the step made; `model` itself where the step is skipped or rejected.

    Raises:
        ModelError: `model` does not run, or computes nothing that can be compared.
    """
    nodes = len(model.proto.graph.node)

    def reject(status: Status, reason: str, errors: Mapping[str, Errors] | None = None) -> Restart:
        reason = " ".join(reason.split())
        row = PassRow(step.name, step.source, status, reason, nodes, nodes, 0.0, bool(errors), errors or {})
        return Restart(model, row, inputs.known)

    skip = policy.skips(step.name)
    if skip is not None:
        return reject(Status.SKIPPED, skip.reason)
    asked = inputs
    try:
        with context.drawing(inputs.read):
            result = apply_step(step, model, context)
        if not result.changed:
            return reject(Status.RAN, result.why or "")
        before, after = AnalyzedModel(model), AnalyzedModel(result.model)
        keep_ir_version(model, result.model)
        if after.invalid and not before.invalid:
            return reject(Status.REVERTED, f"makes a model that is not valid ONNX: {after.invalid}")
        proof = RelationProof({}, ())
        if result.relation is not None and not inputs.are_none:
            is_same = _computes_the_same(before.canonical, after.canonical, result.relation)
            asked = inputs.of_part(result.model, only_runs=is_last) if is_same else inputs
            proof = prove_relation(asked.model, result.model, result.relation, asked, context)
    except StepFailed as failure:
        if inputs.fault or asked.fault:
            raise ModelError(inputs.fault or asked.fault) from failure
        return reject(Status(failure.status), str(failure) or type(failure).__name__)
    if proof.why:
        return reject(Status.REVERTED, f"differs: {proof.why}", proof.errors)
    Carrier().carry(before, after, step.name)
    made = drop_stale_training(model, result.model)
    row = PassRow(
        *(step.name, step.source, Status.RAN, result.why or "", nodes, len(made.proto.graph.node)),
        *(0.0, True, proof.errors, op_changes(model, made)),
        remarks=(*filter(None, [describe_lost_training(model, made)]),),
    )
    labels = [draw.label for draw in proof.drawn]
    traits = {known.name: known.traits for known in inputs.plan.inputs} if inputs.plan else {}
    coverage = coverage_of(proof.drawn, labels, traits, proof.skipped, Gauges(), Readings(), (), ())
    same, relation = frozenset[str](), result.relation
    if relation is not None and not inputs.are_none:
        cuts = {name for new, name in relation.inputs.items() if new == name and name in model.index.producers}
        if cuts or relation.changes_values:
            encoded = [*encoded]
            inner = same_inside(model, result.model, relation, encoded, inputs, context)
            same = inner | cuts.intersection(encoded)
    return Restart(made, row, proof.feeds, coverage, same)


def _computes_the_same(before: CanonicalModel, after: CanonicalModel, relation: Relation) -> bool:
    """Whether the model after computes each output by the same operators on the same weights and inputs as the model
    before: then it is a part of that model, and only has to run."""
    pairs = (*relation.inputs.items(), *relation.outputs.items())
    if before.header != after.header or any(new != old for new, old in pairs) or relation.changes_values:
        return False
    olds, news = (canonical.value_digests().values for canonical in (before, after))
    return all(olds[name] == news[name] for name in relation.outputs)


def join_runs(first: PassRun, then: PassRun) -> PassRun:
    """Two stages of one recipe as one run; a structure that the first stage lost is lost."""
    if not then.rows:  # nothing was run after the step
        then = replace(then, power=first.power, coverage=first.coverage, example=first.example)
    lost = tuple(verdict for verdict in first.structures if not verdict.kept)
    remarks = tuple(dict.fromkeys((*first.remarks, *then.remarks)))
    encodings = then.encodings
    if first.encodings is not None and encodings is not None:
        from passes.encodings.carry import join_carried  # few runs have encodings

        encodings = join_carried(first.encodings, encodings)
    return replace(
        then,
        rows=(*first.rows, *then.rows),
        structures=(*lost, *then.structures),
        nodes_before=first.nodes_before,
        remarks=remarks,
        encodings=encodings,
    )


def describe_misplaced(step: Step | Repeat) -> str:
    """Why a step that makes a reference cannot run where it stands."""
    if isinstance(step, Repeat):
        names = ", ".join(inner.name for inner in step.steps if inner.makes_reference)
        return f"repeat: {names} is asked for once; put it before or after those that are repeated"
    return (
        f"{step.name} changes what the model takes, gives or computes, and this run compares with the outputs of its "
        "source; run it on the final ONNX file: onnxline optimize MODEL -o OUT --recipe FILE"
    )
