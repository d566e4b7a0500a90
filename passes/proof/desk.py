"""Where models are run: the draws, what is expected of them, and values of models that were run before.

Works in the proof worker, since onnxruntime may crash on a model that a pass has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from passes.errors import StepFailed
from passes.model.sessions import Session
from passes.model.sharing import Portable
from passes.model.stand_ins import Weight
from passes.proof.draw_choice import choose_draws
from passes.proof.draws import Draw, DrawPlan
from passes.proof.evidence import Draws, Watched
from passes.proof.gauges import Gauges, Readings, add_gauges
from passes.proof.lookups import Lookup
from passes.proof.moves import Distinct, distinct_arrays
from passes.proof.numbers import DRAWN, Errors, Tolerance, compare, same_bits
from passes.proof.precision import Precisions
from passes.proof.table_match import Match, match_table
from passes.proof.zeros import zeros_of

__all__ = ["KEEP_BYTES", "Desk", "ask"]

KEEP_BYTES = 2**18
"""Values larger than this are not held from one run to the next, unless they are at a kept structure."""

Arrays = dict[str, np.ndarray]


class Desk:
    """Runs models on every draw.

    Args:
        feeds: inputs by name, for each draw.
        tolerances: by dtype, in place of the documented ones.
    """

    def __init__(self, feeds: Sequence[Arrays], tolerances: Mapping[str, Tolerance]) -> None:
        self._feeds = list(feeds)
        self._tolerances = tolerances
        self._computed_in: Precisions = {}
        self._expected: list[Arrays] = [{} for _ in feeds]
        self._inner: list[Arrays] = [{} for _ in feeds]
        self._values: list[Arrays] = [{} for _ in feeds]
        self._beside = ThreadPoolExecutor(1)
        self._excess: Future[list[float]] | None = None
        self._rehearsed: Future[Draws] | None = None

    def expect(self, outputs: Sequence[Arrays]) -> None:
        """The outputs to compare with, for each draw."""
        self._expected = list(outputs)

    def judge(self, computed_in: Precisions) -> None:
        """From now on judge values by the types that the exported model computes them in."""
        self._computed_in = computed_in

    def watch(
        self,
        model: Portable,
        inner: Sequence[str],
        keep: Mapping[str, str],
        computed_in: Precisions,
        *,
        is_reference: bool,
        gauges: Gauges,
        plan: DrawPlan | None = None,
    ) -> Watched:
        """`run` the exported model with gauges; its values called `inner` are from now on expected.

        Args:
            computed_in: see `judge`.
            plan: the draws to choose from, if the desk has none: those on which the model runs.
        """
        self.judge(computed_in)
        try:
            return self._watched(model, inner, keep, is_reference, gauges, plan, Readings())
        except StepFailed as failure:
            if gauges == Gauges():
                raise
            unmeasured = Readings(why_not=" ".join(str(failure).split())[:200])
            return self._watched(model, inner, keep, is_reference, Gauges(), plan, unmeasured)

    def _watched(
        self,
        model: Portable,
        inner: Sequence[str],
        keep: Mapping[str, str],
        is_reference: bool,
        gauges: Gauges,
        plan: DrawPlan | None,
        readings: Readings,
    ) -> Watched:
        proto = model.model()
        outputs = [info.name for info in proto.graph.output]
        shown = add_gauges(proto.graph, gauges)
        session = Session(proto, model.mapped(), list(dict.fromkeys((*inner, *keep, *shown))))
        run = _Run(outputs, inner, keep, as_expected=True, is_reference=is_reference)
        drawn, skipped, found = [], [], []
        if plan is None:
            results = (session.run(feeds) for feeds in self._feeds)
        else:
            results = self._chosen(plan, session, outputs, drawn, skipped)
        for place, got in enumerate(results):
            found.append(self._take(run, place, got))
            readings.add(gauges, got)
        return Watched(found, self.held(), self._nan_outputs(), readings, drawn, skipped)

    def _chosen(
        self, plan: DrawPlan, session: Session, outputs: Sequence[str], drawn: list[Draw], skipped: list[str]
    ) -> Iterator[Arrays]:
        """The draws of `plan` on which the model runs, each with what it computes: from now on the desk's own."""
        self._feeds.clear()
        for known in (self._expected, self._inner, self._values):
            known.clear()
        steady = [name for name in outputs if self._computed_in.get(name) != DRAWN]
        for one in choose_draws(plan, session.run, steady, skipped):
            drawn.append(one.draw)
            self._feeds.append(dict(one.feeds))
            for known in (self._expected, self._inner, self._values):
                known.append({})
            yield dict(one.results)

    def _nan_outputs(self) -> list[str]:
        """The expected outputs with which nothing can be compared."""
        return [
            name
            for expected in self._expected
            for name, array in expected.items()
            if array.dtype.kind == "f" and np.isnan(array).any()
        ]

    def run(
        self,
        model: Portable,
        inner: Sequence[str],
        keep: Mapping[str, str],
        *,
        as_expected: bool = False,
        is_reference: bool = False,
    ) -> Draws:
        """Run `model` and compare its outputs, and the values called `inner`; both for each draw.

        Args:
            keep: value name → meaning, of those to hold for `equal`.
            as_expected: the values called `inner` are from now on what is expected of those names.
            is_reference: so are the outputs.
        """
        if is_reference:
            self._expected = [{} for _ in self._feeds]
        outputs = [info.name for info in model.model().graph.output]
        session = model.session(list(dict.fromkeys((*inner, *keep))))
        run = _Run(outputs, inner, keep, as_expected=as_expected, is_reference=is_reference)
        return [self._take(run, place, session.run(feeds)) for place, feeds in enumerate(self._feeds)]

    def _take(self, run: _Run, place: int, got: Arrays) -> tuple[dict[str, Errors], dict[str, Errors]]:
        """Take note of what a model computes on one draw; returns its errors, and those of inner values."""
        expected, known, values = self._expected[place], self._inner[place], self._values[place]
        if run.is_reference:
            expected.update({name: got[name] for name in run.outputs})
        if run.as_expected:
            known.update({name: got[name] for name in run.inner})
        kept = (name for name in run.keep if name in run.inner or got[name].nbytes <= KEEP_BYTES)
        values.update({run.keep[name]: got[name] for name in kept})
        probes = {name: known[name] for name in run.inner if name in known}
        return self._compared(expected, got), self._compared(probes, got)

    def rehearse(self, model: Portable, inner: Sequence[str]) -> None:
        """Begin to `run` a model of which nobody knows yet whether it will be asked for, beside what comes after."""
        self._rehearsed = self._beside.submit(self.run, model, inner, {})

    def rehearsed(self) -> Draws | None:
        """What `rehearse` has found; None at a desk that was set up since."""
        return None if self._rehearsed is None else self._rehearsed.result()

    def held(self) -> frozenset[str]:
        """The meanings of which every draw has the value."""
        return frozenset.intersection(*(frozenset(values) for values in self._values)) if self._values else frozenset()

    def equal(
        self,
        part: Portable,
        given: Mapping[str, str],
        distinct: Mapping[str, Distinct],
        pairs: Sequence[tuple[str, str]],
    ) -> list[bool]:
        """Whether the two values of each pair are the same bits in every draw.

        Args:
            part: a piece of a model that computes the first of each pair, and the second if it is not held.
            given: input name → the meaning of the held value to feed.
            distinct: input name → what to feed there, of which only the shape matters.
            pairs: names of values in `part`, or held meanings.
        """
        verdicts = [True] * len(pairs)
        session = None
        for feeds, values in zip(self._feeds, self._values, strict=True):
            fed = {**feeds, **distinct_arrays(distinct), **{name: values[meaning] for name, meaning in given.items()}}
            wanted = [name for pair in pairs for name in pair if name not in values]
            session = session or (_part_session(part, fed, wanted) if wanted else None)
            got = {**values, **(session.run(fed) if session else {})}
            for index, (left, right) in enumerate(pairs):
                verdicts[index] &= same_bits(got[left], got[right])
        return verdicts

    def match_tables(
        self, part: Portable, olds: Sequence[tuple[str, Lookup]], news: Sequence[tuple[str, Lookup]]
    ) -> list[Match]:
        """Where the rows of each new table lie in the old ones; `part` computes all of them from constants."""
        got = part.session().run({})
        tables = [lookup.as_rows(got[name]) for name, lookup in olds]
        return [match_table(tables, lookup.as_rows(got[name]), self._tolerances) for name, lookup in news]

    def plant(self, part: Portable, given: Mapping[str, str], zeroed: Sequence[str], seen: Sequence[str]) -> None:
        """Begin to find out how far the values called `seen` move when the weights `zeroed` are zero.

        Reads the first draw. `given` names values that are expected `inner` ones, or inputs of the model. It goes on
        beside the questions that come after it. Where it is known that all of `seen` are zeros then, nothing is run.
        """
        self._excess = self._beside.submit(self._moved_by, part, given, zeroed, seen)

    def excess(self) -> list[float]:
        """How far they moved, in units of their tolerance."""
        assert self._excess is not None, "nothing was planted"
        return self._excess.result()

    def _moved_by(
        self, part: Portable, given: Mapping[str, str], zeroed: Sequence[str], seen: Sequence[str]
    ) -> list[float]:
        fed = {**self._feeds[0], **{name: self._inner[0][value] for name, value in given.items()}}
        expected = {name: self._inner[0][name] for name in seen}
        if zeros_of(part.model().graph, zeroed, fed).issuperset(seen):
            got = {name: np.zeros_like(value) for name, value in expected.items()}
        else:
            got = _zeroed_session(part, fed, zeroed, seen).run(fed)
        return [errors.excess for errors in self._compared(expected, got).values()]

    def _compared(self, expected: Arrays, got: Arrays) -> dict[str, Errors]:
        return {
            name: compare(value, got[name], self._tolerances, self._computed_in.get(name))
            for name, value in expected.items()
        }


