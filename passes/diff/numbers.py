"""How far apart two models are in what they compute: each output, and each value that both of them make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from passes.base import Workbench
from passes.diff.distances import Pair
from passes.diff.matched import Matched
from passes.diff.signature import same_outputs
from passes.errors import ModelMistake
from passes.model.sharing import portable
from passes.model.weights import DetachedModel
from passes.proof.numbers import Errors
from passes.proof.precision import computed_types
from passes.proof.prove import worst_errors
from passes.provenance.wiring import ABSENT

__all__ = ["Numbers", "ValueErrors", "compare_numbers"]

AT_ONCE: Final = 64
"""Inner values that are compared in one run, which holds them all."""


@dataclass(frozen=True, slots=True)
class ValueErrors:
    """A value that both models make, by its names, with the worst of all draws."""

    before: str
    after: str
    errors: Errors


@dataclass(frozen=True, slots=True)
class Numbers:
    """`values` are in the order in which the second model computes them; empty if they were not asked for."""

    outputs: Mapping[str, Errors]
    values: tuple[ValueErrors, ...] = ()

    @property
    def first_apart(self) -> ValueErrors | None:
        """The first inner value that is out of tolerance."""
        return next((one for one in self.values if not one.errors.ok), None)


def compare_numbers(
    matched: Matched, feeds: Sequence[Mapping[str, np.ndarray]], bench: Workbench, *, values: bool = False
) -> Numbers:
    """Run both models on each of `feeds` and compare their outputs; with `values` also what lies between.

    Raises:
        ModelMistake: they have no output in common, by name or place, or the second one asks for other inputs.
        StepFailed: onnxruntime refuses one of them, or stops.
    """
    outputs = [(old, new) for new, old in same_outputs(matched.before.proto.graph, matched.after.proto.graph).items()]
    if not outputs:
        raise ModelMistake("the models have no output in common, so there are no numbers to compare")
    missing = _inputs(matched.after) - matched.inputs.keys()
    if missing:
        raise ModelMistake(
            f"the second model has an input {min(missing)!r} that the first has not, so there are no numbers to compare"
        )
    found = _worst(matched, outputs, feeds, bench)
    inner = list(_common(matched)) if values else []
    told: list[ValueErrors] = []
    for start in range(0, len(inner), AT_ONCE):
        part = inner[start : start + AT_ONCE]
        errors = _worst(matched, part, feeds, bench)
        told.extend(ValueErrors(*pair, errors[pair]) for pair in part if pair in errors)
    return Numbers({name: errors for (_, name), errors in found.items()}, tuple(told))


def _inputs(model: DetachedModel) -> set[str]:
    graph = model.proto.graph
    return {info.name for info in graph.input} - {tensor.name for tensor in graph.initializer}


def _worst(
    matched: Matched, pairs: Sequence[Pair], feeds: Sequence[Mapping[str, np.ndarray]], bench: Workbench
) -> dict[Pair, Errors]:
    models = [portable(model, bench.spill) for model in (matched.before, matched.after)]
    draws = []
    computed_in = computed_types(matched.before, (old for old, _ in pairs))
    for feed in feeds:
        one = {**feed, **{new: feed[old] for new, old in matched.inputs.items() if old in feed}}
        found = bench.proofs.ask(
            DISTANCES, before=models[0], after=models[1], pairs=pairs, feeds=one, computed_in=computed_in
        )
        draws.append({str(place): errors for place, errors in enumerate(found) if errors is not None})
    return {pairs[int(place)]: errors for place, errors in worst_errors(draws).items()}


def _common(matched: Matched) -> Iterator[Pair]:
    """The values that matched nodes of the main graphs make, but for outputs."""
    same, made = matched.same, [_inner(model) for model in (matched.before, matched.after)]
    for old, new in matched.pairs():
        for one, other in zip(same.before.items[old].makes, same.after.items[new].makes, strict=False):
            pair = (same.before.names[one], same.after.names[other])
            if ABSENT not in (one, other) and pair[0] in made[0] and pair[1] in made[1]:
                yield pair


def _inner(model: DetachedModel) -> set[str]:
    made = {name for node in model.proto.graph.node for name in node.output}
    return made - {info.name for info in model.proto.graph.output}


DISTANCES: Final = "passes.diff.distances:distances"
