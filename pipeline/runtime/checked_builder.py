"""The Builder for people: each op is held against its operator when it is emitted.

builder = CheckedBuilder("g")
x = builder.input("x", TensorSpec((2, 3), "float32"))
w = builder.param("w", TensorSpec((3, 4), "float32"), numpy.ones((3, 4), numpy.float32))
(h,) = builder.emit("aten.mm.default", [x, w], [("h", TensorSpec((2, 4), "float32"))])
(y,) = builder.emit("aten.mul.Tensor", [h], [("y", builder.spec(h))], {"other": 2})
graph = builder.build([y])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from passes.suggest import describe_argument, nearest, plural
from pipeline.errors import OnnxlineError, UsageError
from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir.graph import Attr, Graph, InputRef, KernelSpec, Op, Payload, Role, SymExpr, TensorSpec, parts
from pipeline.lowering.lower import find_wrong_constraints
from pipeline.ops import KINDS, GraphBuilder
from pipeline.ops.aten import HIGHER_ORDER, is_call
from pipeline.ops.tables import emitter_of
from pipeline.runtime.call_check import find_mismatch, refuse_wrong_graph, try_call
from pipeline.runtime.call_schema import arguments, find_wrong_arguments
from pipeline.runtime.kernels.aten.call import pure_operator
from pipeline.runtime.tensors import as_tensor, why_unreadable

Specs = Sequence[TensorSpec]


class CheckedBuilder(GraphBuilder):
    """A GraphBuilder whose mistakes are the caller's: a UsageError says what is wrong where the op is emitted.

    Weights, states and constants are torch tensors, numpy arrays, or payloads of a Graph; none is copied.
    """

    def make_kernel(
        self, kind: str, name: str, attrs: Mapping[str, Attr], ins: Specs, outs: Specs
    ) -> KernelSpec | None:
        """The kernel call of an op, which has been held against its operator.

        Returns None for an op with named dims, whose kernel call is made when they have sizes.

        Args:
            kind: the operator, such as `aten.add.Tensor`.
            name: the op's name, for messages.
            attrs: the operator's other arguments by name.
            ins: shape, dtype and device of each operand.
            outs: shape, dtype and device of each result.

        Raises:
            UsageError: there is no such operator; the operator does not take these inputs or attributes; or it makes
                other shapes or dtypes than `outs` says.
        """
        label = f"op {kind} {name!r}" if name else f"op {kind}"
        try:
            if said := _find_mistake(kind, attrs, ins, outs):
                raise UsageError(said)
            return None if _has_names(attrs, (*ins, *outs)) else super().make_kernel(kind, name, attrs, ins, outs)
        except OnnxlineError as error:
            raise UsageError(f"{label}: {error}") from error

    def complete_arguments(self, kind: str, operands: int, given: Mapping[str, Attr]) -> dict[str, Attr]:
        """Say where the operands of a call go, in the order of its operator's arguments, unless `given` says so.

        Args:
            kind: the operator.
            operands: how many operands the call has.
            given: the attributes of the call.

        Raises:
            UsageError: more operands than the operator takes.
        """
        if not is_call(kind) or any(isinstance(part, InputRef) for item in given.values() for part in parts(item)):
            return dict(given)
        known = arguments(kind)
        if known is None:
            return dict(given)  # make_kernel says so
        taking = [entry for entry in known.values() if "tensor" in entry.kind and entry.name not in given]
        refs = map(InputRef, range(operands))
        call: dict[str, Attr] = {}
        for entry in taking:
            if entry.kind == "tensors":
                call[entry.name] = tuple(refs)
            elif (ref := next(refs, None)) is not None:
                call[entry.name] = ref
            elif entry.required and type(None) in entry.alone:
                call[entry.name] = None
        if (ref := next(refs, None)) is not None:
            names = ", ".join(entry.name for entry in taking) or "none"
            raise UsageError(f"op {kind}: found {plural(operands, 'operand')}, expected at most {ref.index}: {names}")
        return {**call, **given}

    def find_wrong_constraints(self, op: Op) -> str:
        """What is wrong with the constraints of `op`: unknown names, or inputs that its result may not overwrite."""
        return find_wrong_constraints(op)

    def build(self, outputs: Sequence[int]) -> Graph:
        """Freeze what was added.

        Args:
            outputs: vids of the values that the graph returns, in order.

        Raises:
            UsageError: outputs that are no vids, a value that was declared and that no op makes, or a payload that
                cannot be read.
        """
        graph = super().build(outputs)
        refuse_wrong_graph(graph)
        return graph

    def _add_stored(self, name: str, spec: TensorSpec, role: Role, payload: Payload | np.ndarray | None) -> int:
        self._check_decl(str(role), name, spec)
        return super()._add_stored(name, spec, role, _read_payload(f"{role} {name!r}", spec, payload))


def _find_mistake(kind: str, attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str:
    """What is wrong with an op; "" where nothing is.

    Raises:
        SourceError: torch does not know the operator.
        Unsupported: it writes to its arguments.
    """
    if kind.startswith(HIGHER_ORDER):
        return "it runs bodies, which a Builder does not have; extract_ir makes such ops of a torch module"
    if emitter_of(kind) is None:
        known = nearest(kind, KINDS) if kind not in KINDS else ""
        return f"there is no operator of this name{known or '; expected one of torch, such as aten.relu.default'}"
    if not is_call(kind):
        return ""
    pure_operator(kind)
    said = find_wrong_arguments(kind, attrs)
    if not said and not _has_names(attrs, (*ins, *outs)):
        said = find_mismatch(kind, attrs, ins, outs) or try_call(kind, attrs, ins, outs)
    return said.replace(" in the IR", "")


def _has_names(attrs: Mapping[str, Attr], specs: Specs) -> bool:
    """Whether the op has sizes, or arguments, that named dims decide."""
    expressions = (isinstance(part, SymExpr) for item in attrs.values() for part in parts(item))
    return any(expressions) or not all(spec.is_static for spec in specs)


def _read_payload(place: str, spec: TensorSpec, payload: Payload | np.ndarray | None) -> Payload | None:
    """`payload` as a Graph keeps it.

    Raises:
        UsageError: it is neither a tensor nor an array nor a payload, it has no elements to read, or another shape or
            dtype than `spec` says.
    """
    if payload is None:
        return None
    if isinstance(payload, np.ndarray):
        payload = as_tensor(payload)
    if isinstance(payload, torch.Tensor):
        if why := "is on the device meta, which has no values" if payload.is_meta else why_unreadable(payload):
            raise UsageError(f"{place}: its payload {why}")
        payload = TensorPayload(payload)
    elif not callable(getattr(payload, "numpy", None)):
        given = describe_argument(payload)
        raise UsageError(f"{place}: its payload is {given}; expected a torch tensor or a numpy array")
    array = payload.numpy()
    if (array.shape, array.dtype.name) != (spec.shape, spec.dtype):
        found = f"{array.dtype.name}{list(array.shape)}"
        raise UsageError(f"{place} is {spec.dtype}{list(spec.shape)}, and its payload {found}")
    return payload
