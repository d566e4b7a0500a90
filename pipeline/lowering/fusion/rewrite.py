"""`Rewrite`: replace ops of a graph by ops that make the same values, and drop ops whose results nothing reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.ir.builder import GraphFacts, ValueDecl, assemble, declarations
from pipeline.ir.graph import Attr, Graph, Op, Plain, Role, TensorSpec, devices_of
from pipeline.ops.aten import call_attrs, is_call


def producer(graph: Graph, vid: int) -> Op | None:
    """The op that makes `vid`, if any."""
    oid = graph.values[vid].producer
    return None if oid is None else graph.ops[oid]


def only_user(graph: Graph, vid: int) -> Op | None:
    """The op that is the only user of `vid`; None for a graph output, and for a value with several uses."""
    users = graph.values[vid].users
    if len(users) != 1 or vid in graph.outputs or vid in graph.updates.values():
        return None
    op = graph.ops[users[0]]
    return op if op.inputs.count(vid) == 1 else None


def is_constant(graph: Graph, vid: int) -> bool:
    """Whether no run changes `vid`: a weight, a constant, or a view of such a value."""
    value, seen = graph.values[vid], 0
    while value.producer is not None and seen < MOST_VIEWS:
        op = graph.ops[value.producer]
        if op.kind not in MOVES:
            return False
        value, seen = graph.values[op.inputs[0]], seen + 1
    return value.role in (Role.PARAM, Role.CONST) and value.vid not in graph.updates


MOVES = frozenset(
    f"aten.{name}" for name in ("expand.default", "reshape.default", "t.default", "transpose.int", "permute.default")
)
MOST_VIEWS = 4


@dataclass(frozen=True, slots=True)
class NewOp:
    """An op whose `oid` is not known yet."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, Attr]
    constraints: Mapping[str, Plain]


class Rewrite:
    """Collects replacements, then `build()`s the graph. Each op is replaced at most once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._decls = declarations(graph)
        self._device = next(iter(devices_of(graph)), "cpu")
        self._new: dict[int, list[NewOp]] = {}
        self._is_stored_anew = False
        """Whether a value has other strides than before."""

    def __contains__(self, op: Op) -> bool:
        """Whether `op` is replaced."""
        return op.oid in self._new

    def spec(self, vid: int) -> TensorSpec:
        """The spec of a value of the graph, or of a declared value."""
        return self._decls[vid].spec

    def declare(self, name: str, spec: TensorSpec) -> int:
        """Declare a new value, on the device of the graph; the name is made unique. Returns its vid."""
        taken = {decl.name for decl in self._decls}
        while name in taken:
            name += "'"
        self._decls.append(ValueDecl(name, replace(spec, device=self._device), Role.TMP))
        return len(self._decls) - 1

    def store(self, vid: int, strides: Sequence[int]) -> None:
        """Give a value other strides: its place in memory, not its elements."""
        self._is_stored_anew |= self._decls[vid].strides != tuple(strides)
        self._decls[vid] = replace(self._decls[vid], strides=tuple(strides))

    def replace(
        self,
        op: Op,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        attrs: Mapping[str, Attr],
        constraints: Mapping[str, Plain] | None = None,
    ) -> None:
        """Put an op in the place of `op`, after the ops that earlier calls put there.

        The operands of a call of torch are in the order of its signature, unless `attrs` refers to them itself.
        """
        attrs = call_attrs(kind, len(inputs), attrs) if is_call(kind) else attrs
        made = NewOp(kind, tuple(inputs), tuple(outputs), attrs, constraints or {})
        self._new.setdefault(op.oid, []).append(made)

    def build(self) -> Graph:
        """The graph with the replacements; ops whose results only replaced ops read are dropped too."""
        graph = self.graph
        if not self._new and not self._is_stored_anew:
            return graph
        ops: list[Op] = []
        for op in graph.ops:
            ops += [
                Op(
                    0,
                    new.kind,
                    new.inputs,
                    new.outputs,
                    new.attrs,
                    constraints=new.constraints,
                    name=op.name,
                    origin=op.origin,
                    line=op.line,
                )
                for new in self._new.get(op.oid, ())
            ] or [op]
        ops = self._without_unread(ops)
        vids = self._renumber(ops)
        ops = [
            replace(
                op,
                oid=at,
                inputs=tuple(map(vids.__getitem__, op.inputs)),
                outputs=tuple(map(vids.__getitem__, op.outputs)),
            )
            for at, op in enumerate(ops)
        ]
        facts = GraphFacts(
            {vids[vid]: vids[after] for vid, after in graph.updates.items()},
            {vids[vid]: names for vid, names in graph.sources.items()},
            graph.dims,
            graph.guards,
        )
        payloads = {graph.values[vid].name: payload for vid, payload in graph.payloads.items()}
        inputs, outputs = ([vids[vid] for vid in side] for side in (graph.inputs, graph.outputs))
        return assemble(graph.name, [self._decls[vid] for vid in vids], ops, inputs, outputs, payloads, facts=facts)

    def _without_unread(self, ops: list[Op]) -> list[Op]:
        """Drop ops before the replaced ops whose results nothing reads any more; an op that was unread before stays."""
        graph = self.graph
        replaced = [graph.ops[oid] for oid in self._new]
        loose = {vid for op in replaced for vid in op.inputs}
        read = {*graph.outputs, *graph.updates.values()}
        kept: list[Op] = []
        for op in reversed(ops):
            if op.outputs and read.isdisjoint(op.outputs) and any(vid in loose for vid in op.outputs):
                loose.update(op.inputs)
                continue
            read.update(op.inputs)
            kept.append(op)
        return kept[::-1]

    def _renumber(self, ops: Sequence[Op]) -> dict[int, int]:
        """{old vid: new vid} of the values that are left: values of an op, inputs and stored values."""
        made = {vid for op in ops for vid in op.outputs}
        known = len(self.graph.values)
        left = [
            vid
            for vid in range(len(self._decls))
            if vid in made or (vid < known and self.graph.values[vid].producer is None)
        ]
        return {vid: at for at, vid in enumerate(left)}
