"""The Builder for people: each op is held against its operator when it is emitted.

builder = CheckedBuilder("g")
x = builder.input("x", TensorSpec((2, 3), "float32"))
(y,) = builder.emit("aten.mul.Tensor", [x], [("y", builder.spec(x))], {"other": 2})
graph = builder.build([y])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.suggest import nearest, plural
from pipeline.errors import InternalError, SourceError, UsageError
from pipeline.ir import Graph
from pipeline.ir.check import violations
from pipeline.ir.graph import Attr, KernelSpec, TensorSpec
from pipeline.ops import KINDS, GraphBuilder
from pipeline.runtime.result_check import find_mismatch


class CheckedBuilder(GraphBuilder):
    """A GraphBuilder whose mistakes are the caller's: a UsageError says what is wrong where the op is emitted."""

    mistake = UsageError

    def make_kernel(
        self, kind: str, name: str, attrs: Mapping[str, Attr], ins: Sequence[TensorSpec], outs: Sequence[TensorSpec]
    ) -> KernelSpec:
        """The kernel call of an op, which has been held against its operator.

        Raises:
            UsageError: there is no such operator; the operator does not take these inputs or attributes; or it makes
                other shapes or dtypes than `outs` says.
        """
        label = f"op {kind} {name!r}" if name else f"op {kind}"
        try:
            kernel = super().make_kernel(kind, name, attrs, ins, outs)
            if kernel is None:
                plain = "; expected one of torch, such as aten.relu.default" if kind in KINDS else nearest(kind, KINDS)
                raise UsageError(f"{label}: there is no operator of this name{plain}")
            said = find_mismatch(kind, attrs, ins, outs)
        except (InternalError, SourceError) as error:
            raise UsageError(f"{label}: {error}") from error
        if said:
            raise UsageError(f"{label}: {said.replace(' in the IR', '')}")
        return kernel

    def build(self, outputs: Sequence[int]) -> Graph:
        """Freeze what was added.

        Raises:
            UsageError: the graph breaks a rule of the IR, such as a value that was declared and that no op makes.
        """
        graph = super().build(outputs)
        if wrong := violations(graph):
            lines = "\n".join(f"  - {violation}" for violation in wrong)
            raise UsageError(f"graph {self.name!r} breaks {plural(len(wrong), 'rule')} of the IR:\n{lines}")
        return graph
