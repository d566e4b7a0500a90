"""A Builder that knows the table of operators, so that a graph can be written by hand.

builder = GraphBuilder("g")
x = builder.input("x", TensorSpec((2, 3), "float32"))
(y,) = builder.emit("aten.mul.Tensor", [x], [("y", builder.spec(x))], {"other": 2})
graph = builder.build([y])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.ir.builder import Builder
from pipeline.ir.graph import Attr, Plain, TensorSpec
from pipeline.ops.aten import call_attrs, is_call
from pipeline.ops.tables import emitter_of


class GraphBuilder(Builder):
    """Each op gets the kernel call of its operator, and a call of torch finds its operands in their order."""

    def __init__(self, name: str) -> None:
        super().__init__(name, emitter_of)

    def emit(
        self,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[tuple[str, TensorSpec]],
        attrs: Mapping[str, Attr] | None = None,
        *,
        constraints: Mapping[str, Plain] | None = None,
        name: str = "",
        origin: str = "",
    ) -> tuple[int, ...]:
        """Add one op and its outputs. Returns the vids of `outputs`.

        Args:
            kind: an operator of `pipeline.ops`, such as `aten.add.Tensor` or `Resize`.
            inputs: the vids of the operands, in the order of the operator's signature.
            outputs: name, shape and dtype of each result.
            attrs: the other arguments by name. A call that says itself where its operands go is left as it is.

        Raises:
            InternalError: an unknown vid, or a call that the operator does not have.
        """
        given = attrs or {}
        if is_call(kind):
            given = call_attrs(kind, len(inputs), given)
        return super().emit(kind, inputs, outputs, given, constraints=constraints, name=name, origin=origin)
