"""The references of a proof, its results, and the protocol of provers; with the prover that checks structure only.
`numeric.py` runs models and compares their outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import numpy as np

from passes.errors import InferenceStopped, StepFailed
from passes.model.analysis import AnalyzedModel
from passes.proof.coverage import Coverage
from passes.proof.draws import Draw
from passes.proof.numbers import Errors, only_compared
from passes.structures import Instance
from passes.suggest import AND_MORE, join_first
from passes.weights.detached import DetachedModel
from passes.worker.messages import REFUSED


@dataclass(frozen=True, slots=True)
class Reference:
    """One draw: input arrays by name, and the outputs that the reference program computed from them."""

    feeds: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    label: str = ""
    draw: Draw | None = None
    """How the inputs were drawn; None for inputs that the caller gave."""
    is_optional: bool = False
    """Whether an export may leave this draw out, since nobody asked for it."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The worst errors over all draws, for each output and for each value at a kept structure."""

    errors: Mapping[str, Errors]
    inner: Mapping[str, Errors]
    tables: str = ""
    """The fault in table rows that no draw reads; empty for none."""

    @property
    def why(self) -> str:
        """The errors over tolerance, or the fault in a table; empty when there is none."""
        if self.tables:
            return self.tables
        return describe_errors({**self.errors, **self.inner})

    @property
    def max_abs(self) -> float:
        return max((errors.max_abs for errors in only_compared(self.errors).values()), default=0.0)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Whether a fault in a kept weight would be detected.

    `margin` is the smallest ratio, over all kept weights, of the error that zeroing it causes to the tolerance there;
    `blind` names the structures where it is below 1.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_inf_nan": "strings"}
    """JSON has no infinity, so pydantic writes it as a string."""

    margin: float
    blind: tuple[str, ...]
    weak: tuple[str, ...] = ()
    """Blocks whose results are below the tolerance of what they are added to; their own values are compared instead."""


def describe_errors(errors: Mapping[str, Errors]) -> str:
    """The first few values that are over tolerance; empty for none."""
    bad = [f"{name}: {found.why}" for name, found in errors.items() if not found.ok]
    return join_first(bad, 3, AND_MORE, "; ")


def worst_errors(draws: Sequence[Mapping[str, Errors]]) -> dict[str, Errors]:
    """The worst of each number over several draws, by output; the first `why` is kept."""
    worst: dict[str, Errors] = {}
    for errors in draws:
        for name, comparison in errors.items():
            known = worst.get(name, comparison)
            worst[name] = Errors(
                max(known.max_abs, comparison.max_abs),
                max(known.max_rel, comparison.max_rel),
                min(known.cosine, comparison.cosine),
                min(known.sqnr_db, comparison.sqnr_db),
                comparison.limit if comparison.excess > known.excess else known.limit,
                max(known.excess, comparison.excess),
                known.why or comparison.why,
                known.judged_as or comparison.judged_as,
            )
    return worst


def ranges_of(references: Iterable[Reference]) -> dict[str, tuple[float, float]]:
    """Numeric input → the least and the greatest finite value that it has in any of the `references`."""
    ranges: dict[str, tuple[float, float]] = {}
    for reference in references:
        for name, array in reference.feeds.items():
            if array.dtype.kind in "bcOSU":
                continue
            values = array.astype(np.float64)
            values = values[np.isfinite(values)]
            if values.size:
                low, high = ranges.get(name, (math.inf, -math.inf))
                ranges[name] = min(low, float(values.min())), max(high, float(values.max()))
    return ranges


STRUCTURE: Final = "structure"
"""The name of this level of proof in settings; the other level is `numbers`."""

NOTHING: Final[Measurement] = Measurement({}, {})


