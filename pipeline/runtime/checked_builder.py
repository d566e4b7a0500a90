"""The Builder for people: each op is held against its operator when it is emitted.

builder = CheckedBuilder("g")
x = builder.input("x", TensorSpec((2, 3), "float32"))
(y,) = builder.emit("aten.mul.Tensor", [x], [("y", builder.spec(x))], {"other": 2})
graph = builder.build([y])

Hold the results that an op declares against those that its operator makes on the meta device, without computing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from passes.suggest import nearest, plural
from pipeline.errors import InternalError, SourceError, UsageError
from pipeline.ir import Graph
from pipeline.ir.check import violations
from pipeline.ir.graph import Attr, KernelSpec, Op, TensorSpec
from pipeline.ops import KINDS, GraphBuilder
from pipeline.ops.aten import is_call
from pipeline.runtime.eager import apply
from pipeline.runtime.operators import find_operator
from pipeline.runtime.tensors import dtype_name, torch_dtype


def find_mismatch(kind: str, attrs: Mapping[str, Attr], ins: Sequence[TensorSpec], outs: Sequence[TensorSpec]) -> str:
    """What is wrong with a call of the operator `kind`: torch refuses it, or makes other results than `outs`.

    "" where nothing is, and for operators of which nobody knows the results beforehand: those that are no call of
    torch, that take bodies, that require a device, or that do not run on meta; and for sizes that are still names.
    """
    is_known = all(spec.is_static for spec in (*ins, *outs))
    if not is_known or not is_call(kind) or kind.startswith("higher_order.") or _needs_device(kind):
        return ""
    op = Op(0, kind, (), (), {name: item for name, item in attrs.items() if name != "device"})
    try:
        with torch.no_grad(), torch.device("meta"), warnings.catch_warnings(action="ignore"):
            made = apply(op, [torch.empty(spec.sizes, dtype=torch_dtype(spec.dtype)) for spec in ins], {})
    except NotImplementedError:
        return ""
    except (RuntimeError, IndexError, TypeError, ValueError, OverflowError, AssertionError) as error:
        found = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in ins)
        return f"torch refuses it on {found or 'no tensors'} ({str(error).partition(chr(10))[0]})"
    shown = [f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in made]
    declared = [f"{spec.dtype}{list(spec.shape)}" for spec in outs]
    if shown == declared:
        return ""
    return f"found {', '.join(declared)} in the IR for what it makes, expected {', '.join(shown)}"


def _needs_device(kind: str) -> bool:
    """Whether the operator requires a device, as `to.device` does."""
    arguments = find_operator(kind)._schema.arguments
    return any(entry.name == "device" and not entry.has_default_value() for entry in arguments)


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
