"""Make a Graph: `Builder` adds values and ops in order, `assemble` links a finished list of them.

Both derive producers, users and the roles of computed values from the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from passes.suggest import plural
from pipeline.errors import InternalError, OnnxlineError
from pipeline.ir.graph import Attr, Dim, DimRange, Graph, KernelSpec, Op, Payload, Plain, Role, TensorSpec, Value

Emitter = Callable[[Mapping[str, Attr], Sequence[TensorSpec], Sequence[TensorSpec]], KernelSpec]
"""(attrs, input specs, output specs) -> the fixed part of the kernel call (seed document 004, "emitter-first")."""

FindEmitter = Callable[[str], Emitter | None]
"""Kind of an op → its emitter; None for a kind that nobody knows."""


@dataclass(frozen=True, slots=True)
class ValueDecl:
    """A Value before its producer and users are known; its vid is its index in the list."""

    name: str
    spec: TensorSpec
    role: Role
    strides: tuple[Dim, ...] | None = None


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The fields of Graph with these names: what it holds in addition to values and ops."""

    updates: Mapping[int, int] = field(default_factory=dict)
    sources: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    dims: Mapping[str, DimRange] = field(default_factory=dict)
    guards: tuple[str, ...] = ()


class Builder:
    """Collects values and ops, then `build()`s a frozen Graph.

    The emitters are an argument, so that `ir` imports nothing above it. An op whose kind has no emitter is kept with
    `kernel=None`: a graph may be inspected and drawn although it cannot be lowered.
    """

    mistake: ClassVar[type[OnnxlineError]] = InternalError
    """What a wrong op raises: a Builder is fed by our own code, a subclass may be fed by a user's."""

    def __init__(self, name: str, emitter_of: FindEmitter | None = None) -> None:
        self.name = name
        self._emitter_of = emitter_of
        self._values: list[ValueDecl] = []
        self._ops: list[Op] = []
        self._inputs: list[int] = []
        self._payloads: dict[str, Payload] = {}
        self._updates: dict[int, int] = {}

    def input(self, name: str, spec: TensorSpec) -> int:
        """Declare the next graph input; the order of calls is the order of the signature. Returns its vid."""
        vid = self._add(name, spec, Role.INPUT)
        self._inputs.append(vid)
        return vid

    def param(self, name: str, spec: TensorSpec, payload: Payload | None = None) -> int:
        """Declare a trainable weight. Returns its vid."""
        return self._add_stored(name, spec, Role.PARAM, payload)

    def state(self, name: str, spec: TensorSpec, payload: Payload | None = None) -> int:
        """Declare a value that lives across runs (optimizer moments, running statistics). Returns its vid."""
        return self._add_stored(name, spec, Role.STATE, payload)

    def const(self, name: str, spec: TensorSpec, payload: Payload | None = None) -> int:
        """Declare a constant. Returns its vid."""
        return self._add_stored(name, spec, Role.CONST, payload)

    def value(self, name: str, spec: TensorSpec) -> int:
        """Declare a value that a later `emit` makes. Returns its vid."""
        return self._add(name, spec, Role.TMP)

    def update(self, vid: int, after: int) -> None:
        """Let the param, state or input `vid` be the value `after` when a run has ended."""
        self._updates[vid] = after

    def emit(
        self,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[tuple[str, TensorSpec] | int],
        attrs: Mapping[str, Attr] | None = None,
        *,
        constraints: Mapping[str, Plain] | None = None,
        hints: Mapping[str, Plain] | None = None,
        saved: Sequence[int] = (),
        name: str = "",
        node_type: str = "",
        origin: str = "",
    ) -> tuple[int, ...]:
        """Add one op. Returns the vids of its outputs.

        outputs: (name, spec) of each value that the op makes, or the vid of one that `value` declared.
        constraints, hints, saved, name, node_type, origin: the fields of Op with these names.

        Raises:
            InternalError: (or `mistake`) an input vid that no earlier call returned.
        """
        unknown = [vid for vid in inputs if not 0 <= vid < len(self._values)]
        if unknown:
            raise self.mistake(
                f"op {kind} {name!r} reads vids {unknown}, but the graph has {plural(len(self._values), 'value')}"
            )
        oid = len(self._ops)
        attrs = self.complete_arguments(kind, len(inputs), attrs or {})
        created = tuple(item if isinstance(item, int) else self._add(*item, Role.TMP) for item in outputs)
        ins, outs = ([self._values[vid].spec for vid in vids] for vids in (inputs, created))
        kernel = self.make_kernel(kind, name, attrs, ins, outs)
        self._ops.append(
            Op(
                oid,
                kind,
                tuple(inputs),
                created,
                attrs,
                kernel,
                constraints or {},
                hints or {},
                tuple(saved),
                name,
                node_type,
                origin,
            )
        )
        return created

    def make_kernel(
        self, kind: str, name: str, attrs: Mapping[str, Attr], ins: Sequence[TensorSpec], outs: Sequence[TensorSpec]
    ) -> KernelSpec | None:
        """The kernel call of an op of `kind` called `name`, on operands and results of these specs.

        Returns None where no emitter knows the kind.
        """
        del name  # for a builder that names the op in its messages
        emitter = self._emitter_of(kind) if self._emitter_of else None
        return None if emitter is None else emitter(attrs, ins, outs)

    def complete_arguments(self, kind: str, operands: int, given: Mapping[str, Attr]) -> dict[str, Attr]:
        """The attributes of an op with so many operands; a builder that knows the table of operators adds some."""
        return dict(given)

    def spec(self, vid: int) -> TensorSpec:
        return self._values[vid].spec

    def build(self, outputs: Sequence[int]) -> Graph:
        """Freeze what was added. A computed value that leaves the graph gets the role `output`."""
        facts = GraphFacts(updates=self._updates)
        return assemble(self.name, self._values, self._ops, self._inputs, outputs, self._payloads, facts)

    def _add_stored(self, name: str, spec: TensorSpec, role: Role, payload: Payload | None) -> int:
        vid = self._add(name, spec, role)
        if payload is not None:
            self._payloads[name] = payload
        return vid

    def _add(self, name: str, spec: TensorSpec, role: Role) -> int:
        self._values.append(ValueDecl(name, spec, role))
        return len(self._values) - 1


