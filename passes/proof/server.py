"""The code of the proof worker: it runs models on every draw and compares them with expected and with held values.

It runs in a process of its own, since onnxruntime may crash on a model that a pass returns. `client.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from passes.errors import StepFailed
from passes.proof.claims import Distinct
from passes.proof.draw_choice import ChosenDraw, choose_draws
from passes.proof.draws import Draw, DrawPlan
from passes.proof.gauges import Gauges, Readings, add_gauges
from passes.proof.lookups import Lookup
from passes.proof.numbers import DRAWN, Errors, Tolerance, compare, same_bits
from passes.proof.part import distinct_arrays
from passes.proof.precision import Precisions
from passes.proof.tables import Match, match_table
from passes.proof.types import BaselineRun, DrawErrors, RunRequest
from passes.weights.sessions import Session
from passes.weights.sharing import MappedModel
from passes.weights.stand_ins import Weight

KEEP_BYTES = 2**18
"""Values larger than this are not held from one run to the next, unless they are at a kept structure."""

SERVERS: Final = "proof servers"
"""The key on the worker's desk of the servers by their owners."""

Arrays = dict[str, np.ndarray]


@dataclass(slots=True)
class _DrawState:
    """One draw: its inputs, and the values that models are compared with."""

    feeds: Arrays
    expected: Arrays = field(default_factory=dict)
    """Outputs by name."""
    inner: Arrays = field(default_factory=dict)
    """Expected values inside of the model, by name."""
    held: Arrays = field(default_factory=dict)
    """Values of models that were run, by their meaning."""


