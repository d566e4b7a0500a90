"""Put questions to the desk in the proof worker; set one up first, and anew when the last one has died."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

from passes.base import Workbench
from passes.errors import StepFailed
from passes.numbers import Tolerance
from passes.proof.evidence import Reference

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
        bench: Workbench,
        brief: Callable[[], None],
    ) -> None:
        self._references = references
        self._tolerances = dict(tolerances)
        self._brief = brief
        self._worker = bench.proofs
        self._owner = uuid4().hex
        self._is_open = False
        self._begun: tuple[str, dict[str, Any]] = ("", {})
        self._ticket = 0

    def ask(self, question: str, **arguments: Any) -> Any:
        """Raises StepFailed: what the desk was asked to run does not run."""
        self.begin(question, **arguments)
        return self.answer()

    def begin(self, question: str, **arguments: Any) -> None:
        """Put a question and go on; its answer is to be taken before the next one is put."""
        if not self._is_open:
            self._open()
        self._begun = (question, arguments)
        self._ticket = self._post(question, **arguments)

    def answer(self) -> Any:
        """What the desk says to the last question. Raises as `ask` does."""
        if not self._worker.awaits(self._ticket):  # the worker was asked something else in between
            self._ticket = self._post(self._begun[0], **self._begun[1])
        try:
            return self._worker.collect(self._ticket)
        except StepFailed as failure:
            self._is_open = failure.status == "failed"
            raise

    def _open(self) -> None:
        self._is_open = True
        self.ask("open", feeds=[dict(one.feeds) for one in self._references], tolerances=self._tolerances)
        self.ask("expect", outputs=[dict(one.outputs) for one in self._references])
        self._brief()

    def _post(self, question: str, **arguments: Any) -> int:
        return self._worker.post(ASK, owner=self._owner, question=question, **arguments)


ASK: Final = "passes.proof.desk:ask"
