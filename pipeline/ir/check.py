"""Check a finished Graph from outside: every fact that it states is derived again and compared.

This module shares no code with `Builder`: it derives order, producers, users and roles from the ops alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from passes.suggest import plural
from pipeline.argument_checks import FLAG, a, expects
from pipeline.errors import InternalError
from pipeline.ir.graph import DTYPE_BITS, SCALARS, BodyRef, Graph, InputRef, Op, Role, Value, parts


@expects(graph=a(Graph, "a Graph"), read_payloads=FLAG)
def check(graph: Graph, *, read_payloads: bool = True) -> None:
    """Check `graph` against every rule of the IR; without `read_payloads` no stored bytes are read.

    Raises:
        InternalError: at least one rule is broken; the message lists every violation.
    """
    broken = violations(graph, read_payloads=read_payloads)
    if not broken:
        return
    lines = "\n".join(f"  - {violation}" for violation in broken)
    raise InternalError(
        f"graph {graph.name!r} breaks {plural(len(broken), 'rule')} of the IR:\n{lines}\n"
        "Expected a graph as Builder makes it; report this, with the model, as a bug of the code that made the graph."
    )


def violations(graph: Graph, *, read_payloads: bool = True) -> list[str]:
    """Everything that is wrong with `graph` and its bodies; empty for a good one."""
    rules = (*RULES, payload_bytes) if read_payloads else RULES
    broken = [violation for rule in rules for violation in rule(graph)]
    for op in graph.ops:
        for body in op.bodies:
            inner = violations(body, read_payloads=read_payloads)
            broken += [f"in {describe_op(op)}, body {body.name!r}: {violation}" for violation in inner]
    return broken


def value_table(graph: Graph) -> Iterator[str]:
    """Vids are dense and equal the index; names are unique and not empty."""
    for index, value in enumerate(graph.values):
        if value.vid != index:
            yield f"values[{index}] {value.name!r} has vid {value.vid}; expected {index}"
        if not value.name:
            yield f"%{index} has an empty name"
    for name, count in Counter(value.name for value in graph.values).items():
        if count > 1:
            yield f"{count} values are called {name!r}; names are unique"


def specs(graph: Graph) -> Iterator[str]:
    """Known dtypes; sizes are non-negative ints or names that are not empty."""
    for value in graph.values:
        if value.spec.dtype not in DTYPE_BITS:
            yield f"{label(value)} has the unknown dtype {value.spec.dtype!r}"
        if not isinstance(value.spec.shape, tuple):
            yield f"{label(value)} has a shape of type {type(value.spec.shape).__name__}; expected a tuple"
        for dim in value.spec.shape:
            if not (dim if isinstance(dim, str) else type(dim) is int and dim >= 0):
                yield f"{label(value)} has the size {dim!r}; expected an int of at least 0, or a name"


def op_order(graph: Graph) -> Iterator[str]:
    """Oids equal the index; every op reads values that exist by then, and makes new ones."""
    made = {value.vid for value in graph.values if value.producer is None}
    for index, op in enumerate(graph.ops):
        if op.oid != index:
            yield f"ops[{index}] {op.kind} has oid {op.oid}; expected {index}"
        if not op.kind:
            yield f"ops[{index}] has an empty kind"
        for vid in op.inputs:
            if not exists(graph, vid):
                yield f"{describe_op(op)} reads %{vid}, which does not exist"
            elif vid not in made:
                yield f"{describe_op(op)} reads {label(graph.values[vid])} before it is made"
        for vid in op.outputs:
            if not exists(graph, vid):
                yield f"{describe_op(op)} makes %{vid}, which does not exist"
            elif vid in made:
                yield f"{describe_op(op)} makes {label(graph.values[vid])}, which exists already"
        made.update(op.outputs)


def links(graph: Graph) -> Iterator[str]:
    """`producer` and `users` agree with the ops."""
    producers = {vid: index for index, op in enumerate(graph.ops) for vid in op.outputs}
    users: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for vid in dict.fromkeys(op.inputs):
            users.setdefault(vid, []).append(index)
    for index, value in enumerate(graph.values):
        if value.producer != producers.get(index):
            yield f"{label(value)} names the producer {value.producer}; its producer is {producers.get(index)}"
        if value.users != tuple(users.get(index, ())):
            yield f"{label(value)} names the users {value.users}; its users are {tuple(users.get(index, ()))}"


def roles(graph: Graph) -> Iterator[str]:
    """A computed value is `output` when it leaves the graph, else `tmp`; every other value is an input or stored."""
    computed = {vid for op in graph.ops for vid in op.outputs}
    for side, vids in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        yield from (f"graph {side} name %{vid}, which does not exist" for vid in vids if not exists(graph, vid))
    yield from (f"%{vid} is {n} times a graph input" for vid, n in Counter(graph.inputs).items() if n > 1)
    for index, value in enumerate(graph.values):
        if index in computed:
            expected = {Role.OUTPUT if index in graph.outputs else Role.TMP}
        elif index in graph.inputs:
            expected = {Role.INPUT}
        else:
            expected = {Role.PARAM, Role.STATE, Role.CONST}
        if value.role not in expected:
            yield f"{label(value)} has the role {value.role}; expected {' or '.join(sorted(expected))}"


def payloads(graph: Graph) -> Iterator[str]:
    """Only stored values have bytes."""
    for vid in graph.payloads:
        if not exists(graph, vid):
            yield f"there is a payload for %{vid}, which does not exist"
            continue
        value = graph.values[vid]
        if value.role not in (Role.PARAM, Role.STATE, Role.CONST):
            yield f"{label(value)} has the role {value.role} and a payload; only param, state and const have one"


def payload_bytes(graph: Graph) -> Iterator[str]:
    """The bytes of stored values fit their specs. This reads them: a file is mapped, a tensor is copied to the CPU."""
    for vid, payload in graph.payloads.items():
        if not exists(graph, vid):
            continue
        value, array = graph.values[vid], payload.numpy()
        if array.shape != value.spec.shape or array.dtype.name != value.spec.dtype:
            yield (
                f"{label(value)} is {value.spec.dtype}{list(value.spec.shape)}, "
                f"its payload {array.dtype.name}{list(array.shape)}"
            )


def attributes(graph: Graph) -> Iterator[str]:
    """Attributes, constraints and hints hold what `Attr` allows, so that every written form can carry them."""
    for op in graph.ops:
        places = len(op.inputs) + len(op.outputs)
        if wrong := [place for place in op.saved if not 0 <= place < places]:
            yield f"{describe_op(op)} saves the place {wrong[0]}; it has {places} inputs and outputs"
        tables = (
            ("attribute", op.attrs, SCALARS),
            ("constraint", op.constraints, SCALARS[:4]),
            ("hint", op.hints, SCALARS[:4]),
        )
        for where, table, allowed in tables:
            for key, item in table.items():
                if not all(type(part) in allowed for part in parts(item)):
                    yield (
                        f"{describe_op(op)} has the {where} {key!r} = {item!r}; expected what pipeline.ir.graph allows"
                    )


def calls(graph: Graph) -> Iterator[str]:
    """An op that holds its whole call refers to each of its inputs and bodies once, in order."""
    for op in graph.ops:
        items = [part for item in op.attrs.values() for part in parts(item)]
        for what, kind, present in (("inputs", InputRef, op.inputs), ("bodies", BodyRef, op.bodies)):
            places = [item.index for item in items if isinstance(item, kind)]
            if (places or kind is BodyRef) and places != list(range(len(present))):
                yield f"{describe_op(op)} has {len(present)} {what}, and its attributes use the places {places}"


def bodies(graph: Graph) -> Iterator[str]:
    """A body has outputs if its op has; where they are the op's results, they are as many, of the same dtypes."""
    for op in graph.ops:
        for at, body in enumerate(op.bodies):
            place = f"the body {body.name!r} of {describe_op(op)}"
            if op.outputs and not body.outputs:
                yield f"{place} has no outputs; expected at least one"
            if op.kind == COND and len(body.inputs) != len(op.inputs) - 1:
                yield f"{place} has {len(body.inputs)} inputs; expected the {len(op.inputs) - 1} operands of the op"
            if body.outputs and at in GIVE_RESULTS.get(op.kind, ()):
                made, wanted = ([*_dtypes(one, vids)] for one, vids in ((body, body.outputs), (graph, op.outputs)))
                if made != wanted:
                    yield f"{place} gives {', '.join(made)}; expected {', '.join(wanted) or 'nothing'}, as the op does"