class ProofServer:
    """Runs models on every draw.

    Args:
        feeds: inputs by name, for each draw.
        expected: the outputs to compare with, for each draw.
        tolerances: by dtype, in place of the documented ones.
    """

    def __init__(
        self, feeds: Sequence[Arrays], expected: Sequence[Arrays], tolerances: Mapping[str, Tolerance]
    ) -> None:
        self._draws = [_DrawState(*pair) for pair in zip(feeds, expected, strict=True)]
        self._tolerances = tolerances
        self._computed_in: Precisions = {}
        self._shares: Mapping[str, float] = {}
        self._may_evaluate = True
        """Whether ONNX's evaluator may run a model: the first one, and later ones if the first one needed it."""
        self._beside = ThreadPoolExecutor(1)
        self._excess: Future[list[float]] | None = None

    def judge(self, computed_in: Precisions, shares: Mapping[str, float]) -> None:
        """Judge values by the types that the exported model computes them in; see `compare` for their `shares`."""
        self._computed_in, self._shares = computed_in, shares

    def run_baseline(
        self,
        model: MappedModel,
        request: RunRequest,
        computed_in: Precisions,
        gauges: Gauges,
        plan: DrawPlan | None,
    ) -> BaselineRun:
        """`run` the exported model with gauges, or without gauges where the model does not run with them.

        Args:
            computed_in: see `judge`.
            plan: the draws to choose from, if the server has none; those on which the model runs are taken.
        """
        self.judge(computed_in, {})
        refusals: list[StepFailed] = []
        for self._may_evaluate in (False, True):  # onnxruntime, if it runs the model at least without gauges
            for chosen in [gauges] + [Gauges()] * (gauges != Gauges()):
                why_not = " ".join(str(refusals[0]).split())[:200] if refusals and chosen != gauges else ""
                try:
                    return self._run_gauged(model, request, chosen, plan, Readings(why_not=why_not))
                except StepFailed as failure:
                    refusals.append(failure)
        raise refusals[-1]

    def _run_gauged(
        self, model: MappedModel, request: RunRequest, gauges: Gauges, plan: DrawPlan | None, readings: Readings
    ) -> BaselineRun:
        proto = model.model()
        outputs = _outputs_of(proto)
        values = [*request.values, *add_gauges(proto.graph, gauges)]
        session = self._note_evaluation(Session(proto, model.map_weights(), values, may_evaluate=self._may_evaluate))
        drawn, skipped, errors = [], [], []
        if plan is None:
            runs = ((draw, session.run(draw.feeds)) for draw in self._draws)
        else:
            runs = self._choose(plan, session, outputs, drawn, skipped)
        for draw, results in runs:
            errors.append(self._note(draw, request, outputs, results))
            readings.add(gauges, results)
        return BaselineRun(errors, self.held_meanings(), self._nan_outputs(), readings, drawn, skipped)

    def _choose(
        self, plan: DrawPlan, session: Session, outputs: Sequence[str], drawn: list[Draw], skipped: list[str]
    ) -> Iterator[tuple[_DrawState, Arrays]]:
        """Choose the draws of `plan` on which the model runs, and keep them; yields each with the model's results."""
        self._draws.clear()
        steady = [name for name in outputs if self._computed_in.get(name) != DRAWN]
        for chosen in choose_draws(plan, session.run, steady, skipped):
            drawn.append(chosen.draw)
            self._draws.append(_DrawState(dict(chosen.feeds)))
            yield self._draws[-1], dict(chosen.results)

    def _nan_outputs(self) -> list[str]:
        """The expected outputs with which nothing can be compared."""
        return [
            name
            for draw in self._draws
            for name, array in draw.expected.items()
            if array.dtype.kind == "f" and np.isnan(array).any()
        ]

    def read_gauges(self, model: MappedModel, gauges: Gauges) -> Readings:
        """The readings of `gauges` in `model`, on every draw; without them where it does not run so."""
        readings, proto = Readings(), model.model()
        try:
            values = add_gauges(proto.graph, gauges)
            session = Session(proto, model.map_weights(), values, may_evaluate=self._may_evaluate)
            for draw in self._draws:
                readings.add(gauges, session.run(draw.feeds))
        except StepFailed as failure:
            return Readings(why_not=" ".join(str(failure).split())[:200])
        return readings

    def run(self, model: MappedModel, request: RunRequest) -> list[DrawErrors]:
        """Run `model` and compare its outputs, and inner values; for each draw."""
        session = self._note_evaluation(model.session(request.values, may_evaluate=self._may_evaluate))
        outputs = _outputs_of(model.model())
        return [self._note(draw, request, outputs, session.run(draw.feeds)) for draw in self._draws]

    def _note(self, draw: _DrawState, request: RunRequest, outputs: Sequence[str], results: Arrays) -> DrawErrors:
        """Record the results of a model on one draw; returns the errors of its outputs and of inner values."""
        if request.is_reference:
            draw.expected = {name: results[name] for name in outputs}
        draw.expected |= {name: results[name] for name in request.own_outputs}
        if request.as_expected:
            draw.inner.update({name: results[name] for name in request.inner})
        for name, meaning in request.keep.items():
            if name in request.inner or results[name].nbytes <= KEEP_BYTES:
                draw.held[meaning] = results[name]
        inner = {name: draw.inner[name] for name in request.inner if name in draw.inner}
        return self._errors(draw.expected, results), self._errors(inner, results)

    def _note_evaluation(self, session: Session) -> Session:
        self._may_evaluate = self._may_evaluate and session.is_evaluated
        return session

    def held_meanings(self) -> frozenset[str]:
        """The meanings of which every draw has the value."""
        return frozenset.intersection(*(frozenset(draw.held) for draw in self._draws)) if self._draws else frozenset()

    def are_equal(
        self,
        part: MappedModel,
        given: Mapping[str, str],
        distinct: Mapping[str, Distinct],
        pairs: Sequence[tuple[str, str]],
    ) -> bool:
        """Whether the two values of each pair are the same bits in every draw.

        Args:
            part: a piece of a model that computes the first of each pair, and the second if it is not held.
            given: input name → the meaning of the held value to feed.
            distinct: input name → what to feed there, of which only the shape matters.
            pairs: names of values in `part`, or held meanings.
        """
        session = None
        for draw in self._draws:
            fed = draw.feeds | distinct_arrays(distinct) | {name: draw.held[meaning] for name, meaning in given.items()}
            wanted = [name for pair in pairs for name in pair if name not in draw.held]
            session = session or (_part_session(part, fed, wanted) if wanted else None)
            values = draw.held | (session.run(fed) if session else {})
            if not all(same_bits(values[left], values[right]) for left, right in pairs):
                return False
        return True

    def match_tables(
        self, part: MappedModel, olds: Sequence[tuple[str, Lookup]], news: Sequence[tuple[str, Lookup]]
    ) -> list[Match]:
        """Match the rows of each new table with the old tables; `part` computes all of them from constants."""
        computed = part.session().run({})
        tables = [lookup.as_rows(computed[name]) for name, lookup in olds]
        return [match_table(tables, lookup.as_rows(computed[name]), self._tolerances) for name, lookup in news]

    def plant(self, part: MappedModel, cuts: Sequence[str], zeroed: Sequence[str], seen: Sequence[str]) -> None:
        """Begin to measure how far the values called `seen` move when the weights `zeroed` are zero.

        It uses the first draw; `cuts` names expected inner values that `part` reads. The measurement runs in a thread
        while later questions are answered.
        """
        self._excess = self._beside.submit(self._moved_by, part, cuts, zeroed, seen)

    def excess(self) -> list[float]:
        """How far the planted fault moved each value, in units of its tolerance."""
        assert self._excess is not None, "nothing was planted"
        return self._excess.result()

    def _moved_by(
        self, part: MappedModel, cuts: Sequence[str], zeroed: Sequence[str], seen: Sequence[str]
    ) -> list[float]:
        draw = self._draws[0]
        fed = draw.feeds | {name: draw.inner[name] for name in cuts}
        expected = {name: draw.inner[name] for name in seen}
        results = _zeroed_session(part, fed, zeroed, seen).run(fed)
        return [errors.excess for errors in self._errors(expected, results).values()]

    def _errors(self, expected: Arrays, results: Arrays) -> dict[str, Errors]:
        return {
            name: compare(
                value, results[name], self._tolerances, self._computed_in.get(name), self._shares.get(name, 1.0)
            )
            for name, value in expected.items()
        }