class Prover(Protocol):
    """Decides for each model that a pass returns whether it still computes what the exported model computes."""

    def watch(self, model: AnalyzedModel, instances: Sequence[Instance]) -> None:
        """Take a model as the exported model, and compare values inside of it too.

        Args:
            model: the exported model.
            instances: structures whose values are compared, and whose weights have to be seen by the draws.

        Raises:
            ModelError: it cannot be compared. A later question may say so too: the model is run meanwhile.
        """
        ...

    def feeds(self) -> Sequence[Mapping[str, np.ndarray]]:
        """The inputs that the user gave, or those of all draws where there are none; none where nothing is run."""
        ...

    def measure(self, model: AnalyzedModel) -> Measurement:
        """How far a model is from the reference.

        Args:
            model: a model that steps have made of the exported one.

        Returns:
            The errors by output and by inner value; `why` is empty if all are within tolerance.

        Raises:
            StepFailed: onnxruntime refuses the model, or stops.
        """
        ...

    def run(self, model: AnalyzedModel, *, hold: bool = True) -> Measurement:
        """`measure` by running the whole model.

        Args:
            model: a model that steps have made of the exported one.
            hold: keep values that later proofs compare with.

        Returns:
            As `measure`.

        Raises:
            StepFailed: onnxruntime refuses the model, or stops.
        """
        ...

    def has_run(self, model: DetachedModel) -> bool:
        """Whether this object itself was run, and not only a model that computes the same.

        Args:
            model: a model that was proven.

        Returns:
            True for the model that ran last.
        """
        ...

    def power(self) -> Sensitivity:
        """Whether a fault in the kept weights would be detected."""
        ...

    def coverage(self, model: AnalyzedModel) -> Coverage:
        """What the proof covered of the exported model.

        Args:
            model: the final model.

        Returns:
            The draws, what they reached, and what they missed.
        """
        ...


class StructureProver:
    """The prover for a model that cannot be run here: it computes nothing and compares no values.

    The runner still checks after each change that the model is valid ONNX, has the same signature, and has all kept
    structures with their weights. Whether the model computes the same stays open.
    """

    def watch(self, model: AnalyzedModel, instances: Sequence[Instance]) -> None: ...

    def feeds(self) -> Sequence[Mapping[str, np.ndarray]]:
        return ()

    def measure(self, model: AnalyzedModel) -> Measurement:
        return NOTHING

    def run(self, model: AnalyzedModel, *, hold: bool = True) -> Measurement:
        return NOTHING

    def has_run(self, model: DetachedModel) -> bool:
        return True  # there is no run to wait for

    def power(self) -> Sensitivity:
        return Sensitivity(math.inf, ())

    def coverage(self, model: AnalyzedModel) -> Coverage:
        return Coverage()


def describe_failure(failure: StepFailed, run_advice: str) -> str:
    """The sentence on a reference that does not run, with what to do."""
    return f"the model does not run as it is: {failure}{advice_on(failure, run_advice)}"


def advice_on(failure: StepFailed, run_advice: str) -> str:
    """What to do about a model that does not run as it is; a proof by structure infers shapes too.

    Args:
        failure: of the run.
        run_advice: that of the PassContext.
    """
    if isinstance(failure, InferenceStopped):
        return ""
    return SPACE if REFUSED in str(failure) else f"; if nothing here can run it, {run_advice}" * bool(run_advice)


def describe_random(outputs: Iterable[str], run_advice: str) -> str:
    """The sentence where nothing could be compared."""
    return (
        f"every output of the model depends on random values that cannot be fixed ({', '.join(map(repr, outputs))}), "
        f"so nothing can be compared; make the noise an input, or take opset 11 or later{_or(run_advice)}"
    )


def describe_nan(output: str, run_advice: str) -> str:
    """The sentence where the reference holds NaN."""
    return (
        f"output {output!r} of the reference holds NaN, so nothing can be compared with it; check the weights and the "
        f"input ranges{_or(run_advice)}"
    )


def _or(advice: str) -> str:
    return f", or {advice}" * bool(advice)


SPACE: Final = "; free space in the folder of temporary files, which TMPDIR names, or raise the limits of the process"
