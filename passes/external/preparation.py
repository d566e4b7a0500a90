"""Steps that prepare weights for quantization and leave what the model computes as it is: cross-layer equalization,
which gives channels between two products weights of one size on both sides, and AIMET's SpinQuant rotations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import onnx

from passes.context import PassContext
from passes.errors import PolicyError
from passes.external.installed import require
from passes.external.through_files import through_files, write
from passes.graph.index import initializers_of
from passes.step import PassResult, Step
from passes.structures.view import modules_of
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class CrossLayerEqualization(Step, name="cross-layer-equalization", reads="values", source="onnxsim"):
    """Scale channels between two products so that the weights on both sides have one size. onnxsim's
    `quark_equalization.equalize` does it for Conv and Gemm, as Quark does.

    Between two products there may be Relu, LeakyRelu, zeros of a Pad, and a depthwise Conv.

    Args:
        rounds: over all pairs; one changes most.
        weight_threshold: channels whose largest weights on both sides are together below it stay.
    """

    rounds: int = 1
    weight_threshold: int | float = 0.5

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


@dataclass(frozen=True, slots=True)
class Rotate(Step, name="rotate", reads="values", source="aimet-onnx"):
    """Rotate the residual stream and the heads of a decoder by AIMET's SpinQuant. The call is
    `aimet_onnx.spinquant.apply_spinquant`.

    Args:
        r1: rotate the residual stream.
        r2: rotate the values of each head.
        head_size: of the values; AIMET reads it from the cache of a model that has one.
    """

    r1: bool = True
    r2: bool = False
    head_size: int | None = None

    def check(self, context: PassContext) -> None:
        """Refuse to run without AIMET, and without a rotation.

        Raises:
            PolicyError: naming the extra, or the option.
        """
        require("aimet_onnx", self.name, extra="aimet")
        if not (self.r1 or self.r2):
            raise PolicyError(f"pass {self.name!r}: r1 and r2 are both false; expected one of them")
        if self.head_size is not None and self.head_size < 1:
            raise PolicyError(f"pass {self.name!r}: head_size is {self.head_size!r}; expected an integer of 1 or more")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        options = {"r1": self.r1, "r2": self.r2, "head_size": self.head_size}
        return PassResult(through_files(model, context, rotate, options))


def rotate(source: str, target: str, options: Mapping[str, Any]) -> None:
    """In the worker: rotate the model in the file `source` into the file `target`."""
    from aimet_onnx.llm_topology.topology import (  # pyright: ignore[reportMissingImports]
        analyze_llm_topology_by_norm_count,
    )
    from aimet_onnx.spinquant import apply_spinquant  # pyright: ignore[reportMissingImports]

    model = onnx.load(source)
    names = name_after_modules(model)
    topology = analyze_llm_topology_by_norm_count(model)
    if options["head_size"]:
        topology.head_dim = options["head_size"]
    apply_spinquant(model, enable_r1=options["r1"], enable_r2=options["r2"], topology=topology)
    for node in model.graph.node:
        node.name = names.get(node.name, node.name)
    write(model, target)


def name_after_modules(model: onnx.ModelProto) -> dict[str, str]:
    """Name each node by its module, `/layers/0/self_attn/v_proj/MatMul_7`, by which AIMET knows what it projects.

    Without a module, the name of a weight shows the projection; every node gets a name. Returns each new name with the
    old name of the node.
    """
    stored = initializers_of(model.graph)
    names: dict[str, str] = {}
    for index, node in enumerate(model.graph.node):
        weight = next((WEIGHT.sub("", name) for name in node.input if name in stored and WEIGHT.search(name)), "")
        path = (modules_of(node) or (weight,))[-1]
        if path or not node.name:
            name = "/".join(["", *filter(None, path.split(".")), f"{node.op_type}_{index}"])
            names[name], node.name = node.name, name
    return names


WEIGHT: Final = re.compile(r"\.weight(_\w+)?$")
"""The end of the name of a weight, with what a pass has done to it."""
