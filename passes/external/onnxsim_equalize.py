"""Cross-layer equalization as preparation: channels between two products get weights of one size on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import onnx

from passes.context import PassContext
from passes.errors import PolicyError
from passes.external.through_files import through_files, write
from passes.step import Description, PassResult, Step, values
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class CrossLayerEqualization(Step):
    """Equalize Conv and Gemm by onnxsim's `quark_equalization.equalize`, as Quark does.

    Between two products there may be Relu, LeakyRelu, zeros of a Pad, and a depthwise Conv.

    Args:
        rounds: over all pairs; one changes most.
        weight_threshold: channels whose largest weights on both sides are together below it stay.
    """

    rounds: int = 1
    weight_threshold: int | float = 0.5
    name: str = field(default="cross-layer-equalization", init=False)
    source: str = field(default="onnxsim", init=False)
    description: ClassVar[Description] = values(
        "Scale channels between two products so that the weights on both sides have one size"
    )

    def check(self, context: PassContext) -> None:
        if self.rounds < 1:
            raise PolicyError(f"pass {self.name!r}: rounds is {self.rounds!r}; expected an integer of 1 or more")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        found = through_files(
            model, context, equalize, {"steps": self.rounds, "weight_threshold": self.weight_threshold}
        )
        stored, weights = model.index.initializers, found.proto.graph.initializer
        changed = [tensor.name for tensor in weights if model.digest(stored[tensor.name]) != found.digest(tensor)]
        if not changed:
            return PassResult(model, changed=False, why="no two products with only Relu and the like between them")
        return PassResult(found)


def equalize(source: str, target: str, options: Mapping[str, Any]) -> None:
    """In the worker: equalize the model in the file `source` into the file `target`."""
    from onnxsim.quark_equalization import equalize as equalize_pairs

    write(equalize_pairs(onnx.load(source), **options), target)
