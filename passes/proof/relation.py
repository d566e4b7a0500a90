"""Prove a step that was asked to change what a model takes or gives: by the `Relation` of its result to the model
before.

Both models run. The result is fed with the values that the relation names, which the model before computes, and each of
its outputs has to equal the value that stands for it. A result that takes another number of rows is run on pieces of
several draws joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx

from passes.context import PassContext
from passes.errors import ModelError, StepCrashed, StepFailed, StepTimedOut
from passes.graph.index import required_inputs
from passes.graph.inference import types_of
from passes.proof.draw_choice import choose_draws, choose_in_worker
from passes.proof.draws import Draw, DrawPlan
from passes.proof.noise import FixedNoise
from passes.proof.numbers import DRAWN, Errors, compare, least_precise
from passes.proof.precision import Precisions, computed_types
from passes.proof.prover import describe_errors, describe_failure, describe_nan, describe_random, worst_errors
from passes.step import Relation
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class RelationProof:
    """The worst errors of each output over all draws, and the inputs on which the result was run.

    `fault` says why the model before cannot be compared with; `drawn` and `skipped` are what was chosen of a plan.
    """

    errors: Mapping[str, Errors]
    feeds: Sequence[Feeds]
    fault: str = ""
    drawn: Sequence[Draw] = ()
    skipped: Sequence[str] = ()

    @property
    def why(self) -> str:
        """What is wrong; empty for nothing."""
        return describe_errors(self.errors)


@dataclass(slots=True)
class ModelInputs:
    """The inputs of a model on which a change of it is proven: those that are known, or draws of a plan, which the
    proof itself chooses unless a step asks for them before."""

    model: DetachedModel
    context: PassContext
    known: Sequence[Feeds] = ()
    plan: DrawPlan | None = None
    fault: str = ""
    """Why the model cannot be compared with, after `read` failed."""

    def of_part(self, part: DetachedModel, *, only_runs: bool) -> ModelInputs:
        """The inputs for a part of the model.

        Args:
            part: takes some of the inputs.
            only_runs: take the draws that are needed to see that it runs; further steps are compared on all.

        Returns:
            What is known of its inputs, or the plan of its draws.
        """
        taken = part.index.required_inputs
        known = [{name: feeds[name] for name in taken if name in feeds} for feeds in self.known]
        plan = self.plan and (self.plan.reduce_to_needed() if only_runs else self.plan)
        plan = plan and replace(plan, inputs=tuple(entry for entry in plan.inputs if entry.name in taken))
        return ModelInputs(part, self.context, known, plan)

    @property
    def are_none(self) -> bool:
        """Whether nothing is to be run."""
        return self.plan is None and not self.known

    def read(self) -> Sequence[Feeds]:
        """The inputs; draws are chosen now.

        Raises:
            StepFailed: the model does not run on them; `fault` then says why.
        """
        if self.plan is not None:
            outputs = self.model.index.outputs
            random = [name for name, dtype in computed_types(self.model, outputs).items() if dtype == DRAWN]
            try:
                chosen, _ = choose_in_worker(self.model, self.plan, self.context, random)
            except StepFailed as failure:
                self.fault = describe_failure(failure, self.context.run_advice)
                raise
            self.known, self.plan = [draw.feeds for draw in chosen], None
        return self.known


def prove_relation(
    before: DetachedModel, after: DetachedModel, relation: Relation, inputs: ModelInputs, context: PassContext
) -> RelationProof:
    """Run both models on `inputs` of the model before.

    Raises:
        ModelError: the model before does not run, or computes nothing that can be compared.
        StepFailed: onnxruntime refuses the model after, or stops; or `inputs` cannot be read.
    """
    noise = FixedNoise.of(before)
    source, result = (
        noise.apply(model) if noise.nodes else model
        for model in (relation.reference or before, relation.runs_as or after)
    )
    then, made = relation.then, relation.then.outputs if relation.then else {}
    own = [name for name in relation.outputs.values() if name not in made.values()]
    types = dict(computed_types(source, dict.fromkeys((*own, *source.index.outputs))))
    if then is not None:
        types |= {made[name]: dtype for name, dtype in computed_types(then.model, made).items()}
    if relation.outputs and all(types.get(name) == DRAWN for name in relation.outputs.values()):
        raise ModelError(describe_random(relation.outputs, context.run_advice))
    if relation.judged_as:
        types |= {name: least_precise(types.get(name), relation.judged_as) for name in relation.outputs.values()}
    asked = {
        "before": portable(source, context.spill),
        "after": portable(result, context.spill),
        "inputs": dict(relation.inputs),
        "outputs": dict(relation.outputs),
        "rows": relation.rows,
        "then": then and (portable(then.model, context.spill), dict(then.inputs), dict(then.outputs)),
        "computed_in": types,
        "run_advice": context.run_advice,
    }
    try:
        proof = context.proofs.ask(measure_relation, draws=inputs.plan or list(inputs.known), **asked)
    except (StepCrashed, StepTimedOut):
        if inputs.plan is None:
            raise
        proof = context.proofs.ask(measure_relation, draws=list(inputs.read()), **asked)
    if proof.fault:
        raise ModelError(proof.fault)
    return proof


def same_inside(
    before: DetachedModel,
    after: DetachedModel,
    relation: Relation,
    names: Iterable[str],
    inputs: ModelInputs,
    context: PassContext,
) -> frozenset[str]:
    """Which of `names`, values of both models, stand for the same value inside, by the tolerance of the relation.

    Args:
        before: the model before.
        after: the result, which is proven.
        relation: between the two.
        names: only those that nodes of both models make are asked for.
        inputs: of the model before.
        context: the workers.
    """
    types, result = types_of(before.proto), relation.runs_as or after
    made = before.index.producers.keys() & result.index.producers.keys() & types.keys()
    asked = [name for name in names if name in made]
    same = set[str]()
    for start in range(0, len(asked), AT_ONCE):
        proto, shown = result.copy_proto(), dict[str, str]()
        for name in asked[start : start + AT_ONCE]:
            kind, copy = types[name].type.tensor_type.elem_type, f"{name}{AS_BEFORE}"
            proto.graph.node.append(onnx.helper.make_node("Cast", [name], [copy], to=kind))
            proto.graph.output.append(onnx.helper.make_tensor_value_info(copy, kind, None))
            shown[copy] = name
        inner = replace(relation, outputs=shown, runs_as=result.with_proto(proto))
        try:
            errors = prove_relation(before, after, inner, inputs, context).errors
        except (StepFailed, ModelError):  # a value that cannot be an output, or holds a NaN, is not proven
            continue
        same.update(name for copy, name in shown.items() if copy in errors and errors[copy].ok)
    return frozenset(same)


AT_ONCE: Final = 64
"""Values that are compared in one run; all are in memory at once."""

AS_BEFORE: Final = "/as before"
"""Ends the name of a copy of a value, in the type that the model before computes it in."""


def measure_relation(
    before: MappedModel,
    after: MappedModel,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    rows: int | None,
    draws: Sequence[Feeds] | DrawPlan,
    computed_in: Precisions,
    then: tuple[MappedModel, Mapping[str, str], Mapping[str, str]] | None = None,
    run_advice: str = "",
) -> RelationProof:
    """In the proof worker; `then` are the fields of a Continuation."""
    graph, drawn, skipped = before.model().graph, list[Draw](), list[str]()
    taken = {entry.name for entry in required_inputs(graph)}
    needed = [*inputs.values(), *outputs.values()]
    if then is not None:
        needed = [name for name in (*needed, *then[1].values()) if name not in then[2].values()]
    wanted = [name for name in dict.fromkeys(needed) if name not in taken]
    try:
        first = before.session(wanted, may_evaluate=True)
        if isinstance(draws, DrawPlan):
            steady = [info.name for info in graph.output if computed_in.get(info.name) != DRAWN]
            chosen = list(choose_draws(draws, first.run, steady, skipped))
            known, drawn = [{**draw.feeds, **draw.results} for draw in chosen], [draw.draw for draw in chosen]
        else:
            known = [{**feeds, **first.run(feeds)} for feeds in draws]
        known = known if then is None else _go_on(known, *then)
    except StepFailed as failure:
        return RelationProof({}, (), describe_failure(failure, run_advice))
    for name in outputs.values():
        if any(values[name].dtype.kind == "f" and np.isnan(values[name]).any() for values in known):
            return RelationProof({}, (), describe_nan(name, run_advice))
    second = after.session(may_evaluate=first.is_evaluated)
    if rows is None:
        parts = [([{new: values[old] for new, old in inputs.items()}], [values]) for values in known]
    else:
        parts = [_regroup(known, inputs, rows)]
    measured = []
    for feeds, values in parts:
        results = [second.run(fed) for fed in feeds]
        expected = _join([{new: value[old] for new, old in outputs.items()} for value in values])
        found = _join(results)
        measured.append(
            {new: compare(expected[new], found[new], computed_in=computed_in.get(old)) for new, old in outputs.items()}
        )
    return RelationProof(worst_errors(measured), [fed for feeds, _ in parts for fed in feeds], "", drawn, skipped)


def _go_on(
    known: Sequence[Feeds], model: MappedModel, inputs: Mapping[str, str], outputs: Mapping[str, str]
) -> list[Feeds]:
    """The values of the model before, and those of the model that runs after it, by the fields of its Continuation."""
    session = model.session(may_evaluate=True)
    made = [session.run({new: values[old] for new, old in inputs.items()}) for values in known]
    return [
        {**values, **{outputs[name]: array for name, array in found.items() if name in outputs}}
        for values, found in zip(known, made, strict=True)
    ]


def _regroup(known: Sequence[Feeds], inputs: Mapping[str, str], rows: int) -> tuple[list[Feeds], list[Feeds]]:
    """Inputs of `rows` rows each, made of draws that are alike, and the values of the draws that they are made of. A
    scalar has no rows: draws that are alike have the same one."""
    first = {old: known[0][old] for old in inputs.values()}
    alike = [values for values in known if all(_is_alike(values[old], array) for old, array in first.items())]
    had = next(array.shape[0] for array in first.values() if array.ndim)
    count = math.lcm(had, rows) // had if rows else max(2, min(len(alike), MOST))
    chosen = [alike[place % len(alike)] for place in range(count)]
    whole = _join([{new: values[old] for new, old in inputs.items()} for values in chosen])
    size = rows or had * count
    pieces = range(0, had * count, size)
    return [
        {name: array[start : start + size] if array.ndim else array for name, array in whole.items()}
        for start in pieces
    ], chosen


def _is_alike(found: np.ndarray, first: np.ndarray) -> bool:
    return found.shape == first.shape and (first.ndim > 0 or np.array_equal(found, first))


MOST: Final = 4
"""Draws that are joined where a model takes any number of rows."""


def _join(parts: Sequence[Feeds]) -> dict[str, np.ndarray]:
    """The rows of all parts, one part after the other.

    Raises:
        StepFailed: the parts of a value differ in another axis than the first.
    """
    if len(parts) == 1:
        return dict(parts[0])
    for name in parts[0]:
        shapes = dict.fromkeys(part[name].shape for part in parts)
        if len({shape[1:] for shape in shapes}) > 1:
            found = ", ".join(map(str, shapes))
            raise StepFailed(f"{name!r} has the shapes {found} for some rows each, so its first axis is no batch")
    return {
        name: np.concatenate([part[name] for part in parts]) if first.ndim else first
        for name, first in parts[0].items()
    }
