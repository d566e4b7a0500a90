"""What a half type does to the values of a model: whether it can hold them, and how far rounding moves them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from onnx import TensorProto

from passes.graph.index import GraphIndex
from passes.proof.numbers import compare
from passes.weights.sharing import MappedModel

HALVES: Final = {"float16": int(TensorProto.FLOAT16), "bfloat16": int(TensorProto.BFLOAT16)}

LIMITS: Final = {"float16": (6.1e-5, 65504.0), "bfloat16": (1.2e-38, 3.38e38)}
"""The smallest normal number and the largest number of each half type."""

WIDE: Final = "_as_float32"
"""After the name of a rounded value: the same value as float32."""

AT_ONCE: Final = 64
"""Values that are compared in one run; all of them are in memory at once."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The largest finite magnitude of a value over all draws."""

    largest: float

    @classmethod
    def of(cls, array: np.ndarray) -> Self:
        largest = max(float(array.max(initial=0.0)), -float(array.min(initial=0.0)))
        if not math.isfinite(largest):
            largest = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
        return cls(largest)

    def describe(self, half: str) -> str:
        """Why the half type cannot hold the value; empty where it can."""
        smallest, largest = LIMITS[half]
        if self.largest > largest:
            return f"reaches {self.largest:.3g}, and {half} ends at {largest:g}"
        if 0 < self.largest < smallest:
            return f"is {self.largest:.3g} at most, too small for {half}"
        return ""


@dataclass(frozen=True, slots=True)
class HalfFindings:
    """The range of each value, the SQNR that rounding leaves of it in dB, and what is wrong with the outputs."""

    ranges: Mapping[str, ValueRange]
    ratios: Mapping[str, float]
    why: str


def measure_halves(
    before: MappedModel, after: MappedModel, names: Sequence[str], half: str, draws: Sequence[Mapping[str, np.ndarray]]
) -> HalfFindings:
    """In the proof worker: run a model, and the same model with its results rounded.

    Args:
        before: the model in float32.
        after: the model with rounded results.
        names: float32 values of the model before; a value that is rounded has its name, or that with the type after it.
        half: the name of the narrow type.
        draws: name → array, for each draw.
    """
    made = GraphIndex(after.model().graph).producers
    halves = {name: f"{name}_{half}" if f"{name}_{half}" in made else name for name in names}
    now = {name: wide if (wide := f"{rounded}{WIDE}") in made else name for name, rounded in halves.items()}
    ranges: dict[str, float] = {}
    ratios: dict[str, float] = {}
    why = ""
    outputs = [info.name for info in before.model().graph.output]
    for start in range(0, len(names), AT_ONCE):
        part = [name for name in names[start : start + AT_ONCE] if now[name] in made]
        sessions = before.session(part), after.session([now[name] for name in part])
        for feeds in draws:
            old, new = (session.run(feeds) for session in sessions)
            for name in part:
                ranges[name] = max(ranges.get(name, 0.0), ValueRange.of(old[name]).largest)
                exact, rounded = old[name].astype(np.float64), new[now[name]].astype(np.float64)
                ratios[name] = min(ratios.get(name, math.inf), _ratio(exact, rounded))
            for name in outputs if not start else ():
                why = why or compare(old[name], new[name], computed_in=half).why
    return HalfFindings({name: ValueRange(largest) for name, largest in ranges.items()}, ratios, why)


def _ratio(exact: np.ndarray, rounded: np.ndarray) -> float:
    """SQNR in dB over the elements that are finite on both sides; -inf where one is finite and the other is not."""
    exact, rounded = exact.reshape(-1), rounded.reshape(-1)
    with np.errstate(invalid="ignore", over="ignore"):
        error = exact - rounded
        signal, noise = float(exact @ exact), float(error @ error)
    if not math.isfinite(signal + noise):
        finite = np.isfinite(exact)
        both = finite & np.isfinite(rounded)
        if not np.array_equal(finite, both):
            return -math.inf
        exact, error = exact[both], exact[both] - rounded[both]
        signal, noise = float(exact @ exact), float(error @ error)
    return math.inf if not noise else -math.inf if not signal else 10 * math.log10(signal / noise)
