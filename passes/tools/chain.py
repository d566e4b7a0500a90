"""Run a chain of models, each on what those before have made, and compare it with one model that computes the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Final

import numpy as np

from passes.context import PassContext, limit_runs, open_context
from passes.diff import match_models
from passes.diff.numbers import draw_inputs
from passes.errors import ModelError, PassError, StepFailed
from passes.proof.numbers import Errors, compare
from passes.proof.precision import Precisions, computed_types
from passes.proof.prover import SPACE, describe_errors, worst_errors
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable
from passes.worker.messages import REFUSED


def prove_chain(
    whole: DetachedModel,
    parts: Sequence[DetachedModel],
    joined: Mapping[str, Mapping[str, str]],
    context: PassContext | None,
) -> Mapping[str, Errors]:
    """The errors of `whole` against the chain of `parts`; both run on the draws of a proof.

    Raises:
        ModelError: the whole does not run, or the system has no space for a run.
        StepFailed: a part does not run, or an output is out of tolerance.
    """
    with nullcontext(context) if context else open_context() as context, limit_runs(context, whole):
        draws: list[Mapping[str, np.ndarray]] = []
        try:
            draws += [draw.feeds for draw in draw_inputs(match_models(whole, whole), context, advice=UNPROVEN)]
            errors = context.proofs.ask(
                measure_chain,
                whole=portable(whole, context.spill),
                parts=[portable(part, context.spill) for part in parts],
                joined={key: dict(names) for key, names in joined.items()},
                draws=draws,
                computed_in=computed_types(whole, whole.index.outputs),
            )
        except StepFailed as failure:
            blamed = _blame(failure, whole, draws, context)
            if blamed is failure:  # an error that is its own cause makes a walk through causes endless
                raise
            raise blamed from failure
    if wrong := describe_errors(errors):
        raise StepFailed(f"the parts compute something else than the whole: {wrong}")
    return errors


def _blame(
    failure: StepFailed, whole: DetachedModel, draws: Sequence[Mapping[str, np.ndarray]], context: PassContext
) -> PassError:
    """`failure` of a run, where the whole runs; a ModelError where it does not, or where the system has no space."""
    if REFUSED in str(failure):
        return ModelError(f"the proof cannot be run: {failure}{SPACE}")
    try:
        if draws:
            context.proofs.ask(run_model, model=portable(whole, context.spill), draws=draws)
            return failure
    except StepFailed as own:
        failure = own
    return ModelError(f"the model does not run as it is: {failure}; if nothing here can run it, {UNPROVEN}")


UNPROVEN: Final = "leave the proof out: --no-proof (proof=False)"


def run_model(model: MappedModel, draws: Sequence[Mapping[str, np.ndarray]]) -> None:
    """In the proof worker: run a model, for whether it runs."""
    session = model.session(may_evaluate=True)
    for feeds in draws:
        session.run(feeds)


def measure_chain(
    whole: MappedModel,
    parts: Sequence[MappedModel],
    joined: Mapping[str, Mapping[str, str]],
    draws: Sequence[Mapping[str, np.ndarray]],
    computed_in: Precisions,
) -> dict[str, Errors]:
    """In the proof worker: run the parts in order, each on what was given and what the parts before have made.

    Args:
        whole: the model whose outputs are expected.
        parts: the models that compute them together, in the order in which they run.
        draws: arrays by the names of the inputs of `whole`, once for each run.
        computed_in: the types that `whole` computes each output in, by which tolerances are chosen.
        joined: for a merged model, `fed` from inputs of the second part to values of the first, and `names` from names
            in the whole to those of the second part.
    """
    session, chain = whole.session(may_evaluate=True), [part.session(may_evaluate=True) for part in parts]
    fed, names = joined.get("fed", {}), joined.get("names", {})
    measured = []
    for feeds in draws:
        expected = session.run(feeds)
        known: dict[str, np.ndarray] = dict(feeds)
        for index, part in enumerate(chain):
            given = known
            if index and names:
                given = {new: known[old] for old, new in names.items() if old in feeds}
                given |= {new: known[old] for new, old in fed.items()}
            made = part.run(given)
            back = {new: old for old, new in names.items()} if index else {}
            known |= {back.get(name, name): array for name, array in made.items()}
        measured.append(
            {name: compare(known[name], expected[name], computed_in=computed_in.get(name)) for name in expected}
        )
    return worst_errors(measured)
