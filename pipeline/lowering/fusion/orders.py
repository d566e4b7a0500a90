"""Choose the memory order of results so that their readers need no copy.

The strides of a value say in which order its axes lie in memory; `pipeline.lowering.traced_order` stores it so. What an
operator computes does not depend on it, and neither does what reads the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from pipeline.ir.graph import Graph, InputRef, Op, TensorSpec
from pipeline.lowering.fusion.rewrite import Rewrite, only_user, producer
from pipeline.ops.aten.views import VIEW_KINDS, as_view
from pipeline.ops.attrs import unpack
from pipeline.ops.kinds import Kind
from pipeline.ops.layout import Layout

MOST_AXES = 6


def store_as_copied(graph: Graph) -> Graph:
    """`order`: a result that is only moved and then copied row by row is stored in the order of the copy.

    Then the last copy is a view, and those on the way are left out.
    """
    rewrite = Rewrite(graph)
    chosen: set[int] = set()
    for op in reversed(graph.ops):
        if op in rewrite or not _is_copy(graph, op):
            continue
        way = _way_to(graph, op)
        source = way[0].inputs[0]
        maker = producer(graph, source)
        if maker is None or source in chosen or not _may_choose(graph, maker, source):
            continue
        layout = _find_layout(graph, source, way)
        if layout is None:
            continue
        chosen.add(source)
        rewrite.store(source, layout.strides)
        if any(_is_copy(graph, inner) for inner in way[:-1]):
            for inner in way[:-1]:
                _leave_out_copy(rewrite, inner)
    return rewrite.build()


def _leave_out_copy(rewrite: Rewrite, op: Op) -> None:
    """Replace a copy by its operand, and a view that counts on the copy by one that takes any order."""
    if _is_copy(rewrite.graph, op):
        rewrite.replace(op, "aten.alias.default", op.inputs, op.outputs, {"self": InputRef(0)})
    elif op.kind in ("aten.view.default", "aten._unsafe_view.default"):
        shape = rewrite.graph.values[op.outputs[0]].spec.shape
        rewrite.replace(op, "aten.reshape.default", op.inputs, op.outputs, {"self": InputRef(0), "shape": shape})


def _way_to(graph: Graph, copy: Op) -> tuple[Op, ...]:
    """The views and copies that lead to `copy`, in order, each read by the next alone; `copy` is the last."""
    way = [copy]
    while True:
        before = producer(graph, way[-1].inputs[0])
        if before is None or not _moves(graph, before) or only_user(graph, before.outputs[0]) is not way[-1]:
            return tuple(reversed(way))
        way.append(before)


def _may_choose(graph: Graph, maker: Op, source: int) -> bool:
    """Whether `maker` computes `source`, for one reader, and may write it in any order."""
    return (
        maker.kind.startswith("aten.")
        and maker.kind not in IN_ROWS
        and not _moves(graph, maker)
        and only_user(graph, source) is not None
        and graph.values[source].spec.is_static
        and graph.values[source].spec.rank <= MOST_AXES
    )


def _find_layout(graph: Graph, source: int, way: Sequence[Op]) -> Layout | None:
    """An order of the axes of `source` in memory in which the end of the way is in rows."""
    sizes = graph.values[source].spec.sizes
    for order in permutations(range(len(sizes))):
        stored = Layout.contiguous([sizes[axis] for axis in order])
        layout = stored.permute([order.index(axis) for axis in range(len(sizes))])
        if _is_in_rows_after(graph, layout, way):
            return layout
    return None


def _is_in_rows_after(graph: Graph, layout: Layout, way: Sequence[Op]) -> bool:
    for op in way:
        if _is_copy(graph, op):
            continue
        moved = _move(graph, op, layout)
        if moved is None:
            return False
        layout = moved
    return layout.is_contiguous


def _move(graph: Graph, op: Op, layout: Layout) -> Layout | None:
    """The layout of the result of a view; None where strides cannot say it."""
    ins, outs = _specs(graph, op)
    spec = as_view(op.kind, op.attrs, ins, outs)
    if spec is None:
        return None
    rule = VIEW_KINDS[Kind(spec.kind_id).name].view
    layouts = rule and rule(unpack(spec.attr_schema, spec.attr_blob), layout, outs)
    return layouts[0] if layouts and layouts[0].sizes == outs[0].sizes else None


def _moves(graph: Graph, op: Op) -> bool:
    """Whether `op` only moves the elements of one operand, all of them, to one result."""
    ins, outs = _specs(graph, op)
    whole = len(ins) == len(outs) == 1 and ins[0].is_static and outs[0].is_static and ins[0].numel == outs[0].numel
    return whole and as_view(op.kind, op.attrs, ins, outs) is not None


def _is_copy(graph: Graph, op: Op) -> bool:
    """Whether `op` asks for its operand in rows."""
    if op.kind not in ("aten.clone.default", "aten.contiguous.default"):
        return False
    spec = as_view(op.kind, op.attrs, *_specs(graph, op))
    return spec is not None and spec.kind_id == Kind.Contiguous


def _specs(graph: Graph, op: Op) -> tuple[list[TensorSpec], list[TensorSpec]]:
    return [graph.values[vid].spec for vid in op.inputs], [graph.values[vid].spec for vid in op.outputs]


IN_ROWS = frozenset(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
)
"""Operators that are slower, or copy themselves, where their result is not in rows."""