def assemble(
    name: str,
    decls: Sequence[ValueDecl],
    ops: Sequence[Op],
    inputs: Sequence[int],
    outputs: Sequence[int],
    payloads: Mapping[str, Payload] | None = None,
    facts: GraphFacts | None = None,
) -> Graph:
    """A Graph of `decls`, linked by `ops`. The role of each computed value is derived from the ops.

    `payloads` is by value name and may hold more than the graph needs. The caller has checked that every vid exists.
    """
    facts = facts or GraphFacts()
    producers = {vid: op.oid for op in ops for vid in op.outputs}
    users: dict[int, list[int]] = {}
    for op in ops:
        for vid in dict.fromkeys(op.inputs):
            users.setdefault(vid, []).append(op.oid)
    leaving = set(outputs)
    values = []
    for vid, decl in enumerate(decls):
        role = decl.role
        if vid in producers:
            role = Role.OUTPUT if vid in leaving else Role.TMP
        values.append(
            Value(vid, decl.name, decl.spec, role, producers.get(vid), tuple(users.get(vid, ())), decl.strides)
        )
    by_name = payloads or {}
    stored = (Role.PARAM, Role.STATE, Role.CONST)
    kept = {value.vid: by_name[value.name] for value in values if value.role in stored and value.name in by_name}
    return Graph(
        name,
        tuple(values),
        tuple(ops),
        tuple(inputs),
        tuple(outputs),
        kept,
        facts.updates,
        facts.sources,
        facts.dims,
        facts.guards,
    )
