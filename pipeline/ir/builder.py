"""The only way to make a Graph: add values and ops in order; each op's emitter runs as the op is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipeline.errors import InternalError
from pipeline.ir.graph import Attr, Graph, KernelSpec, Op, Payload, Plain, Role, Value
from pipeline.ir.spec import TensorSpec

__all__ = ["Builder", "Emitter"]

Emitter = Callable[[Mapping[str, Attr], Sequence[TensorSpec], Sequence[TensorSpec]], KernelSpec]
"""(attrs, input specs, output specs) -> the fixed part of the kernel call (seed document 004, "emitter-first")."""


class Builder:
    """Collects values and ops, then `build()`s a frozen Graph.

    The emitters are an argument, so that `ir` imports nothing above it. An op whose kind has no emitter is kept with
    `kernel=None`: a graph may be inspected and drawn although it cannot be lowered.
    """

    def __init__(self, name: str, emitters: Mapping[str, Emitter] | None = None) -> None:
        self.name = name
        self._emitters = dict(emitters or {})
        self._values: list[Value] = []
        self._ops: list[Op] = []
        self._inputs: list[int] = []
        self._payloads: dict[int, Payload] = {}

    def input(self, name: str, spec: TensorSpec) -> int:
        """Declare the next graph input; the order of calls is the order of the signature. Returns its vid."""
        vid = self._add(name, spec, Role.INPUT)
        self._inputs.append(vid)
        return vid

    def param(self, name: str, spec: TensorSpec, payload: Payload | None = None) -> int:
        """Declare a trainable weight. Returns its vid."""
        return self._stored(name, spec, Role.PARAM, payload)

    def state(self, name: str, spec: TensorSpec, payload: Payload | None = None) -> int:
        """Declare a value that lives across runs (optimizer moments, running statistics). Returns its vid."""
        return self._stored(name, spec, Role.STATE, payload)

    def const(self, name: str, spec: TensorSpec, payload: Payload | None = None) -> int:
        """Declare a constant. Returns its vid."""
        return self._stored(name, spec, Role.CONST, payload)

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
        """Add one op and the values that it makes. Returns the vids of `outputs`.

        Raises:
            InternalError: an input vid that no earlier call returned.
        """
        unknown = [vid for vid in inputs if not 0 <= vid < len(self._values)]
        if unknown:
            raise InternalError(f"op {kind} {name!r} reads vids {unknown}, but only {len(self._values)} values exist")
        oid = len(self._ops)
        attrs = dict(attrs or {})
        made = tuple(self._add(label, spec, Role.TMP, producer=oid) for label, spec in outputs)
        emitter = self._emitters.get(kind)
        kernel = None
        if emitter is not None:
            kernel = emitter(attrs, [self._values[vid].spec for vid in inputs], [spec for _, spec in outputs])
        self._ops.append(Op(oid, kind, tuple(inputs), made, attrs, kernel, constraints or {}, name, origin))
        for vid in dict.fromkeys(inputs):
            value = self._values[vid]
            self._values[vid] = replace(value, users=(*value.users, oid))
        return made

    def spec(self, vid: int) -> TensorSpec:
        return self._values[vid].spec

    def build(self, outputs: Sequence[int]) -> Graph:
        """Freeze what was added. A computed value that leaves the graph gets the role `output`."""
        values = list(self._values)
        for vid in outputs:
            if values[vid].role is Role.TMP:
                values[vid] = replace(values[vid], role=Role.OUTPUT)
        return Graph(
            self.name, tuple(values), tuple(self._ops), tuple(self._inputs), tuple(outputs), dict(self._payloads)
        )

    def _stored(self, name: str, spec: TensorSpec, role: Role, payload: Payload | None) -> int:
        vid = self._add(name, spec, role)
        if payload is not None:
            self._payloads[vid] = payload
        return vid

    def _add(self, name: str, spec: TensorSpec, role: Role, producer: int | None = None) -> int:
        vid = len(self._values)
        self._values.append(Value(vid, name, spec, role, producer))
        return vid
