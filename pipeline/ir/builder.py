"""Make a Graph: `Builder` adds values and ops in order, `assemble` links a finished list of them.

Both derive producers, users and the roles of computed values from the ops. A Builder refuses what cannot become a part
of a Graph where it is added, and is as before then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

import numpy as np

from passes.suggest import describe_argument, plural
from pipeline.errors import OnnxlineError, UsageError
from pipeline.ir.graph import (
    SCALARS,
    ArrayPayload,
    Attr,
    BodyRef,
    Dim,
    DimRange,
    Graph,
    InputRef,
    KernelSpec,
    Op,
    Payload,
    Plain,
    Role,
    TensorSpec,
    Value,
    parts,
)

Emitter = Callable[[Mapping[str, Attr], Sequence[TensorSpec], Sequence[TensorSpec]], KernelSpec]
"""(attrs, input specs, output specs) -> the fixed part of the kernel call (seed document 004, "emitter-first")."""

FindEmitter = Callable[[str], Emitter | None]
"""Kind of an op → its emitter; None for an unknown kind."""


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

    mistake: ClassVar[type[OnnxlineError]] = UsageError
    """What a wrong call raises; a subclass that only our own code calls raises InternalError."""

    def __init__(self, name: str, emitter_of: FindEmitter | None = None) -> None:
        if type(name) is not str:
            raise self.mistake(f"the name of a graph is {describe_argument(name)}; expected a text")
        self.name = name
        self._emitter_of = emitter_of
        self._values: list[ValueDecl] = []
        self._taken: set[str] = set()
        self._ops: list[Op] = []
        self._inputs: list[int] = []
        self._made: set[int] = set()
        """Vids of the results of ops."""
        self._payloads: dict[str, Payload] = {}
        self._updates: dict[int, int] = {}

    def input(self, name: str, spec: TensorSpec) -> int:
        """Declare the next graph input; the order of calls is the order of the signature. Returns its vid."""
        vid = self._add(name, spec, Role.INPUT)
        self._inputs.append(vid)
        return vid

    def param(self, name: str, spec: TensorSpec, payload: Payload | np.ndarray | None = None) -> int:
        """Declare a trainable weight. Returns its vid."""
        return self._add_stored(name, spec, Role.PARAM, payload)

    def state(self, name: str, spec: TensorSpec, payload: Payload | np.ndarray | None = None) -> int:
        """Declare a value that lives across runs (optimizer moments, running statistics). Returns its vid."""
        return self._add_stored(name, spec, Role.STATE, payload)

    def const(self, name: str, spec: TensorSpec, payload: Payload | np.ndarray | None = None) -> int:
        """Declare a constant. Returns its vid."""
        return self._add_stored(name, spec, Role.CONST, payload)

    def value(self, name: str, spec: TensorSpec) -> int:
        """Declare a value that a later `emit` makes. Returns its vid."""
        return self._add(name, spec, Role.TMP)

    def update(self, vid: int, after: int) -> None:
        """Let the param, state or input `vid` be the value `after` when a run has ended.

        Raises:
            UsageError: (or `mistake`) vids that no earlier call returned, a `vid` of another role, or values of two
                shapes or dtypes.
        """
        place = f"update({vid!r}, {after!r})"
        target, new = (self._find(place, item) for item in (vid, after))
        if target.role not in (Role.PARAM, Role.STATE, Role.INPUT):
            self._refuse(f"{place}: {target.name!r} has the role {target.role}; expected a param, a state or an input")
        if target.spec != new.spec:
            self._refuse(
                f"{place}: {target.name!r} is {target.spec}, and {new.name!r} is {new.spec}; expected one spec"
            )
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

        Args:
            outputs: (name, spec) of each value that the op makes, or the vid of one that `value` declared.
            constraints, hints, saved, name, node_type, origin: the fields of Op with these names.

        Raises:
            UsageError: (or `mistake`) what cannot become an op: vids that no earlier call returned, values that are
                made already, names that are taken, attributes of a type that the IR has not.
        """
        place = f"op {kind} {name!r}" if name else f"op {kind}"
        for what, text in (("kind", kind), ("name", name), ("node_type", node_type), ("origin", origin)):
            if type(text) is not str:
                self._refuse(f"{place}: its {what} is {describe_argument(text)}; expected a text")
        ins = [self._find_made(f"{place}: inputs", vid).spec for vid in self._as_list(f"{place}: inputs", inputs)]
        outs = self._read_outputs(place, self._as_list(f"{place}: outputs", outputs))
        self._check_table(f"{place}: attrs", attrs, SCALARS)
        self._check_table(f"{place}: constraints", constraints, SCALARS[:4])
        self._check_table(f"{place}: hints", hints, SCALARS[:4])
        places = range(len(ins) + len(outs))
        if wrong := [at for at in self._as_list(f"{place}: saved", saved) if type(at) is not int or at not in places]:
            self._refuse(f"{place}: it saves the place {wrong[0]!r}; it has {len(places)} inputs and outputs")
        call = self.complete_arguments(kind, len(ins), attrs or {})
        self._check_references(place, call, len(ins))
        kernel = self.make_kernel(kind, name, call, ins, [decl.spec for _, decl in outs])
        begin = len(self._values)
        new = [decl for vid, decl in outs if vid is None]
        places_of_new = iter(range(begin, begin + len(new)))
        created = tuple(next(places_of_new) if vid is None else vid for vid, _ in outs)
        op = Op(
            len(self._ops),
            kind,
            tuple(inputs),
            created,
            call,
            kernel,
            constraints or {},
            hints or {},
            tuple(saved),
            name,
            node_type,
            origin,
        )
        if wrong := self.find_wrong_constraints(op):
            self._refuse(f"{place}: {wrong}")
        for decl in new:
            self._add(decl.name, decl.spec, Role.TMP)
        self._made.update(created)
        self._ops.append(op)
        return created

    def find_wrong_constraints(self, op: Op) -> str:
        """What is wrong with the constraints of `op`; a builder that knows the table of operators sees to it."""
        del op
        return ""

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
        """The attributes of an op with `operands` operands; a builder that knows the table of operators adds some."""
        return dict(given)

    def spec(self, vid: int) -> TensorSpec:
        """The spec of a value.

        Raises:
            UsageError: (or `mistake`) a vid that no earlier call returned.
        """
        return self._find("spec", vid).spec

    def build(self, outputs: Sequence[int]) -> Graph:
        """Freeze what was added. A computed value that leaves the graph gets the role `output`.

        Raises:
            UsageError: (or `mistake`) outputs that no earlier call returned, or a value that was declared and that
                no op makes.
        """
        place = f"graph {self.name!r}: outputs"
        for vid in self._as_list(place, outputs):
            self._find(place, vid)
        unmade = [decl.name for vid, decl in enumerate(self._values) if decl.role is Role.TMP and vid not in self._made]
        if unmade:
            names = ", ".join(map(repr, unmade))
            self._refuse(f"graph {self.name!r}: no op makes {names}; emit an op with the vid among its outputs")
        return assemble(self.name, self._values, self._ops, self._inputs, outputs, self._payloads, self.facts())

    def facts(self) -> GraphFacts:
        """What the graph holds in addition to values and ops."""
        return GraphFacts(updates=dict(self._updates))

    def _add_stored(self, name: str, spec: TensorSpec, role: Role, payload: Payload | np.ndarray | None) -> int:
        vid = self._add(name, spec, role)
        if payload is not None:
            self._payloads[name] = ArrayPayload(payload) if isinstance(payload, np.ndarray) else payload
        return vid

    def _add(self, name: str, spec: TensorSpec, role: Role) -> int:
        self._check_decl("value" if role is Role.TMP else str(role), name, spec)
        self._taken.add(name)
        self._values.append(ValueDecl(name, spec, role))
        return len(self._values) - 1

    def _check_decl(self, place: str, name: object, spec: object) -> None:
        if type(name) is not str or not name:
            self._refuse(f"{place}: found {describe_argument(name)} as the name of a value; expected a text")
        if name in self._taken:
            self._refuse(f"{place}: two values are called {name!r}; names are unique")
        if not isinstance(spec, TensorSpec):
            self._refuse(f"{place}: {name!r} has {describe_argument(spec)}; expected a TensorSpec")

    def _find(self, place: str, vid: object) -> ValueDecl:
        if type(vid) is not int:
            self._refuse(f"{place}: found {describe_argument(vid)}; expected a vid, as input and emit return")
        if not 0 <= vid < len(self._values):
            self._refuse(f"{place}: found the vid {vid}, but the graph has {plural(len(self._values), 'value')}")
        return self._values[vid]

    def _find_made(self, place: str, vid: object) -> ValueDecl:
        """The value `vid`, which an op may read."""
        decl = self._find(place, vid)
        if decl.role is Role.TMP and vid not in self._made:
            self._refuse(f"{place}: {decl.name!r} is declared, and no op makes it before this one")
        return decl

    def _as_list(self, place: str, items: object) -> Sequence[object]:
        if not isinstance(items, list | tuple):
            self._refuse(f"{place}: found {describe_argument(items)}; expected a list or a tuple")
        return items

    def _read_outputs(self, place: str, outputs: Sequence[object]) -> list[tuple[int | None, ValueDecl]]:
        """The vid of each output that `value` declared, else None, and what the output is."""
        read: list[tuple[int | None, ValueDecl]] = []
        for output in outputs:
            match output:
                case (name, spec):
                    self._check_decl(f"{place}: outputs", name, spec)
                    read.append((None, ValueDecl(name, spec, Role.TMP)))
                case int():
                    decl = self._find(f"{place}: outputs", output)
                    if decl.role is not Role.TMP:
                        self._refuse(
                            f"{place}: it makes {decl.name!r}, which has the role {decl.role}; expected a new value"
                        )
                    if output in self._made:
                        self._refuse(f"{place}: it makes {decl.name!r}, which an earlier op makes")
                    read.append((output, decl))
                case _:
                    self._refuse(f"{place}: outputs: found {describe_argument(output)}; expected (name, spec) or a vid")
        names = [decl.name for _, decl in read]
        if twice := [name for name in names if names.count(name) > 1]:
            self._refuse(f"{place}: two of its outputs are {twice[0]!r}")
        return read

    def _check_table(self, place: str, table: object, allowed: tuple[type, ...]) -> None:
        if table is None:
            return
        if not isinstance(table, Mapping):
            self._refuse(f"{place}: found {describe_argument(table)}; expected a dict")
        for key, item in table.items():
            if type(key) is not str:
                self._refuse(f"{place}: found the name {key!r}; expected texts")
            if wrong := [part for part in parts(item) if type(part) not in allowed]:
                names = ", ".join(kind.__name__ for kind in allowed)
                self._refuse(
                    f"{place}: {key!r} has {describe_argument(wrong[0])}; expected {names}, or tuples of these"
                )

    def _check_references(self, place: str, call: Mapping[str, Attr], operands: int) -> None:
        """An op that says where its operands go says so of each, once and in order; no op of a Builder has bodies."""
        items = [part for item in call.values() for part in parts(item)]
        if any(isinstance(item, BodyRef) for item in items):
            self._refuse(f"{place}: its attributes have a BodyRef; a Builder gives no op a body")
        places = [item.index for item in items if isinstance(item, InputRef)]
        if places and places != list(range(operands)):
            self._refuse(f"{place}: it has {plural(operands, 'operand')}, and its attributes use the places {places}")

    def _refuse(self, said: str) -> NoReturn:
        raise self.mistake(said)


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


def declarations(graph: Graph) -> list[ValueDecl]:
    """The values of `graph`, by vid, as a further graph may declare them."""
    return [ValueDecl(value.name, value.spec, value.role, value.strides) for value in graph.values]


def rebuild(
    graph: Graph, decls: Sequence[ValueDecl], ops: Sequence[Op], payloads: Mapping[str, Payload] | None = None
) -> Graph:
    """`graph` with these values and ops; its inputs, outputs and facts keep their vids.

    `payloads` are by value name, in addition to those of `graph`.
    """
    known = {graph.values[vid].name: payload for vid, payload in graph.payloads.items()} | dict(payloads or {})
    facts = GraphFacts(graph.updates, graph.sources, graph.dims, graph.guards)
    return assemble(graph.name, decls, ops, graph.inputs, graph.outputs, known, facts)
