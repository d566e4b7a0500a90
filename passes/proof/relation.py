"""Prove a step that was asked to change what a model takes or gives: by the `Relation` of its result to the model
before.

Both models run. The result is fed with the values that the relation names, which the model before computes, and each of
its outputs has to equal the value that stands for it. A result that takes another number of rows is run on pieces of
several draws joined.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from passes.context import PassContext
from passes.proof.numbers import Errors, compare, least_precise
from passes.proof.precision import Precisions, computed_types
from passes.proof.prover import worst_errors
from passes.step import Relation
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class RelationProof:
    """The worst errors of each output over all draws, and the inputs on which the result was run."""

    errors: Mapping[str, Errors]
    feeds: Sequence[Feeds]

    @property
    def why(self) -> str:
        """What is wrong; empty for nothing."""
        bad = [f"{name}: {errors.why}" for name, errors in self.errors.items() if not errors.ok]
        return "; ".join(bad[:3]) + (f" (and {len(bad) - 3} more)" if len(bad) > 3 else "")


def prove_relation(
    before: DetachedModel, after: DetachedModel, relation: Relation, draws: Sequence[Feeds], context: PassContext
) -> RelationProof:
    """Run both models on `draws`, inputs of the model before.

    Raises:
        StepFailed: onnxruntime refuses one of the models, or stops.
    """
    types = dict(computed_types(before, relation.outputs.values()))
    if relation.judged_as:
        types |= {name: least_precise(types.get(name), relation.judged_as) for name in relation.outputs.values()}
    return context.proofs.ask(
        measure_relation,
        before=portable(relation.reference or before, context.spill),
        after=portable(relation.runs_as or after, context.spill),
        inputs=dict(relation.inputs),
        outputs=dict(relation.outputs),
        rows=relation.rows,
        draws=list(draws),
        computed_in=types,
    )


def measure_relation(
    before: MappedModel,
    after: MappedModel,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    rows: int | None,
    draws: Sequence[Feeds],
    computed_in: Precisions,
) -> RelationProof:
    """In the proof worker."""
    wanted = list(dict.fromkeys((*inputs.values(), *outputs.values())))
    first = before.session(
        [name for name in wanted if name not in {entry.name for entry in before.model().graph.input}]
    )
    second = after.session()
    known = [{**feeds, **first.run(feeds)} for feeds in draws]
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
    return RelationProof(worst_errors(measured), [fed for feeds, _ in parts for fed in feeds])


def _regroup(known: Sequence[Feeds], inputs: Mapping[str, str], rows: int) -> tuple[list[Feeds], list[Feeds]]:
    """Inputs of `rows` rows each, made of draws that are alike, and the values of the draws that they are made of."""
    shapes = {old: known[0][old].shape for old in inputs.values()}
    alike = [values for values in known if all(values[old].shape == shape for old, shape in shapes.items())]
    had = next(iter(shapes.values()))[0]
    count = math.lcm(had, rows) // had if rows else max(2, min(len(alike), MOST))
    chosen = [alike[place % len(alike)] for place in range(count)]
    whole = _join([{new: values[old] for new, old in inputs.items()} for values in chosen])
    size = rows or had * count
    pieces = range(0, had * count, size)
    return [{name: array[start : start + size] for name, array in whole.items()} for start in pieces], chosen


MOST: Final = 4
"""Draws that are joined where a model takes any number of rows."""


def _join(parts: Sequence[Feeds]) -> dict[str, np.ndarray]:
    if len(parts) == 1:
        return dict(parts[0])
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