def _dtypes(graph: Graph, vids: Sequence[int]) -> Iterator[str]:
    return (graph.values[vid].spec.dtype for vid in vids if exists(graph, vid))


COND = "higher_order.cond"

GIVE_RESULTS = {
    COND: (0, 1),
    "higher_order.while_loop": (1,),
    "higher_order.wrap_with_autocast": (0,),
    "higher_order.wrap_with_set_grad_enabled": (0,),
}
"""{kind of op: its bodies whose outputs are the results of the op}."""


def updates(graph: Graph) -> Iterator[str]:
    """The new value of a param, a state or an input has the same spec."""
    for vid, after in graph.updates.items():
        if not (exists(graph, vid) and exists(graph, after)):
            yield f"an update of %{vid} by %{after} names a value that does not exist"
            continue
        target, value = graph.values[vid], graph.values[after]
        if target.role not in (Role.PARAM, Role.STATE, Role.INPUT):
            yield f"{label(target)} has the role {target.role} and an update; only params, states and inputs change"
        if target.spec != value.spec:
            was, becomes = (f"{changed.spec.dtype}{list(changed.spec.shape)}" for changed in (target, value))
            yield f"{label(target)} is {was}, and its update {label(value)} is {becomes}"


def facts(graph: Graph) -> Iterator[str]:
    """Names in checkpoints belong to stored values; ranges of dims are not empty."""
    stored = (Role.PARAM, Role.STATE, Role.CONST)
    for vid in graph.sources:
        if not exists(graph, vid) or graph.values[vid].role not in stored:
            yield f"there are checkpoint names for %{vid}, which is not stored"
    for name, span in graph.dims.items():
        if span.least < 0 or (span.most is not None and span.most < span.least):
            yield f"dim {name!r} has the range {span.least} .. {span.most}"


def exists(graph: Graph, vid: int) -> bool:
    return 0 <= vid < len(graph.values)


def label(value: Value) -> str:
    return f"%{value.vid} {value.name!r}"


def describe_op(op: Op) -> str:
    return f"op {op.oid} {op.kind}" + (f" {op.name!r}" if op.name else "")


RULES = (value_table, specs, op_order, links, roles, payloads, attributes, calls, bodies, updates, facts)
