"""Compare a plan with its graph: same calls on the same values, same updates, and views that show the right elements.

`check_plan` finds a plan that loses values; a plan may be sound and still compute something else. Here every fact that
the graph fixes is compared. Aliases and offsets, which the planner decides, are left to `check_plan`. Only data of
lowering is used: the ids of kinds, and which operands their kernels may overwrite.

`VIEW_INDEX` defines each kind of view: which element of the operand each element of the view is. The planner composes
strides; here nothing is composed. Elements of the view are picked, the definition says which
element of the operand each one is, and both have to have the same address. Addresses are linear in the index, so a few
positions on every axis suffice (the first, the last, and powers of two, at which split axes of a Reshape carry over).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from passes.suggest import join_first, plural
from pipeline.argument_checks import a, expects
from pipeline.errors import InternalError
from pipeline.ir.graph import Graph, InputRef, Op, Role, TensorSpec, Value, parts
from pipeline.ir.json import digest_graph
from pipeline.lowering import KernelCall
from pipeline.ops import KINDS, Kind, unpack
from pipeline.ops.aten.memory import CHANGED, ORDERS, POINTWISE, WRITTEN_LAST
from pipeline.planning.check.shadow_memory import address_of
from pipeline.planning.plan import ExecutionPlan, FeedEntry, Slot

Index = Sequence[int]
Sizes = Sequence[int]


@dataclass(frozen=True, slots=True)
class ViewElement:
    """One element of an output of a view call."""

    attrs: Mapping[str, Any]
    output: int
    """The index of the output."""
    index: Index
    sizes: Sizes
    """Those of the output."""
    source_sizes: Sizes
    """Those of the operand."""


def shows_its_operand(plan: ExecutionPlan, call: KernelCall, out: int, source: int) -> bool:
    """Whether `out`, an output of `call`, shows the elements of `source` that the definition of its kind says."""
    index_in_source = VIEW_INDEX.get(call.kind_id)
    sizes, source_sizes = plan.slots[out].spec.sizes, plan.slots[source].spec.sizes
    if index_in_source is None:
        return False
    attrs, output = unpack(call.attr_schema, call.attr_blob), call.out_vids.index(out)
    address, source_address = address_of(plan, out), address_of(plan, source)
    try:
        for index in _sample_indices(sizes):
            found = index_in_source(ViewElement(attrs, output, index, sizes, source_sizes))
            if not _is_inside(found, source_sizes) or address(index) != source_address(found):
                return False
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return False  # attributes that mean nothing for these sizes, such as a step of 0, show nothing
    return True


def _is_inside(index: Index, sizes: Sizes) -> bool:
    return len(index) == len(sizes) and all(0 <= at < size for at, size in zip(index, sizes, strict=True))


def _sample_indices(sizes: Sizes) -> Iterator[Index]:
    if 0 in sizes:
        return
    first, last = [0] * len(sizes), [size - 1 for size in sizes]
    yield first
    for axis, size in enumerate(sizes):
        for position in {1 << bit for bit in range(size.bit_length())} | {size - 1}:
            if position < size:
                yield [*first[:axis], position, *first[axis + 1 :]]
                yield [*last[:axis], position, *last[axis + 1 :]]


def identity(view: ViewElement) -> Index:
    return view.index


def reshape(view: ViewElement) -> Index:
    """Reshape keeps the row-major index of each element."""
    if math.prod(view.sizes) != math.prod(view.source_sizes):
        return ()
    count, found = 0, []
    for position, size in zip(view.index, view.sizes, strict=True):
        count = count * size + position
    for size in reversed(view.source_sizes):
        count, position = divmod(count, size)
        found.append(position)
    return found[::-1]


def transpose(view: ViewElement) -> Index:
    return [view.index[view.attrs["perm"].index(axis)] for axis in range(len(view.index))]


def split(view: ViewElement) -> Index:
    axis, before = view.attrs["axis"] % len(view.source_sizes), sum(view.attrs["sizes"][: view.output])
    return [position + before if here == axis else position for here, position in enumerate(view.index)]


def slice_(view: ViewElement) -> Index:
    found = list(view.index)
    bounds = (view.attrs[name] for name in ("axes", "starts", "ends", "steps"))
    for axis, start, end, step in zip(*bounds, strict=True):
        positions = range(view.source_sizes[axis])[start:end:step]
        found[axis] = positions[found[axis]] if found[axis] < len(positions) else -1
    return found


def expand(view: ViewElement) -> Index:
    inner = view.index[len(view.sizes) - len(view.source_sizes) :]
    return [0 if size == 1 else position for position, size in zip(inner, view.source_sizes, strict=True)]


def select(view: ViewElement) -> Index:
    return with_axis(view, view.attrs["index"])


def unbind(view: ViewElement) -> Index:
    return with_axis(view, view.output)


def with_axis(view: ViewElement, position: int) -> Index:
    axis = view.attrs["axis"]
    return [*view.index[:axis], position, *view.index[axis:]]


def diagonal(view: ViewElement) -> Index:
    rest, last, distance = list(view.index[:-1]), view.index[-1], view.attrs["distance"]
    place = {view.attrs["first"]: last - min(distance, 0), view.attrs["second"]: last + max(distance, 0)}
    return [place[axis] if axis in place else rest.pop(0) for axis in range(len(view.source_sizes))]


def unfold(view: ViewElement) -> Index:
    axis, index = view.attrs["axis"], view.index
    return [*index[:axis], index[axis] * view.attrs["step"] + index[-1], *index[axis + 1 : -1]]


VIEW_INDEX: Mapping[int, Callable[[ViewElement], Index]] = {
    Kind.Identity: identity,
    Kind.Reshape: reshape,
    Kind.Transpose: transpose,
    Kind.Split: split,
    Kind.Slice: slice_,
    Kind.Expand: expand,
    Kind.Select: select,
    Kind.Unbind: unbind,
    Kind.Diagonal: diagonal,
    Kind.Unfold: unfold,
    Kind.Contiguous: identity,
}
"""By kind, the index in the operand of each element of a view."""


LISTED = 20


@expects(graph=a(Graph, "a Graph"), plan=a(ExecutionPlan, "an ExecutionPlan"))
def check_against(graph: Graph, plan: ExecutionPlan) -> None:
    """Check that `plan` is one of `graph`, whose ops have kernels (`pipeline.lowering.with_kernels`).

    Raises:
        InternalError: the plan does something else; the message lists the differences.
    """
    found = differences(graph, plan)
    if found:
        listing = join_first(found, LISTED, "\n  and {} more", "\n  ")
        raise InternalError(
            f"the plan of graph {plan.graph_name!r} differs from graph {graph.name!r} in {plural(len(found), 'place')}:"
            f"\n  {listing}\nMake the plan again from this graph."
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
"""Kind of an update → how many scalars it reads after parameters, gradients and moments."""
