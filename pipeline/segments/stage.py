"""A stage: the nodes that are left of a model or of a body, and the steps by which they have been run so far.

A step is made for the types and shapes of what the stage reads, and for the numbers that decide shapes (the input 1 of
a Reshape) or the course (the condition of an If). The next run with the same ones takes the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from pipeline.importers.from_onnx.model import NodeList, import_segment, tensor_spec
from pipeline.segments.steps import HostStep, PlanStep, stored_value

Values = MutableMapping[str, Any]
"""By name: arrays, lists of arrays for sequences, None for an optional without a value."""

MOST_VARIANTS = 16
"""Steps of one stage that are kept, the latest; a model that needs more makes some again."""


class StageStep(Protocol):
    """What is run for the first nodes of a stage."""

    @property
    def calls(self) -> int: ...

    @property
    def native_calls(self) -> int: ...

    def run(self, values: Values) -> None: ...

    def stages(self) -> Iterator[Stage]: ...

    def fallbacks(self) -> Iterator[str]: ...


@dataclass(frozen=True, slots=True)
class FallbackCount:
    """How many steps and calls there are, and which operators another runtime computes, each as often as it occurs."""

    steps: int
    calls: int
    fallbacks: tuple[str, ...]
    native_calls: int = 0
    """Those of the calls that kernels in C++ compute."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A step for one feed, and the stage after it."""

    signature: tuple[object, ...]
    fixed: Mapping[str, np.ndarray]
    step: StageStep
    following: Stage | None

    def fits(self, signature: tuple[object, ...], values: Values) -> bool:
        if signature != self.signature:
            return False
        return all(np.array_equal(array, np.asarray(values[name])) for name, array in self.fixed.items())


@dataclass(slots=True)
class Stage:
    """Nodes that are left; `variants` grows as runs bring other shapes."""

    part: NodeList
    variants: list[Variant] = field(default_factory=list)
    native: bool = False
    _reads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reads = self.part.reads()

    def run(self, values: Values) -> None:
        """Run all nodes, and put what they make among `values`."""
        stage: Stage | None = self
        while stage is not None and stage.part.nodes:
            variant = stage.variant_for(values)
            variant.step.run(values)
            stage = variant.following
        for name in self.part.outputs:
            if name not in values:
                values[name] = stored_value(self.part.stored, name)

    def variant_for(self, values: Values) -> Variant:
        signature = tuple(_signature(values[name]) if name in values else None for name in self._reads)
        for variant in self.variants:
            if variant.fits(signature, values):
                return variant
        variant = self._make(signature, values)
        del self.variants[: max(len(self.variants) - MOST_VARIANTS + 1, 0)]
        self.variants.append(variant)
        return variant

    def count(self) -> FallbackCount:
        """What the steps that are kept hold, in this stage, in those after it, and in bodies."""
        steps, calls, native, names = 0, 0, 0, []
        for variant in self.variants:
            inner = [stage.count() for stage in (*variant.step.stages(), variant.following) if stage is not None]
            steps += 1 + sum(each.steps for each in inner)
            calls += variant.step.calls + sum(each.calls for each in inner)
            native += variant.step.native_calls + sum(each.native_calls for each in inner)
            names += [*variant.step.fallbacks(), *(name for each in inner for name in each.fallbacks)]
        return FallbackCount(steps, calls, tuple(names), native)

    def _make(self, signature: tuple[object, ...], values: Values) -> Variant:
        """The first step: as many nodes as one plan can hold, or one node."""
        read = {name: values[name] for name in self._reads if name in values}
        fixed: dict[str, np.ndarray] = {}
        while True:
            segment = import_segment(self.part, read, fixed)
            known = {name: read[name] for name in segment.needs if tensor_spec(read.get(name)) is not None}
            if not known:
                break
            fixed |= {name: np.array(array) for name, array in known.items()}
        rest = list(segment.rest)
        if segment.begins:
            step: StageStep = PlanStep(segment, native=self.native)
        else:
            step = HostStep(rest.pop(0), self.part.stored, read, partial(Stage, native=self.native))
        return Variant(signature, fixed, step, Stage(self.part.after(rest), native=self.native) if rest else None)


def _signature(value: Any) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape)
    return (type(value), tuple(map(_signature, value))) if isinstance(value, list) else type(value)