def _outputs_of(model: onnx.ModelProto) -> list[str]:
    return [info.name for info in model.graph.output]


def _zeroed_session(part: MappedModel, fed: Arrays, zeroed: Sequence[str], outputs: Sequence[str]) -> Session:
    weights = part.map_weights()
    weights |= {name: _zeros(weights[name]) for name in zeroed if name in weights}
    proto = part.model()
    for tensor in proto.graph.initializer:  # small weights are stored in the model itself
        if tensor.name in zeroed and tensor.name not in weights:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), tensor.name))
    _type_inputs(proto.graph, fed)
    return Session(proto, weights, outputs)


def _zeros(weight: Weight) -> Weight:
    return Weight(weight.dims, weight.data_type, np.zeros(weight.data.nbytes, np.uint8), "")


def _part_session(part: MappedModel, fed: Arrays, outputs: Sequence[str]) -> Session:
    proto = part.model()
    _type_inputs(proto.graph, fed)
    return Session(proto, part.map_weights(), list(dict.fromkeys(outputs)))


def _type_inputs(graph: onnx.GraphProto, fed: Arrays) -> None:
    """Give inputs without a type the dtype and rank of what is fed; sizes may differ from draw to draw."""
    for info in graph.input:
        if not info.type.WhichOneof("value"):
            array = fed[info.name]
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            info.CopyFrom(helper.make_tensor_value_info(info.name, dtype, [None] * array.ndim))


def ask(desk: dict[str, Any], owner: str, question: Callable[..., Any], **arguments: Any) -> Any:
    """Call one method of the server of `owner`; the class itself makes a new server. `desk` is the worker's state.

    A new server comes with the `owners` that still exist; the state of other owners is dropped.
    """
    servers: dict[str, ProofServer] = desk.setdefault(SERVERS, {})
    if question is ProofServer:
        for gone in servers.keys() - arguments.pop("owners"):
            del servers[gone]
        servers[owner] = ProofServer(**arguments)
        return None
    return question(servers[owner], **arguments)


def run_and_choose(
    model: MappedModel, plan: DrawPlan, random_outputs: Sequence[str]
) -> tuple[list[ChosenDraw], list[str]]:
    """See `client.choose_in_worker`."""
    session, skipped = model.session(may_evaluate=True), []
    outputs = [name for name in session.outputs if name not in random_outputs]
    return list(choose_draws(plan, session.run, outputs, skipped)), skipped
