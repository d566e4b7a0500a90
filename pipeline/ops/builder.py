"""A Builder that knows the table of operators, so that a graph can be written by hand.

builder = GraphBuilder("g")
x = builder.input("x", TensorSpec((2, 3), "float32"))
(y,) = builder.emit("aten.mul.Tensor", [x], [("y", builder.spec(x))], {"other": 2})
graph = builder.build([y])
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.ir.builder import Builder
from pipeline.ir.graph import Attr
from pipeline.ops.aten import call_attrs, is_call
from pipeline.ops.tables import emitter_of


class GraphBuilder(Builder):
    """Each op gets the kernel call of its operator, and a call of torch finds its operands in their order."""

    def __init__(self, name: str) -> None:
        super().__init__(name, emitter_of)

    def complete_arguments(self, kind: str, operands: int, given: Mapping[str, Attr]) -> dict[str, Attr]:
        """Say where the operands of a call go, in the order of its signature, unless `given` says so itself."""
        return call_attrs(kind, operands, given) if is_call(kind) else dict(given)
