"""Read the numbers of small constants."""

from __future__ import annotations

from pipeline.ir.graph import Graph, InputRef, Op, Role
from pipeline.lowering.fusion.rewrite import Rewrite


def constant_number(graph: Graph, vid: int) -> float | int | None:
    """The number of a constant with one element."""
    value = graph.values[vid]
    if value.role is not Role.CONST or vid not in graph.payloads or vid in graph.updates or value.spec.numel != 1:
        return None
    return graph.payloads[vid].numpy().reshape(-1)[0].item()


def take_constant_places(graph: Graph) -> Graph:
    """`select`: an index at one constant place becomes a select, which is a view."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        place = _place(graph, op)
        if place is not None:
            axis, index = place
            rewrite.replace(op, "aten.select.int", op.inputs[:1], op.outputs, {"dim": axis, "index": index})
    return rewrite.build()


def _place(graph: Graph, op: Op) -> tuple[int, int] | None:
    if op.kind != "aten.index.Tensor" or len(op.inputs) != 2 or graph.values[op.inputs[1]].spec.rank:
        return None
    index, spec = constant_number(graph, op.inputs[1]), graph.values[op.inputs[0]].spec
    indices = op.attrs["indices"]
    if type(index) is not int or not isinstance(indices, tuple) or not spec.is_static:
        return None
    axis = indices.index(InputRef(1))
    size = spec.sizes[axis]
    return (axis, index % size) if -size <= index < size else None
