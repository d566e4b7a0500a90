"""Graph → kernel calls: the kernels that the emitters made, and what the planner may do with each call.

Nothing is chosen here (seed document 004, "emitter-first"). `with_kernels` attaches kernels to a graph that was built
without emitters, so that importers need not know them. Ops without a kernel stop `lower` with one message that lists
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from passes.suggest import plural
from pipeline.errors import InternalError, Unsupported
from pipeline.ir.graph import Graph, KernelSpec, Op, Plain, TensorSpec
from pipeline.lowering.memory_order import is_in_memory_order
from pipeline.ops.aten import inplace_of, is_call
from pipeline.ops.aten.memory import AS_STRIDED
from pipeline.ops.aten.views import as_view
from pipeline.ops.kinds import Kind
from pipeline.ops.rows import OpCall
from pipeline.ops.tables import KINDS, emitter_of, wrong_schema

SHOWN = 3
"""How many places an error lists per missing kind."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch: `kind_id(ins, outs, attr_schema, attr_blob)`.

    `constraints` are facts for the planner: `inplace` (inputs whose storage output 0 may take when they die here),
    `overwrites` (for each output the one input whose storage it may take) and `view` (the input of which the outputs
    may be views, see `ViewRule`).
    """

    kind_id: int
    attr_schema: str
    attr_blob: bytes
    in_vids: tuple[int, ...]
    out_vids: tuple[int, ...]
    constraints: Mapping[str, Plain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "constraints", MappingProxyType(dict(self.constraints)))


def with_kernels(graph: Graph) -> Graph:
    """`graph` and its bodies with a kernel for every op whose kind has an emitter; the same graph if none is missing.

    Ops without an emitter stay without a kernel; `lower` lists them.

    Raises:
        Unsupported: an op reads memory, not only elements, and the plan's layout of it is not the traced one.
    """
    ops = tuple(_with_kernel(graph, op) for op in graph.ops)
    return graph if ops == graph.ops else replace(graph, ops=ops)


def _with_kernel(graph: Graph, op: Op) -> Op:
    if op.bodies:
        op = replace(op, bodies=tuple(map(with_kernels, op.bodies)))
    emitter = emitter_of(op.kind)
    if op.kernel is not None or emitter is None:
        return op
    if _reads_storage(graph, op):
        raise Unsupported(_storage_message(graph, op))
    return replace(op, kernel=emitter(op.attrs, *_specs(graph, op)))


def find_wrong_kernel(op: Op, ins: Sequence[TensorSpec], outs: Sequence[TensorSpec]) -> str:
    """Why the kernel call of `op` is not that of its kind, attributes and specs; "" where it is, or is not made yet."""
    if wrong := find_wrong_constraints(op):
        return wrong
    emitter = emitter_of(op.kind)
    if emitter is None or (op.kernel is None and is_call(op.kind)):
        return ""
    try:
        wanted = emitter(op.attrs, ins, outs)
    except InternalError as error:
        return str(error)
    if op.kernel is None or op.kernel == wanted:
        return ""
    if op.kernel.kind_id == wanted.kind_id:
        return f"its kernel call {op.kernel.attr_schema} has other attributes than the op; {MAKE_AGAIN}"
    kinds = Kind.__members__.values()
    found = Kind(op.kernel.kind_id).name if op.kernel.kind_id in kinds else f"the unknown kind_id {op.kernel.kind_id}"
    return f"its kernel call is of {found}, and the op of {Kind(wanted.kind_id).name}; {MAKE_AGAIN}"


MAKE_AGAIN = "give an op that you change `kernel=None`, and its kernel call is made when it is lowered"


def _specs(graph: Graph, op: Op) -> tuple[list[TensorSpec], list[TensorSpec]]:
    return [graph.values[vid].spec for vid in op.inputs], [graph.values[vid].spec for vid in op.outputs]


def _reads_storage(graph: Graph, op: Op) -> bool:
    """Whether `op` is an `as_strided` of a value that was not at the start of its storage, or not contiguous.

    A plan lays such a value out in another way.
    """
    if op.kind != AS_STRIDED:
        return False
    while True:
        value = graph.values[op.inputs[0]]
        if value.strides is not None or value.producer is None:
            return value.strides is not None
        op = graph.ops[value.producer]
        if is_in_memory_order(graph, op):
            return False
        view = as_view(op.kind, op.attrs, *_specs(graph, op))
        if view is None or op.kind in COPIES:
            return False
        if Kind(view.kind_id) in CUTS:
            return True


def _storage_message(graph: Graph, op: Op) -> str:
    source = graph.values[op.inputs[0]]
    lay = "began within another tensor" if source.strides is None else f"had the strides {list(source.strides)}"
    return (
        f"op {op.name!r}, {op.operator}, counts through the memory of {source.name!r}, which {lay} in the trace; "
        "a plan holds elements, and neither gaps nor neighbours: use slices in its place, or run "
        "the graph by the plain reference"
    )


COPIES = frozenset({"aten.clone.default", "aten._to_copy.default", "aten.lift_fresh_copy.default"})
"""Views to a plan, but copies with storage of their own in torch."""

CUTS = frozenset({Kind.Slice, Kind.Select, Kind.Split, Kind.Unbind, Kind.Diagonal, Kind.Unfold})
"""Views that may begin in the middle of a storage."""


def lower(graph: Graph) -> tuple[KernelCall, ...]:
    """One call per op, in the order of the ops.

    Raises:
        Unsupported: ops that no emitter knows; the message lists every kind, how often, and where.
        InternalError: an op asks for an in-place input that its kernel does not allow, or has a kernel of no known
            kind or schema.
    """
    calls = [_call(graph, op, op.kernel) for op in graph.ops if op.kernel is not None]
    if len(calls) != len(graph.ops):
        raise Unsupported(_missing(graph), operators=sorted({op.kind for op in graph.ops if op.kernel is None}))
    return tuple(calls)


def _call(graph: Graph, op: Op, kernel: KernelSpec) -> KernelCall:
    if problem := wrong_schema(kernel.kind_id, kernel.attr_schema):
        raise InternalError(f"op {op.operator} {op.name!r}: {problem}")
    facts: dict[str, Plain] = dict(op.constraints)
    inplace = _inplace(op)
    if inplace:
        facts["inplace"] = inplace
    inputs, row = op.inputs, KINDS[Kind(kernel.kind_id).name]
    if row.overwrites is not None:
        facts["overwrites"] = row.overwrites(OpCall(op.attrs, *_specs(graph, op)))
    if row.view is not None:
        facts["view"] = 0
        inputs = inputs[:1]  # torch's view_as has a second input, which only gives the shape
    return KernelCall(kernel.kind_id, kernel.attr_schema, kernel.attr_blob, inputs, op.outputs, facts)


def _inplace(op: Op) -> tuple[int, ...]:
    """The in-place inputs of `op`: those its kernel allows, or fewer if the op asks (`inplace: ()` for none)."""
    if wrong := find_wrong_constraints(op):
        raise InternalError(f"op {op.operator} {op.name!r}: {wrong}")
    allowed = _allowed_inplace(op)
    asked = _asked_inplace(op, allowed)
    return tuple(index for index in allowed if index in asked and index < len(op.inputs))


def find_wrong_constraints(op: Op) -> str:
    """What is wrong with the constraints of `op`, which say of which inputs the result may take the storage."""
    if unknown := [name for name in op.constraints if name != "inplace"]:
        return f"it has the constraint {unknown[0]!r}; expected inplace alone, the inputs that its result may overwrite"
    allowed = _allowed_inplace(op)
    asked = _asked_inplace(op, allowed)
    beyond = [index for index in asked if index not in allowed]
    return f"it asks for inplace={asked}; its kernel allows {allowed}" if beyond else ""


def _allowed_inplace(op: Op) -> tuple[int, ...]:
    return KINDS[op.kind].inplace if op.kind in KINDS else inplace_of(op)


def _asked_inplace(op: Op, allowed: tuple[int, ...]) -> tuple[Plain, ...]:
    asked = op.constraints.get("inplace", allowed)
    return asked if isinstance(asked, tuple) else (asked,)


def _missing(graph: Graph) -> str:
    by_kind: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.kernel is None:
            by_kind.setdefault(op.kind, []).append(op)
    total = sum(map(len, by_kind.values()))
    have, kinds = "has" if total == 1 else "have", plural(len(by_kind), "kind")
    rows = [
        f"  {len(ops)} {kind}: {_places(graph, ops)}"
        for kind, ops in sorted(by_kind.items(), key=lambda row: (-len(row[1]), row[0]))
    ]
    return "\n".join(
        [
            f"graph {graph.name!r}: {total} of {plural(len(graph.ops), 'op')} {have} no kernel ({kinds}):",
            *rows,
            "Run this model by onnxruntime instead (`runtime: {backends: [onnxruntime]}`), "
            "or add a row for the kind to its family in pipeline/ops and pipeline/runtime/kernels.",
        ]
    )


def _places(graph: Graph, ops: Sequence[Op]) -> str:
    shown = [
        (op.name or f"→ {', '.join(graph.values[vid].name for vid in op.outputs)}")
        + (f" (in {op.origin})" if op.origin else "")
        for op in ops[:SHOWN]
    ]
    more = f", and {len(ops) - SHOWN} more" if len(ops) > SHOWN else ""
    return ", ".join(shown) + more
