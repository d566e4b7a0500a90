"""Reference outputs, which all results are compared with: torch's, or those of an ONNX source on onnxruntime."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from passes.context import PassContext, limit_runs
from passes.errors import StepFailed
from passes.optimize import second_sizes
from passes.proof.draw_choice import ChosenDraw, choose_draws, choose_in_worker, sampler_of
from passes.proof.draws import DrawPlan, GivenDraw, InputSampler, Trait
from passes.proof.lookups import has_loops, length_inputs, rows_by_input
from passes.proof.masks import independent_dims
from passes.proof.numbers import DRAWN
from passes.proof.precision import computed_types
from passes.proof.prover import Reference, advice_on
from passes.suggest import ELLIPSIS, join_first
from passes.weights.stand_ins import digest_of
from pipeline.config import DEFAULT_SIZES, KEYS, ModelConfig, OptionNames, VerifyConfig
from pipeline.errors import SourceError
from pipeline.export.source import Source, TorchSource, drawn_inputs, named_dims

EXACT: Final = "OUSbiu"
"""Kinds of numpy dtypes that hold neither NaN nor infinity."""


@dataclass(frozen=True, slots=True)
class References:
    """The references of a run.

    Args:
        traits: special draws that each input allows.
        skipped: what was not drawn, and why.
        sampler: draws further inputs at sizes and in ranges on which the reference runs; None where nothing was run.
    """

    draws: tuple[Reference, ...]
    traits: Mapping[str, frozenset[Trait]] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    sampler: InputSampler | None = None

    def restrict_to(self, labels: Collection[str], not_covered: Sequence[str]) -> References:
        """Keep the draws with these labels, on which the export is compared; `not_covered` says why others are out."""
        draws = tuple(draw for draw in self.draws if draw.label in labels)
        return replace(self, draws=draws, skipped=(*self.skipped, *not_covered))


def plan_draws(source: Source, model: ModelConfig, verify: VerifyConfig, given: Sequence[GivenDraw] = ()) -> DrawPlan:
    """Plan the draws: the `given` ones, then `verify.draws` ones at the first size of each named dim, and one at each
    further size; all of these have to run.

    Optional draws are those of `verify.sizes` and of extreme inputs, where the reference runs on them. Dims of an ONNX
    file that `model.dims` does not name may be drawn larger, since the sizes that it runs at are unknown.
    """
    if isinstance(source, TorchSource) and source.draws is not None and verify.draws:
        given = (*given, *source.draws(verify))
        return DrawPlan(drawn_inputs(source.inputs), (), (), (), verify.seed, given=tuple(given))
    if not verify.draws:
        return DrawPlan(drawn_inputs(source.inputs), (), (), (), verify.seed, given=tuple(given))
    named = named_dims(source.inputs)
    if not isinstance(source, TorchSource):  # a dim that is the sum of others follows from them, if no size is given
        independent = independent_dims(named)
        named = tuple(name for name in named if name in independent or name in model.dims)
    unsized = () if isinstance(source, TorchSource) else tuple(name for name in named if name not in model.dims)
    proposed = source.dims if isinstance(source, TorchSource) else {}
    dims = {name: model.dims.get(name) or proposed.get(name, DEFAULT_SIZES) for name in named}
    dims |= {name: dims[name][:1] for name in unsized}
    first = {name: sizes[0] for name, sizes in dims.items()}
    needed = [first] * verify.draws
    for index in range(1, max((len(sizes) for sizes in dims.values()), default=1)):
        needed.append({name: sizes[min(index, len(sizes) - 1)] for name, sizes in dims.items()})
    second = tuple({**first, **sizes} for sizes in second_sizes(unsized)) if unsized else ()
    return DrawPlan(
        drawn_inputs(source.inputs), tuple(needed), second, verify.sizes, verify.seed, unsized, tuple(given)
    )


def compute_references(source: Source, plan: DrawPlan, context: PassContext, names: OptionNames = KEYS) -> References:
    """Run the reference on every draw that it supports: torch here, an ONNX file in the proof worker of `context`.

    Args:
        source: the reference.
        plan: the draws.
        context: the workers.
        names: the words of messages.

    Raises:
        SourceError: it fails on a required draw, or an output holds NaN, or no output is finite, so that nothing can
            be compared.
    """
    skipped: list[str] = []
    if isinstance(source, TorchSource):  # each run draws the same numbers
        from pipeline.export.reference import (
            indexed_rows,  # loads torch, which an ONNX file does not need
            run_torch,
        )

        plan = plan.with_rows(indexed_rows(source, plan.first_feeds))
        run = partial(run_torch, source)
        chosen = list(choose_draws(plan, run, source.outputs, skipped, SourceError))
    else:
        model = source.model
        plan = plan.with_rows(rows_by_input(model), lengths=length_inputs(model), has_loops=has_loops(model))
        drawn = [name for name, dtype in computed_types(model, source.outputs).items() if dtype == DRAWN]
        try:
            with limit_runs(context, model, [plan.first_feeds, *(draw.feeds for draw in plan.given)]):
                chosen, skipped = choose_in_worker(model, plan, context, drawn)
        except StepFailed as error:
            advice = _ask_for_sizes(plan, names) or advice_on(error, context.run_advice)
            raise SourceError(f"the ONNX file does not run as it is: {error}{advice}") from error
    draws = tuple(_reference(draw, names) for draw in chosen)
    if not any(array.size for draw in draws for array in draw.outputs.values()):
        skipped.append("no number: every output is empty on every draw, so only shapes and dtypes are compared")
    traits = {known.name: known.traits for known in plan.inputs}
    return References(draws, traits, tuple(skipped), sampler_of(chosen))


def _ask_for_sizes(plan: DrawPlan, names: OptionNames) -> str:
    """Advice where an ONNX file does not run at the sizes that were tried; empty where no dim is open."""
    if not plan.open:
        return ""
    sizes = ", ".join(f"{dim}: [2, 3]" for dim in plan.open if dim)
    unnamed = " or ".join(f"model.inputs.{known.name}.shape" for known in plan.inputs if "" in known.shape)
    ways = " and ".join([f"model.dims: {{{sizes}}}"] * bool(sizes) + [unnamed] * bool(unnamed))
    drawn = "nobody gave the sizes of its open dims, which were drawn as 2 and larger"
    return f"; {drawn}: {names.sizes.format(ways)}"


def describe_zeros(references: Sequence[Reference]) -> Iterator[str]:
    """A sentence on the outputs of floats that are 0 on every draw, such as after a weight that begins as zeros."""
    arrays = {
        name: [draw.outputs[name] for draw in references] for name in (references[0].outputs if references else ())
    }
    zeros = [
        name
        for name, drawn in arrays.items()
        if any(array.size for array in drawn) and not any(_is_exact(array) or array.any() for array in drawn)
    ]
    if zeros:
        yield (
            f"output {join_first(zeros, 3, ELLIPSIS)} is 0 on every draw, so errors of the export and of a runtime "
            "do not show there; take trained weights, or weights that do not begin as zeros"
        )


def outputs_digest(references: Sequence[Reference]) -> str:
    """Digest of the reference's inputs and outputs, for keys: it covers state that is in no file of the model."""
    digest = hashlib.blake2b(digest_size=16)
    for reference in references:
        digest.update(reference.label.encode())
        for name, array in (*reference.feeds.items(), *reference.outputs.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(repr(array.tolist()).encode() if array.dtype == object else digest_of(array).encode())
    return digest.hexdigest()


def _reference(chosen: ChosenDraw, names: OptionNames) -> Reference:
    label, outputs = chosen.draw.label, chosen.results
    remedy = f"check the weights, and {names.numbers.format(', '.join(chosen.feeds))}"
    for name, array in outputs.items():
        if has_nan(array):
            raise SourceError(
                f"output {name!r} of the reference holds NaN on {label}, so nothing can be compared with it; {remedy}"
            )
    filled = [array for array in outputs.values() if array.size]
    if filled and not any(_has_finite(array) for array in filled):
        raise SourceError(
            f"no output of the reference holds a finite number on {label}, so nothing can be compared with it; {remedy}"
        )
    return Reference(chosen.feeds, outputs, label, chosen.draw, chosen.is_optional)


def _is_exact(array: np.ndarray) -> bool:
    return array.dtype.kind in EXACT or "int" in array.dtype.name  # the integers of `ml_dtypes`, such as int4


def has_nan(array: np.ndarray) -> bool:
    return not _is_exact(array) and bool(np.isnan(_widen(array)).any())


def _has_finite(array: np.ndarray) -> bool:
    return _is_exact(array) or bool(np.isfinite(_widen(array)).any())


def _widen(array: np.ndarray) -> np.ndarray:
    """The array as float64: numpy cannot test the small dtypes of `ml_dtypes` for NaN."""
    return array if array.dtype.kind == "c" else array.astype(np.float64, copy=False)
