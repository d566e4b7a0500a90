"""Hold a plan against its graph: it makes the same calls on the same values, and keeps the same updates.

`check_plan` finds a plan that loses numbers; a plan may be sound and still compute something else. Here every fact that
the graph fixes is compared. What the planner decides, aliases and offsets, is left to `check_plan`. Of lowering only
data is used: the numbers of kinds, and which operands their kernels may overwrite.
"""

from __future__ import annotations

from collections.abc import Iterator

from passes.suggest import plural
from pipeline.argument_checks import a, expects
from pipeline.errors import InternalError
from pipeline.ir.graph import Graph, InputRef, Op, Role, TensorSpec, Value, parts
from pipeline.ir.json import digest_graph
from pipeline.lowering import KernelCall
from pipeline.lowering.traced_order import ORDERS
from pipeline.ops import KINDS
from pipeline.ops.aten.inplace import CHANGED, POINTWISE, WRITTEN_LAST
from pipeline.planning.check.view_semantics import VIEW_INDEX
from pipeline.planning.plan import ExecutionPlan, FeedEntry, Slot

LISTED = 20


@expects(graph=a(Graph, "a Graph"), plan=a(ExecutionPlan, "an ExecutionPlan"))
def check_against(graph: Graph, plan: ExecutionPlan) -> None:
    """Check that `plan` is one of `graph`, whose ops have kernels (`pipeline.lowering.with_kernels`).

    Raises:
        InternalError: the plan does something else; the message lists what.
    """
    found = differences(graph, plan)
    if found:
        more = [f"and {len(found) - LISTED} more"] if len(found) > LISTED else []
        raise InternalError(
            f"the plan of graph {plan.graph_name!r} differs from graph {graph.name!r} in {plural(len(found), 'place')}:"
            "\n  " + "\n  ".join([*found[:LISTED], *more]) + "\nMake the plan again from this graph."
        )


def differences(graph: Graph, plan: ExecutionPlan) -> list[str]:
    """Everything in which the plan differs from the graph; empty for a plan of this graph."""
    if len(plan.slots) != len(graph.values) or len(plan.calls) != len(graph.ops):
        return [
            f"{plural(len(plan.slots), 'slot')} and {plural(len(plan.calls), 'call')} for "
            f"{plural(len(graph.values), 'value')} and {plural(len(graph.ops), 'op')}"
        ]
    found = [*_facts(graph, plan)]
    for at, (value, slot) in enumerate(zip(graph.values, plan.slots, strict=True)):
        if slot != (wanted := _slot_of(at, value)):
            found.append(f"slot {at} is {slot}; expected {wanted}")
    for at, (op, call) in enumerate(zip(graph.ops, plan.calls, strict=True)):
        found += [f"call {at} {wrong}" for wrong in _call(op, call)]
    for at, op in enumerate(graph.ops):
        bodies = plan.bodies.get(at, ())
        if len(bodies) != len(op.bodies):
            found.append(f"call {at} has {len(bodies)} bodies; expected {len(op.bodies)}")
            continue
        for number, (inner, body) in enumerate(zip(op.bodies, bodies, strict=True)):
            found += [f"in body {number} of call {at}: {wrong}" for wrong in differences(inner, body)]
    return found


def _facts(graph: Graph, plan: ExecutionPlan) -> Iterator[str]:
    """Differences of the graph as a whole."""
    digest = digest_graph(graph)
    if plan.graph_digest != digest:
        yield f"the digest of the graph is {digest}; the plan has {plan.graph_digest or 'none'}"
    pairs = (
        ("graph name", graph.name, plan.graph_name),
        ("inputs", tuple(graph.inputs), tuple(plan.inputs)),
        ("outputs", tuple(graph.outputs), tuple(plan.outputs)),
        ("updates", [*graph.updates.items()], [*plan.updates.items()]),
        ("ops of the calls", tuple(range(len(graph.ops))), tuple(plan.order)),
        ("fed inputs", _entries(graph, plan, graph.inputs), plan.feed_signature[: len(graph.inputs)]),
    )
    yield from (f"{what}: found {found}, expected {wanted}" for what, wanted, found in pairs if found != wanted)
    if beyond := plan.bodies.keys() - range(len(graph.ops)):
        yield f"there are bodies of the calls {sorted(beyond)}, which do not exist"
    yield from _fed_weights(graph, plan)


