"""The phases of a train step, with what each took: Trace → Compile → Warmup → Capture → Replay."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pipeline.events import Observer, PhaseEnded, Progress

PHASES = ("Trace", "Compile", "Warmup", "Capture", "Replay")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Phase:
    """One of `PHASES`, and what it took, in seconds.

    Trace    records forward and backward; nothing is computed.
    Compile  puts the updates in, plans, checks the plan and binds it.
    Warmup   runs the step until storage and algorithms are settled, then takes back every state and random number.
    Capture  binds the calls to buffers of their own and records them.
    Replay   all steps so far.
    """

    name: str
    seconds: float
    detail: str = ""


class PhaseRecorder:
    """Collects phases, and sends an event when one begins and when one ends."""

    def __init__(self, observe: Observer | None = None) -> None:
        self.phases: list[Phase] = []
        self._observe = observe

    def run(self, name: str, work: Callable[[], Result], detail: Callable[[Result], str]) -> Result:
        """The result of `work`, which is the phase `name`."""
        self.begin(name)
        start = time.perf_counter()
        result = work()
        self.end(Phase(name, time.perf_counter() - start, detail(result)))
        return result

    def begin(self, name: str) -> None:
        if self._observe is not None:
            self._observe(Progress("train", name, PHASES.index(name), len(PHASES)))

    def end(self, phase: Phase) -> None:
        self.phases.append(phase)
        if self._observe is not None:
            self._observe(PhaseEnded(phase.name, phase.seconds, phase.detail))