@dataclass(frozen=True, slots=True)
class _Run:
    """What becomes of the results of one run; see `Desk.run`."""

    outputs: Sequence[str]
    inner: Sequence[str]
    keep: Mapping[str, str]
    as_expected: bool
    is_reference: bool


def _zeroed_session(part: Portable, fed: Arrays, zeroed: Sequence[str], outputs: Sequence[str]) -> Session:
    weights = part.mapped()
    weights |= {name: _zeros(weights[name]) for name in zeroed if name in weights}
    proto = part.model()
    for tensor in proto.graph.initializer:  # small ones lie in the model itself
        if tensor.name in zeroed and tensor.name not in weights:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), tensor.name))
    _type_inputs(proto.graph, fed)
    return Session(proto, weights, outputs)


def _zeros(weight: Weight) -> Weight:
    return Weight(weight.dims, weight.data_type, np.zeros(weight.data.nbytes, np.uint8), "")


def _part_session(part: Portable, fed: Arrays, outputs: Sequence[str]) -> Session:
    proto = part.model()
    _type_inputs(proto.graph, fed)
    return Session(proto, part.mapped(), list(dict.fromkeys(outputs)))


def _type_inputs(graph: onnx.GraphProto, fed: Arrays) -> None:
    """Give inputs without a type that of what is fed: dtype and rank, since sizes may differ from draw to draw."""
    for info in graph.input:
        if not info.type.WhichOneof("value"):
            array = fed[info.name]
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            info.CopyFrom(helper.make_tensor_value_info(info.name, dtype, [None] * array.ndim))


def ask(desk: dict[str, Any], owner: str, question: str, **arguments: Any) -> Any:
    """In the worker: put one question to the desk of `owner`; `open` sets up a new one."""
    if question == "open":
        desk[owner] = Desk(**arguments)
        return None
    return getattr(desk[owner], question)(**arguments)
