"""How far apart two models are in what they compute: each output, and each value that both of them make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import ModelProto, TensorProto

from passes.context import PassContext
from passes.diff.distances import Distance, Pair
from passes.diff.matched import Matched
from passes.diff.signature import same_outputs
from passes.errors import ModelError, StepFailed
from passes.model.sharing import portable
from passes.model.weights import DetachedModel
from passes.optimize import plan_draws
from passes.proof.draw_choice import choose_in_worker
from passes.proof.numbers import Errors
from passes.proof.precision import computed_types
from passes.proof.prove import worst_errors
from passes.provenance.wiring import ABSENT

__all__ = ["DrawnInputs", "Numbers", "ValueErrors", "compare_numbers", "draw_inputs", "measure_pairs"]

AT_ONCE: Final = 64
"""Inner values that are compared in one run, which holds them all."""

MOST_SAID: Final = 200
"""Characters of what onnxruntime says of a draw."""


@dataclass(frozen=True, slots=True)
class ValueErrors:
    """A value that both models make, by its names, with the worst of all draws."""

    before: str
    after: str
    errors: Errors


@dataclass(frozen=True, slots=True)
class Numbers:
    """`values` are in the order in which the second model computes them; empty if they were not asked for.

    `draws` are those that both models ran on; `not_run` says of the others, on which the first one runs, why the second
    does not.
    """

    outputs: Mapping[str, Errors]
    values: tuple[ValueErrors, ...] = ()
    draws: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()

    @property
    def first_apart(self) -> ValueErrors | None:
        """The first inner value that is out of tolerance."""
        return next((one for one in self.values if not one.errors.ok), None)


@dataclass(frozen=True, slots=True)
class DrawnInputs:
    """Inputs of the first model, with what they are called in words."""

    label: str
    feeds: Mapping[str, np.ndarray]


def draw_inputs(matched: Matched, bench: PassContext, most: int | None = None) -> list[DrawnInputs]:
    """The draws of a proof (`passes.optimize.plan_draws`) on which the first model runs; `most` of them.

    A dim that only the second model fixes is drawn as it asks for.

    Raises:
        ModelError: an input is no tensor.
        StepFailed: the first model does not run.
    """
    plan = plan_draws(matched.before, inputs=_with_fixed_dims(matched))
    chosen, _ = choose_in_worker(matched.before, plan, bench)
    return [DrawnInputs(one.draw.label, one.feeds) for one in chosen[:most]]


def _with_fixed_dims(matched: Matched) -> ModelProto:
    """The inputs of the first model, with the sizes that those of the second one have."""
    inputs = ModelProto()
    inputs.graph.input.extend(matched.before.proto.graph.input)
    inputs.graph.initializer.extend(TensorProto(name=tensor.name) for tensor in matched.before.proto.graph.initializer)
    fixed = {matched.inputs.get(info.name): info.type.tensor_type.shape.dim for info in matched.after.proto.graph.input}
    for info in inputs.graph.input:
        for dim, other in zip(info.type.tensor_type.shape.dim, fixed.get(info.name, ()), strict=False):
            if other.HasField("dim_value") and not dim.HasField("dim_value"):
                dim.dim_value = other.dim_value
    return inputs


def compare_numbers(
    matched: Matched, draws: Sequence[DrawnInputs], bench: PassContext, *, values: bool = False
) -> Numbers:
    """Run both models on each of `draws` and compare their outputs; with `values` also what lies between.

    Raises:
        ModelError: they have no output in common, by name or place, or the second one asks for other inputs.
        StepFailed: onnxruntime refuses one of them, or stops.
    """
    outputs = [(old, new) for new, old in same_outputs(matched.before.proto.graph, matched.after.proto.graph).items()]
    if not outputs:
        raise ModelError("the models have no output in common, so there are no numbers to compare")
    missing = _inputs(matched.after) - matched.inputs.keys()
    if missing:
        raise ModelError(
            f"the second model has an input {min(missing)!r} that the first has not, so there are no numbers to compare"
        )
    found, failed = measure_pairs(matched, outputs, draws, bench)
    if failed.keys() >= {one.label for one in draws}:
        raise StepFailed(f"the second model does not run: {next(iter(failed.values()))}")
    draws = [one for one in draws if one.label not in failed]
    inner = measure_pairs(matched, list(_common(matched)), draws, bench)[0] if values else {}
    return Numbers(
        {name: errors for (_, name), (_, errors) in found.items()},
        tuple(ValueErrors(*pair, errors) for pair, (_, errors) in inner.items()),
        tuple(one.label for one in draws),
        tuple(f"the second model does not run on {label}: {why[:MOST_SAID]}" for label, why in failed.items()),
    )


def _inputs(model: DetachedModel) -> set[str]:
    graph = model.proto.graph
    return {info.name for info in graph.input} - {tensor.name for tensor in graph.initializer}


def measure_pairs(
    matched: Matched,
    pairs: Sequence[Pair],
    draws: Sequence[DrawnInputs],
    bench: PassContext,
    *,
    may_collapse: bool = False,
) -> tuple[dict[Pair, Distance], dict[str, str]]:
    """The worst distance of each pair of values over all draws, without what cannot be compared; and by the labels of
    the draws on which the second model does not run, why.

    Args:
        may_collapse: see `distances`.

    Raises:
        StepFailed: onnxruntime refuses one of the models, or stops on the first.
    """
    models = [portable(model, bench.spill) for model in (matched.before, matched.after)]
    computed_in = computed_types(matched.before, (old for old, _ in pairs))
    names = matched.inputs.items()
    feeds = [{**one.feeds, **{new: one.feeds[old] for new, old in names if old in one.feeds}} for one in draws]
    found, failed = dict[Pair, Distance](), dict[str, str]()
    for start in range(0, len(pairs), AT_ONCE):
        part = pairs[start : start + AT_ONCE]
        answers: list[list[Distance | None] | str] = bench.proofs.ask(
            DISTANCES,
            before=models[0],
            after=models[1],
            pairs=part,
            draws=feeds,
            computed_in=computed_in,
            may_collapse=may_collapse,
        )
        types, measured = dict[str, str](), []
        for draw, answer in zip(draws, answers, strict=True):
            if isinstance(answer, str):
                failed[draw.label] = answer
                continue
            known = {str(place): one for place, one in enumerate(answer) if one is not None}
            types |= {place: dtype for place, (dtype, _) in known.items()}
            measured.append({place: errors for place, (_, errors) in known.items()})
        found |= {part[int(place)]: (types[place], errors) for place, errors in worst_errors(measured).items()}
    return found, failed


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