def _fed_weights(graph: Graph, plan: ExecutionPlan) -> Iterator[str]:
    """A weight is fed exactly where the graph has no bytes of it and something reads it; a state is never fed.

    A graph as it is read from a file has no bytes of any weight, so such a graph does not say which ones are fed.
    """
    stored = [value for value in graph.values if value.producer is None and value.role is not Role.INPUT]
    read = {vid for op in graph.ops for vid in op.inputs} | {*graph.outputs, *graph.updates.values()}
    possible = [v.vid for v in stored if v.vid in read and v.vid not in graph.payloads and v.vid not in graph.updates]
    fed = plan.feed_signature[len(graph.inputs) :]
    if graph.payloads and fed != _entries(graph, plan, possible):
        yield f"fed weights: found {[entry.name for entry in fed]}, expected {[graph.values[v].name for v in possible]}"
    names = [entry.name for entry in _entries(graph, plan, possible)]
    if strange := [entry.name for entry in fed if entry.name not in names]:
        yield f"fed weights: {strange} are no weights that are read"


def _entries(graph: Graph, plan: ExecutionPlan, vids: tuple[int, ...] | list[int]) -> tuple[FeedEntry, ...]:
    layouts = {vid: plan.layouts[vid].strides for vid in vids if vid in plan.layouts}
    return tuple(FeedEntry(graph.values[vid].name, graph.values[vid].spec, layouts.get(vid)) for vid in vids)


def _slot_of(vid: int, value: Value) -> Slot:
    """The slot of a value. Only an input or stored value keeps the strides of the trace."""
    strides = None
    if value.producer is None and value.strides is not None and len(value.strides) == value.spec.rank:
        strides = tuple(stride for stride in value.strides if not isinstance(stride, str))
    spec = TensorSpec(value.spec.shape, value.spec.dtype, value.spec.device)
    return Slot(vid, value.name, spec, value.role, strides)


def _call(op: Op, call: KernelCall) -> Iterator[str]:
    if op.kernel is None:
        yield f"is of op {op.operator} {op.name!r}, which has no kernel"
        return
    is_view = call.kind_id in VIEW_INDEX
    pairs = (
        ("kind", op.kernel.kind_id, call.kind_id),
        ("schema", op.kernel.attr_schema, call.attr_schema),
        ("blob", op.kernel.attr_blob, call.attr_blob),
        # A view reads its first operand; torch's view_as has a second one, which only gives the shape.
        ("operands", op.inputs[:1] if is_view else op.inputs, call.in_vids),
        ("results", op.outputs, call.out_vids),
    )
    yield from (f"has the {what} {found!r}; expected {wanted!r}" for what, wanted, found in pairs if found != wanted)
    facts = {**op.constraints, **({"view": 0} if is_view else {})}
    facts.pop("inplace", None)
    if inplace := _overwritable(op):
        facts["inplace"] = inplace
    if overwrites := _operands_replaced_by(op):
        facts["overwrites"] = overwrites
    if dict(call.constraints) != facts:
        yield f"has the constraints {dict(call.constraints)}; expected {facts}"


def _operands_replaced_by(op: Op) -> tuple[int, ...]:
    """For each result of an optimizer's update the operand that it replaces: all but gradients and scalars."""
    count = op.attrs.get("count")
    if op.kind not in UPDATES or not isinstance(count, int):
        return ()
    last = len(op.inputs) - UPDATES[op.kind]
    return tuple(at for at in range(last) if not count <= at < 2 * count)


def _overwritable(op: Op) -> tuple[int, ...]:
    """The operands over which the kernel of `op` may write its first result: fewer where the op asks for fewer."""
    allowed, asked = _overwritable_by_kind(op), op.constraints.get("inplace")
    if asked is None:
        return allowed
    wanted = asked if isinstance(asked, tuple) else (asked,)
    return tuple(at for at in allowed if at in wanted)


def _overwritable_by_kind(op: Op) -> tuple[int, ...]:
    if op.kind in KINDS:
        return tuple(at for at in KINDS[op.kind].inplace if at < len(op.inputs))
    if list(parts(op.attrs.get(ORDERS, ()))):
        return ()  # the result has other strides than an operand of its sizes
    if op.kind in POINTWISE:
        return tuple(range(len(op.inputs)))
    if op.kind in WRITTEN_LAST and op.inputs.count(op.inputs[0]) == 1:
        return (0,)
    operands = [part for item in op.attrs.values() for part in parts(item) if isinstance(part, InputRef)]
    is_base = op.attrs.get("self") == InputRef(0) and operands.count(InputRef(0)) == 1
    return (0,) if op.kind in CHANGED and is_base else ()


UPDATES = {"SGD": 2, "Adam": 3}
"""Kinds of updates, and how many scalars they read behind parameters, gradients and moments."""
