"""The draws of one proof, the values that models are compared with, and the questions to the proof worker about
both."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from passes.context import PassContext
from passes.errors import StepFailed
from passes.proof.claims import ProofPart
from passes.proof.draws import DrawPlan
from passes.proof.exported_run import InjectedFault
from passes.proof.gauges import Gauges, Readings
from passes.proof.prover import Reference
from passes.proof.server import ArrayFile, Criteria, DrawRequest, RunAnswer, RunRequest, Value, load, run_model
from passes.weights.detached import DetachedModel
from passes.weights.sharing import portable


@dataclass(slots=True)
class DrawValues:
    """The values of one draw; most arrays lie in files."""

    feeds: Mapping[str, Value]
    outputs: dict[str, Value]
    """Expected outputs."""
    inner: dict[str, Value] = field(default_factory=dict)
    """Expected values inside of the model."""
    held: dict[str, Value] = field(default_factory=dict)
    """Value digest → the value, as some model computed it."""


class ProofClient:
    """Puts the questions of one proof to the worker.

    Args:
        references: the draws; `take_draws` adds those that the worker chooses.
        criteria: by what values are judged.
    """

    def __init__(self, references: Sequence[Reference], criteria: Criteria, context: PassContext) -> None:
        self.criteria = criteria
        self._worker, self._spill = context.proofs, context.spill
        self._folder = Path(tempfile.mkdtemp(prefix="proof-", dir=context.folder))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._file = ArrayFile(self._folder / "references")
        self._numbers = itertools.count()
        self._may_evaluate = True
        """Whether ONNX's evaluator may run a model: the first one, and later ones if the first one needed it."""
        self.draws: list[DrawValues] = []
        self.take_draws(references)

    def take_draws(self, references: Sequence[Reference]) -> None:
        """Take further draws."""
        self.draws += [
            DrawValues(self._file.store(reference.feeds), self._file.store(reference.outputs))
            for reference in references
        ]

    def held_digests(self) -> frozenset[str]:
        """The digests of which every draw has the value."""
        return frozenset.intersection(*(frozenset(draw.held) for draw in self.draws)) if self.draws else frozenset()

    def has_nan(self) -> str:
        """An expected output that holds NaN, so that nothing can be compared with it; empty for none."""
        for draw in self.draws:
            for name, array in load(draw.outputs).items():
                if array.dtype.kind == "f" and np.isnan(array).any():
                    return name
        return ""

    def run_exported(
        self, model: DetachedModel, own: Sequence[str], hold: Sequence[str], gauges: Gauges, plan: DrawPlan | None
    ) -> Callable[[], RunAnswer]:
        """Begin to run the model whose values `own` become the expected values; draws are chosen from `plan`.

        The returned function waits for the answer.
        """
        expected = [{name: value for name, value in draw.outputs.items() if name not in own} for draw in self.draws]
        request = self._request(model, expected, own=own, hold=hold, gauges=gauges, plan=plan)
        return self._worker.begin(run_model, request=request)

    def note(self, answer: RunAnswer, outputs: Sequence[str], inner: Sequence[str], digests: Mapping[str, str]) -> None:
        """Take values that an answer has kept: expected `outputs` and `inner` values, and those that have `digests`."""
        self._may_evaluate = self._may_evaluate and answer.is_evaluated
        for draw, answered in zip(self.draws, answer.draws, strict=True):
            kept = answered.kept
            draw.outputs |= {name: kept[name] for name in outputs}
            draw.inner |= {name: kept[name] for name in inner}
            draw.held |= {digest: kept[name] for name, digest in digests.items() if name in kept}

    def run(self, model: DetachedModel, inner: Sequence[str], hold: Mapping[str, str]) -> RunAnswer:
        """Run a model and compare its outputs, and `inner` values; keep the values called `hold` by their digests."""
        expected = [
            {**draw.outputs, **{name: draw.inner[name] for name in inner if name in draw.inner}} for draw in self.draws
        ]
        answer = self._ask(self._request(model, expected, hold=[*hold]))
        self.note(answer, (), (), hold)
        return answer

    def read_gauges(self, model: DetachedModel, gauges: Gauges) -> Readings:
        """The readings of `gauges` in `model`; empty, with a reason, if `model` does not run with them."""
        try:
            return self._ask(self._request(model, gauges=gauges)).readings
        except StepFailed as failure:
            return Readings(why_not=" ".join(str(failure).split())[:200])

    def are_equal(self, part: ProofPart) -> bool:
        """Whether the values of each pair of `part` have the same bits on every draw."""
        feeds = [
            {**draw.feeds, **{name: draw.held[digest] for name, digest in part.held.items()}} for draw in self.draws
        ]
        return all(draw.is_same for draw in self._ask(self._request(part.model, feeds=feeds, same=part.pairs)).draws)

    def excess(self, fault: InjectedFault) -> list[float]:
        """How far `fault` moves each of its values on the first draw, in units of the tolerance."""
        draw = self.draws[0]
        feeds = {**draw.feeds, **{name: draw.inner[name] for name in fault.cuts}}
        expected = {name: draw.inner[name] for name in fault.values}
        answer = self._ask(self._request(fault.model, [expected], [feeds], zeroed=fault.zeroed))
        return [answer.draws[0].errors[name].excess for name in fault.values]

    def _request(
        self,
        model: DetachedModel,
        expected: Sequence[Mapping[str, Value]] = (),
        feeds: Sequence[Mapping[str, Value]] = (),
        **asked: Any,
    ) -> RunRequest:
        fed = feeds or [draw.feeds for draw in self.draws]
        draws = [DrawRequest(*pair) for pair in zip(fed, expected or [{}] * len(fed), strict=True)]
        file = str(self._folder / str(next(self._numbers)))
        asked = {"may_evaluate": self._may_evaluate, **asked}
        return RunRequest(portable(model, self._spill), draws, self.criteria, file, **asked)

    def _ask(self, request: RunRequest) -> RunAnswer:
        return self._worker.ask(run_model, request=request)
