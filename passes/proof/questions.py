"""Put questions to the desk in the proof worker; set one up first, and anew when the last one has died."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import uuid4

from passes.context import PassContext
from passes.proof.evidence import Reference
from passes.proof.numbers import Tolerance
from passes.worker.client import ask_again

__all__ = ["Questions"]


class Questions:
    """One prover's way to its desk.

    Args:
        references: the draws, with what is expected of them.
        tolerances: by dtype, in place of the documented ones.
        brief: tells a desk that has just been set up what the last one knew.
    """

    def __init__(
        self,
        references: Sequence[Reference],
        tolerances: Mapping[str, Tolerance],
        bench: PassContext,
        brief: Callable[[], None],
    ) -> None:
        self._references = references
        self._tolerances = dict(tolerances)
        self._brief = brief
        self._worker = bench.proofs
        self._owner = uuid4().hex
        self._generation = 0
        """Of the worker's processes the one that has the desk; 0 for none."""
        self._begun: _Begun | None = None

    def replace_references(self, references: Sequence[Reference]) -> None:
        """The draws that the desk has chosen by itself: what one that is set up later has to be given."""
        self._references = references

    def ask(self, question: str, **arguments: Any) -> Any:
        """Raises StepFailed: what the desk was asked to run does not run."""
        answers: list[Any] = []
        self.begin(answers.append, question, **arguments)
        self.settle()
        return answers[0]

    def begin(self, noted: Callable[[Any], None], question: str, **arguments: Any) -> None:
        """Put a question and go on; `settle`, or the next question, gives its answer to `noted`."""
        self.settle()
        self._begun = ask_again(lambda: self._put(noted, question, arguments))

    def settle(self) -> None:
        """Wait for the answer to what was begun, if anything was. Raises as `ask` does."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.noted(ask_again(partial(self._collect, [begun])))

    def _collect(self, questions: list[_Begun]) -> Any:
        """The answer to the last of `questions`, which is put once more if the worker waits for it no longer: it was
        asked something else in between, or has died."""
        last = questions[-1]
        if not self._worker.awaits(last.ticket):
            last = self._put(last.noted, last.question, last.arguments)
            questions.append(last)
        return self._worker.collect(last.ticket)

    def _put(self, noted: Callable[[Any], None], question: str, arguments: Mapping[str, Any]) -> _Begun:
        self._worker.start()
        if self._generation != self._worker.generation:
            self._open()
        return _Begun(noted, question, arguments, self._post(question, arguments))

    def _open(self) -> None:
        self._generation = self._worker.generation
        try:
            self.ask("open", feeds=[dict(one.feeds) for one in self._references], tolerances=self._tolerances)
            self.ask("expect", outputs=[dict(one.outputs) for one in self._references])
            self._brief()
        except BaseException:  # a desk that knows half of it would find no fault
            self._generation = 0
            raise

    def _post(self, question: str, arguments: Mapping[str, Any]) -> int:
        return self._worker.post(ASK, owner=self._owner, question=question, **arguments)


@dataclass(frozen=True, slots=True)
class _Begun:
    noted: Callable[[Any], None]
    question: str
    arguments: Mapping[str, Any]
    ticket: int


ASK: Final = "passes.proof.desk:ask"
