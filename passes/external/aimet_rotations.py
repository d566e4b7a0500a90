"""AIMET's SpinQuant rotations of decoders, R1 and R2, which leave what the model computes as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import onnx

from passes.context import PassContext
from passes.errors import PolicyError
from passes.external.installed import require
from passes.external.through_files import through_files, write
from passes.graph.index import initializers_of
from passes.step import Description, PassResult, Step, values
from passes.structures.view import modules_of
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class Rotate(Step):
    """Rotate the weights of a decoder by `aimet_onnx.spinquant.apply_spinquant`.

    Args:
        r1: rotate the residual stream.
        r2: rotate the values of each head.
        head_size: of the values; AIMET reads it from the cache of a model that has one.
    """

    r1: bool = True
    r2: bool = False
    head_size: int | None = None
    name: str = field(default="rotate", init=False)
    source: str = field(default="aimet-onnx", init=False)
    description: ClassVar[Description] = values(
        "Rotate the residual stream and the heads of a decoder by AIMET's SpinQuant"
    )

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
