"""Put a Graph together from its written parts: the producers, users and output roles follow from the ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import DimRange, Graph, Op, Payload, Role, Value
from pipeline.ir.spec import Dim, TensorSpec

__all__ = ["GraphFacts", "ValueDecl", "assemble"]


@dataclass(frozen=True, slots=True)
class ValueDecl:
    """A Value before it is linked; its vid is its place in the list."""

    name: str
    spec: TensorSpec
    role: Role
    strides: tuple[Dim, ...] | None = None


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a Graph says beside its values and ops; see the fields of Graph with these names."""

    updates: Mapping[int, int] = field(default_factory=dict)
    sources: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    dims: Mapping[str, DimRange] = field(default_factory=dict)
    guards: tuple[str, ...] = ()


def assemble(
    name: str,
    stubs: Sequence[ValueDecl],
    ops: Sequence[Op],
    inputs: Sequence[int],
    outputs: Sequence[int],
    payloads: Mapping[str, Payload] | None = None,
    emitters: Mapping[str, Emitter] | None = None,
    facts: GraphFacts | None = None,
) -> Graph:
    """A Graph of `stubs`, linked by `ops`. The role of a stub that an op makes is worked out here.

    `payloads` is by value name and may hold more than the graph needs. With `emitters` every kernel is made anew, and
    an op whose kind none of them knows has no kernel; without, the kernels stay as they are. The caller has made sure
    that every vid exists.
    """
    facts = facts or GraphFacts()
    producers = {vid: op.oid for op in ops for vid in op.outputs}
    users: dict[int, list[int]] = {}
    for op in ops:
        for vid in dict.fromkeys(op.inputs):
            users.setdefault(vid, []).append(op.oid)
    leaving = set(outputs)
    values = []
    for vid, stub in enumerate(stubs):
        role = stub.role
        if vid in producers:
            role = Role.OUTPUT if vid in leaving else Role.TMP
        values.append(
            Value(vid, stub.name, stub.spec, role, producers.get(vid), tuple(users.get(vid, ())), stub.strides)
        )
    if emitters is not None:
        ops = [with_kernel(op, values, emitters) for op in ops]
    given = payloads or {}
    stored = (Role.PARAM, Role.STATE, Role.CONST)
    kept = {value.vid: given[value.name] for value in values if value.role in stored and value.name in given}
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


def with_kernel(op: Op, values: Sequence[Value], emitters: Mapping[str, Emitter]) -> Op:
    emitter = emitters.get(op.kind)
    if emitter is None:
        return replace(op, kernel=None)
    kernel = emitter(op.attrs, [values[vid].spec for vid in op.inputs], [values[vid].spec for vid in op.outputs])
    return replace(op, kernel=kernel)
