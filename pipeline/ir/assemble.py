"""Put a Graph together from its written parts: the producers, users and output roles follow from the ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Graph, Op, Payload, Role, Value
from pipeline.ir.spec import TensorSpec

__all__ = ["assemble"]


def assemble(
    name: str,
    stubs: Sequence[tuple[str, TensorSpec, Role]],
    ops: Sequence[Op],
    inputs: Sequence[int],
    outputs: Sequence[int],
    payloads: Mapping[str, Payload] | None = None,
    emitters: Mapping[str, Emitter] | None = None,
) -> Graph:
    """A Graph whose values are `stubs` (name, spec, role; the index is the vid), linked by `ops`.

    `payloads` is by value name and may hold more than the graph needs. With `emitters` every kernel is made anew, and
    an op whose kind none of them knows has no kernel; without, the kernels stay as they are. The caller has made sure
    that every vid exists.
    """
    producers = {vid: op.oid for op in ops for vid in op.outputs}
    users: dict[int, list[int]] = {}
    for op in ops:
        for vid in dict.fromkeys(op.inputs):
            users.setdefault(vid, []).append(op.oid)
    leaving = set(outputs)
    values = []
    for vid, (label, spec, role) in enumerate(stubs):
        if vid in producers:
            role = Role.OUTPUT if vid in leaving else Role.TMP
        values.append(Value(vid, label, spec, role, producers.get(vid), tuple(users.get(vid, ()))))
    if emitters is not None:
        ops = [with_kernel(op, values, emitters) for op in ops]
    given = payloads or {}
    stored = (Role.PARAM, Role.STATE, Role.CONST)
    kept = {value.vid: given[value.name] for value in values if value.role in stored and value.name in given}
    return Graph(name, tuple(values), tuple(ops), tuple(inputs), tuple(outputs), kept)


def with_kernel(op: Op, values: Sequence[Value], emitters: Mapping[str, Emitter]) -> Op:
    emitter = emitters.get(op.kind)
    if emitter is None:
        return replace(op, kernel=None)
    kernel = emitter(op.attrs, [values[vid].spec for vid in op.inputs], [values[vid].spec for vid in op.outputs])
    return replace(op, kernel=kernel)
