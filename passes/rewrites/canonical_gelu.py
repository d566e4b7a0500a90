"""Write GELUs as one Gelu, which opset 20 has, or in parts for targets that do not have it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
from onnx import NodeProto, helper

from passes.context import PassContext
from passes.errors import PolicyError
from passes.graph.op_facts import attribute_of
from passes.rewrites.canonical_norm import FORMS
from passes.rewrites.rewriter import Rewriter
from passes.step import Description, PassResult, Step, structure
from passes.structures.activations import find_gelus
from passes.structures.view import GraphView
from passes.suggest import plural
from passes.weights.detached import DetachedModel

SINCE: Final = 20
"""The opset that has Gelu."""

CURVES: Final = {"Erf": "none", "Tanh": "tanh"}
"""The curve of a GELU in parts → the attribute `approximate` of Gelu. That of x · sigmoid(1.702 x) has no Gelu."""


@dataclass(frozen=True, slots=True)
class CanonicalGelu(Step):
    """Write each GELU as one Gelu (`form: operator`), or as products, sums and Erf or Tanh (`form: parts`)."""

    form: str = "operator"
    name: str = field(default="canonical-gelu", init=False)
    description: ClassVar[Description] = structure("Write each GELU as one operator, or in parts")

    def check(self, context: PassContext) -> None:
        if self.form not in FORMS:
            raise PolicyError(f"pass {self.name!r}: form is {self.form!r}; expected {' or '.join(FORMS)}")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        ops = {node.op_type for node in model.proto.graph.node}
        if self.form == "parts":
            if "Gelu" not in ops:
                return PassResult(model, changed=False, why="no GELU is one operator")
            rewriter = Rewriter(model, context)
            count = sum(_write_parts(rewriter, node) for node in rewriter.by_op("Gelu"))
            return rewriter.result(f"{plural(count, 'GELU')} in parts")
        if ops.isdisjoint(CURVES):
            return PassResult(model, changed=False, why="no GELU is in parts")
        rewriter = Rewriter(model, context)
        if rewriter.opset < SINCE:
            return PassResult(model, changed=False, why=f"opset {rewriter.opset} has no Gelu, opset {SINCE} has")
        count = 0
        for found in find_gelus(GraphView(model)):
            curve = found.nodes[0].op_type
            inner = [node.output[0] for node in found.nodes[:-1]]
            same = rewriter.dtype(found.pins[0]) == rewriter.dtype(found.value)
            if curve in CURVES and same and rewriter.held.isdisjoint(inner) and found.value in rewriter.producers:
                shape = rewriter.shape(found.value)
                new = rewriter.add("Gelu", [found.pins[0]], found.last, shape, approximate=CURVES[curve])
                rewriter.replace(found.value, new)
                count += 1
        return rewriter.result(f"{plural(count, 'GELU')} as one operator" if count else "no GELU is in parts")


def _write_parts(rewriter: Rewriter, node: NodeProto) -> bool:
    """x · ½ · (1 + erf(x / √2)), or with tanh(√(2/π) · (x + 0.044715 x³))."""
    x, shape = node.input[0], rewriter.shape(node.input[0])
    dtype = helper.tensor_dtype_to_np_dtype(rewriter.dtype(node.output[0]) or rewriter.dtype(x))

    def write(op: str, name: str, number: float | str) -> str:
        operand = rewriter.constant_of(np.array(number, dtype), "number") if not isinstance(number, str) else number
        return rewriter.add(op, [name, operand], node, shape)

    approximate = attribute_of(node, "approximate", b"none")
    if approximate == b"tanh":
        cube = write("Mul", write("Mul", write("Mul", x, x), x), 0.044715)
        curve = rewriter.add("Tanh", [write("Mul", write("Add", x, cube), math.sqrt(2 / math.pi))], node, shape)
    else:
        curve = rewriter.add("Erf", [write("Mul", x, math.sqrt(0.5))], node, shape)
    half = write("Mul", x, 0.5)
    rewriter.replace(node.output[0], write("Mul", half, write("Add", curve, 1.0)))
    return True
