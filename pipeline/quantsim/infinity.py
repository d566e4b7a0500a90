"""Tensors that are infinite or NaN on a sample and stay in float, since the model drops those elements.

The relative positions of T5 are one case: Log(0) is -inf, and a Where takes another value in its place. Another is
-inf of a mask times 0, which is NaN. The structure says which operator drops it, and the measured extremes say that
it does. Infinity that other operators read, such as the Softmax of a mask, stays as it is: the step `clamp-mask` is
for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from onnx import TensorProto

from passes.graph.inference import types_of
from passes.weights.detached import DetachedModel
from pipeline.config.quantsim import FLOAT
from pipeline.quantsim.encodings import Range
from pipeline.quantsim.placement import Placement, PlacementRule


def find_dropped_infinities(
    model: DetachedModel, placement: Placement, extents: Mapping[str, Range]
) -> Iterator[PlacementRule]:
    """A rule that leaves tensors in float, for each set of operators that drops their infinity or NaN.

    Args:
        extents: the least and the greatest element of each measured tensor; NaN where one is.
    """
    members: dict[str, list[str]] = {}
    for placed in placement.quantized_sites():
        if placed.site.role in ("input", "activation"):
            members.setdefault(placed.site.group, []).append(placed.site.tensor)
    walk, found = _Walk(model, extents), dict[tuple[str, ...], set[str]]()
    for group in members.values():
        names = [name for name in group if not walk.is_finite(name)]  # so measured, or moved there and not measured
        if any(name in extents for name in names) and (droppers := walk.find_droppers(names)):
            found.setdefault(droppers, set()).update(names)
    for droppers, names in found.items():
        drop = f"{' and '.join(droppers)} drop{'s' * (len(droppers) == 1)}"
        reason = f"it is infinite or NaN on a sample, and {drop} those elements"
        yield PlacementRule(INFINITE, activations=FLOAT, tensors=frozenset(names), reason=reason)


INFINITE: Final = "infinite values"
"""What the report calls these rules."""


class _Walk:
    """From values to those that operators make of them."""

    def __init__(self, model: DetachedModel, extents: Mapping[str, Range]) -> None:
        self._consumers, self._extents = model.index.consumers, extents
        self._outputs = {info.name for info in model.proto.graph.output}
        self._truths = {
            name for name, info in types_of(model.proto).items() if info.type.tensor_type.elem_type == TensorProto.BOOL
        }

    def is_finite(self, name: str) -> bool:
        """Whether it was measured, and is finite."""
        return name in self._extents and bool(np.isfinite(self._extents[name]).all())

    def find_droppers(self, names: list[str]) -> tuple[str, ...]:
        """The operators that drop such elements of all these values; none where something else has a use for them."""
        found, seen, left = set[str](), set[str](), [*names]
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self._outputs:
                return ()
            for node in self._consumers[name]:
                for result in node.output:
                    if self._is_drop(node.op_type, result):
                        found.add(node.op_type)
                    elif self.is_finite(result):
                        return ()
                    else:
                        left.append(result)
        return tuple(sorted(found))

    def _is_drop(self, operator: str, result: str) -> bool:
        """Whether an operator chooses or compares values, and its result is finite as far as anything measures it."""
        if operator == "Where":
            return result not in self._extents or self.is_finite(result)
        return result in self._truths or (operator in LIMITS and self.is_finite(result))


LIMITS: Final = ("Clip", "Max", "Min")
"""The operators that put a limit in the place of infinity."""
