"""The client of the proof worker: a typed call for each method of `server.py`; it replaces a server that has died."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakMethod

from passes.context import PassContext
from passes.errors import StepCrashed, StepTimedOut
from passes.proof.draw_choice import ChosenDraw
from passes.proof.draws import BROUGHT_DOWN, DrawPlan
from passes.proof.fault_injection import InjectedFault
from passes.proof.gauges import Gauges, Readings
from passes.proof.numbers import Tolerance
from passes.proof.part import ProofPart
from passes.proof.precision import Precisions
from passes.proof.server import ProofServer, ask, run_and_choose
from passes.proof.tables import Match, TablesPart
from passes.proof.types import BaselineRun, DrawErrors, Reference, RunRequest
from passes.weights.detached import DetachedModel
from passes.weights.sharing import portable
from passes.worker.client import ask_again

Question = Callable[..., Any]
"""A method of the server, or the class itself, which makes a new one."""


@dataclass(frozen=True, slots=True)
class _PendingQuestion:
    """A question that waits for its answer, which `on_answer` takes."""

    on_answer: Callable[[Any], None]
    question: Question
    arguments: Mapping[str, Any]
    ticket: int


class ProofClient:
    """One prover's connection to its server. A question raises StepFailed where the server fails to run it.

    Args:
        references: the draws, with what is expected of them.
        tolerances: by dtype, in place of the documented ones.
        restore: a method that sends a new server what the last one knew. Its object owns the client, and is not kept
            alive by it.
    """

    def __init__(
        self,
        references: Sequence[Reference],
        tolerances: Mapping[str, Tolerance],
        context: PassContext,
        restore: Callable[[], None],
    ) -> None:
        self._references = references
        self._tolerances = dict(tolerances)
        self._restore = WeakMethod(restore)
        self._worker = context.proofs
        self._spill = context.spill
        self._owner = uuid4().hex
        self._worker.owners.add(self)
        self._generation = 0
        """The generation of the worker process that has the server; 0 for none."""
        self._pending: _PendingQuestion | None = None

    def replace_references(self, references: Sequence[Reference]) -> None:
        """Take the draws that the server has chosen, so that a later server gets them."""
        self._references = references

    def begin_baseline(
        self,
        on_answer: Callable[[BaselineRun], None],
        model: DetachedModel,
        request: RunRequest,
        computed_in: Precisions,
        gauges: Gauges,
        plan: DrawPlan | None,
    ) -> None:
        """Begin to run the exported model; `settle`, or the next question, passes the result to `on_answer`."""
        asked = {"request": request, "computed_in": computed_in, "gauges": gauges, "plan": plan}
        self._begin(on_answer, ProofServer.run_baseline, model=portable(model, self._spill), **asked)

    def judge(self, computed_in: Precisions, shares: Mapping[str, float]) -> None:
        """See `ProofServer.judge`."""
        self._ask(ProofServer.judge, computed_in=computed_in, shares=shares)

    def run(self, model: DetachedModel, request: RunRequest) -> Sequence[DrawErrors]:
        """The errors of outputs and inner values, for each draw."""
        return self._ask(ProofServer.run, model=portable(model, self._spill), request=request)

    def read_gauges(self, model: DetachedModel, gauges: Gauges) -> Readings:
        """What `gauges` read in `model` on every draw."""
        return self._ask(ProofServer.read_gauges, model=portable(model, self._spill), gauges=gauges)

    def held_meanings(self) -> frozenset[str]:
        """The meanings of which every draw has the value."""
        return self._ask(ProofServer.held_meanings)

    def are_equal(self, part: ProofPart) -> bool:
        """Whether the values of each pair are the same bits in every draw."""
        source = portable(part.model, self._spill)
        return self._ask(ProofServer.are_equal, part=source, given=part.given, distinct=part.distinct, pairs=part.pairs)

    def match_tables(self, tables: TablesPart) -> Sequence[Match]:
        """Match the rows of each new table with those of the old tables."""
        source = portable(tables.model, self._spill)
        return self._ask(ProofServer.match_tables, part=source, olds=tables.olds, news=tables.news)

    def plant(self, fault: InjectedFault) -> None:
        """Begin to measure how far `fault` moves its values."""
        part = portable(fault.model, self._spill)
        self._ask(ProofServer.plant, part=part, cuts=fault.cuts, zeroed=fault.zeroed, seen=fault.values)

    def excess(self) -> Sequence[float]:
        """How far the planted fault moved each value, in units of its tolerance."""
        return self._ask(ProofServer.excess)

    def settle(self) -> None:
        """Wait for the answer to the pending question, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.on_answer(ask_again(partial(self._collect, [pending])))

    def _ask(self, question: Question, **arguments: Any) -> Any:
        answers: list[Any] = []
        self._begin(answers.append, question, **arguments)
        self.settle()
        return answers[0]

    def _begin(self, on_answer: Callable[[Any], None], question: Question, **arguments: Any) -> None:
        self.settle()
        self._pending = ask_again(lambda: self._post(on_answer, question, arguments))

    def _collect(self, questions: list[_PendingQuestion]) -> Any:
        """The answer to the last of `questions`, which is sent again if the worker has died or was asked something
        else in between."""
        last = questions[-1]
        if not self._worker.awaits(last.ticket):
            last = self._post(last.on_answer, last.question, last.arguments)
            questions.append(last)
        return self._worker.collect(last.ticket)

    def _post(
        self, on_answer: Callable[[Any], None], question: Question, arguments: Mapping[str, Any]
    ) -> _PendingQuestion:
        while True:
            self._worker.start()
            if self._generation != self._worker.generation:
                self._open()
            ticket = self._worker.post(ask, owner=self._owner, question=question, **arguments)
            if self._generation == self._worker.generation:
                return _PendingQuestion(on_answer, question, arguments, ticket)
            # The process was killed just before, so the question went to a new one, which knows nothing yet.

    def _open(self) -> None:
        self._generation = self._worker.generation
        try:
            feeds = [dict(reference.feeds) for reference in self._references]
            expected = [dict(reference.outputs) for reference in self._references]
            owners = frozenset(client._owner for client in self._worker.owners)
            self._ask(ProofServer, owners=owners, feeds=feeds, expected=expected, tolerances=self._tolerances)
            restore = self._restore()
            assert restore is not None, "a question is asked by the object that owns this client"
            restore()
        except BaseException:  # a server that was set up in part would find no fault
            self._generation = 0
            raise


def choose_in_worker(
    model: DetachedModel, plan: DrawPlan, context: PassContext, random_outputs: Sequence[str] = ()
) -> tuple[list[ChosenDraw], list[str]]:
    """The draws of `plan` on which `model` runs in onnxruntime, and a sentence for everything that is not drawn.

    The model runs in the proof worker: onnxruntime may crash on it, or never return.

    Args:
        random_outputs: outputs that depend on random numbers, so they do not decide what is drawn.

    Raises:
        StepFailed: onnxruntime refuses the model, it does not run on a draw that is needed, or the process ended.
    """

    def choose(plan: DrawPlan) -> tuple[list[ChosenDraw], list[str]]:
        return context.proofs.ask(
            run_and_choose, model=portable(model, context.spill), plan=plan, random_outputs=random_outputs
        )

    try:
        return choose(plan)
    except (StepCrashed, StepTimedOut) as failure:
        chosen, skipped = choose(plan.reduce_to_needed())
        return chosen, [*skipped, BROUGHT_DOWN.format(failure)]
