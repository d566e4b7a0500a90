"""Numeric proof: the model against references that were computed once, by another program than the one under test.

A proof is worth what it can see. Random tiny weights hide faults (zeroing a layer's Q and K moved a random BEiT's
output by 1.6e-5), so the values at kept structures are compared too, and `power` plants a fault in every kept weight
and looks whether it shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx

from passes.canonical import live_digest
from passes.numbers import Errors, Tolerance, compare
from passes.sessions import Session
from passes.structures import Instance
from passes.weights import DetachedModel, detach

__all__ = ["Measurement", "Power", "Prover", "Reference", "worst_errors"]


@dataclass(frozen=True, slots=True)
class Reference:
    """One draw: input arrays by name, and the outputs that the reference program computed from them."""

    feeds: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    label: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The worst errors over all draws, for each output and for each value at a kept structure."""

    errors: Mapping[str, Errors]
    inner: Mapping[str, Errors]

    @property
    def why(self) -> str:
        """What is over tolerance; empty when all is well."""
        bad = [f"{name}: {errors.why}" for name, errors in {**self.errors, **self.inner}.items() if not errors.ok]
        return "; ".join(bad[:3]) + (f" (and {len(bad) - 3} more)" if len(bad) > 3 else "")

    @property
    def max_abs(self) -> float:
        return max((errors.max_abs for errors in self.errors.values()), default=0.0)


@dataclass(frozen=True, slots=True)
class Power:
    """Whether a fault in a kept weight would be seen.

    `margin` is the smallest ratio, over all kept weights, of the error that zeroing it causes to the tolerance there;
    `blind` names the structures where it is below 1.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_inf_nan": "strings"}
    """JSON has no infinity; whoever writes these numbers with pydantic writes the word."""

    margin: float
    blind: tuple[str, ...]


class Prover:
    """Measures models against references; at kept structures, against the values of the exported model itself."""

    def __init__(self, references: Sequence[Reference], tolerances: Mapping[str, Tolerance] | None = None) -> None:
        self._references = tuple(references)
        self._tolerances = dict(tolerances or {})
        self._inner: list[dict[str, np.ndarray]] = [{} for _ in self._references]
        self._measured: dict[str, Measurement] = {}
        self._ran: onnx.ModelProto | None = None

    def measure(self, model: DetachedModel) -> Measurement:
        """Run every draw and compare. A model that computes the very same thing as one before is not run again.

        Raises:
            StepFailed: onnxruntime refuses or stops.
        """
        digest = live_digest(model)
        if digest not in self._measured:
            self._measured[digest] = self.run(model)
        return self._measured[digest]

    def has_run(self, model: DetachedModel) -> bool:
        """Whether this very object was run, and not only one that computes the same."""
        return self._ran is model.proto

    def run(self, model: DetachedModel) -> Measurement:
        """`measure`, always by running."""
        self._ran = model.proto
        made = {name for node in model.proto.graph.node for name in node.output}
        probes = [name for name in (self._inner[0] if self._inner else {}) if name in made]
        session = Session(model, probes)
        outputs: list[dict[str, Errors]] = []
        inner: list[dict[str, Errors]] = []
        for reference, values in zip(self._references, self._inner, strict=True):
            got = session.run(reference.feeds)
            outputs.append(_compare_all(reference.outputs, got, self._tolerances))
            inner.append(_compare_all({name: values[name] for name in probes}, got, self._tolerances))
        return Measurement(worst_errors(outputs), worst_errors(inner))

    def watch(self, model: DetachedModel, instances: Sequence[Instance]) -> Power:
        """From now on compare the values at `instances` too; say how visible a fault in their weights is.

        `model` is the exported model, whose outputs have been compared with the reference. The fault is planted in all
        kept weights at once and read at each one's own product, which no other weight feeds behind it: a product with
        zeros is zero whatever comes in.
        """
        pinned = [pin for instance in instances for pin in (*instance.pins, *instance.loose_pins)]
        probes = list(dict.fromkeys(pin.name for pin in pinned))
        if not probes or not self._references:
            return Power(math.inf, ())
        sound = Session(model, probes)
        found = []
        for reference, values in zip(self._references, self._inner, strict=True):
            got = sound.run(reference.feeds)
            values.update({name: got[name] for name in probes})
            found.append(_compare_all(reference.outputs, got, self._tolerances))
        del sound  # before the next session: each may hold copies of weights
        self._measured = {live_digest(model): Measurement(worst_errors(found), {})}
        faulty = Session(_zeroed(model, instances), probes).run(self._references[0].feeds)
        ratios = {}
        for instance in instances:
            errors = [compare(self._inner[0][p.name], faulty[p.name], self._tolerances) for p in instance.pins]
            ratios[instance.name] = min((error.excess for error in errors), default=math.inf)
        return Power(min(ratios.values()), tuple(name for name, ratio in ratios.items() if ratio <= 1.0))


def _zeroed(model: DetachedModel, instances: Sequence[Instance]) -> DetachedModel:
    names = {weight.name for instance in instances for weight in instance.weights}
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    zeros = []
    for tensor in proto.graph.initializer:
        if tensor.name in names:
            zeros.append(onnx.numpy_helper.from_array(np.zeros_like(model.array(tensor)), tensor.name))
    kept = [tensor for tensor in proto.graph.initializer if tensor.name not in names]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    only_zeros = onnx.ModelProto()
    only_zeros.graph.initializer.extend(zeros)
    detached = detach(only_zeros)
    proto.graph.initializer.extend(detached.proto.graph.initializer)
    return DetachedModel(proto, {**model.weights, **detached.weights})


def _compare_all(
    expected: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], tolerances: Mapping[str, Tolerance]
) -> dict[str, Errors]:
    return {name: compare(value, got[name], tolerances) for name, value in expected.items()}


def worst_errors(draws: Sequence[Mapping[str, Errors]]) -> dict[str, Errors]:
    """The worst of each number over several draws, by output; the first complaint stays."""
    worst: dict[str, Errors] = {}
    for errors in draws:
        for name, one in errors.items():
            known = worst.get(name, one)
            worst[name] = Errors(
                max(known.max_abs, one.max_abs),
                max(known.max_rel, one.max_rel),
                min(known.cosine, one.cosine),
                min(known.sqnr_db, one.sqnr_db),
                one.limit if one.excess > known.excess else known.limit,
                max(known.excess, one.excess),
                known.why or one.why,
            )
    return worst
