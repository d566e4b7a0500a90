"""Which ops of the shortened graph are the first unit, the second, and what stands around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.importers.from_torch.stamp.run import Run
from pipeline.importers.from_torch.stamp.unsuited import Unsuited
from pipeline.ir import Graph, Op

__all__ = ["Blocks", "blocks_of"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """`second` are the oids of the unit that is repeated, those between both units too."""

    second: range
    heirs: Mapping[int, int]
    """{vid that the first unit makes: vid that the second makes in its place}"""


def blocks_of(run: Run, graph: Graph) -> Blocks:
    """
    Raises:
        Unsuited: the ops of both units are mixed, or are not the same.
    """
    if any(body.payloads for op in graph.ops for body in op.bodies):
        raise Unsuited("a region of autocast, of a mode of gradients or of cond holds a constant of its own")
    units = {op.oid: unit for op in graph.ops if (unit := _unit_of(run, op)) is not None}
    first, second = ([oid for oid, unit in units.items() if unit == wanted] for wanted in (0, 1))
    if not first or not second:
        raise Unsuited("torch does not say which ops belong to which layer")
    if first[-1] > second[0]:
        raise Unsuited("torch lists the ops of two layers mixed")
    block = range(first[-1] + 1, second[-1] + 1)
    if run.led and len(block) > block.start:
        raise Unsuited("torch lists the ops of two layers mixed")
    own = graph.ops[first[-1] + 1 - len(block) if run.led else first[0] : first[-1] + 1]
    return Blocks(block, _heirs(graph, own, graph.ops[block.stop - len(own) : block.stop]))


def _unit_of(run: Run, op: Op) -> int | None:
    """A region (autocast, a mode of gradients) has no module of its own: it belongs where the ops in it do."""
    place = run.locate(op.origin)
    inner = {_unit_of(run, one) for body in op.bodies for one in body.ops} - {None}
    if len(inner) > 1:
        raise Unsuited("several layers are in one region of autocast or of a mode of gradients")
    return place[0] if place is not None else next(iter(inner), None)


def _heirs(graph: Graph, first: tuple[Op, ...], second: tuple[Op, ...]) -> dict[int, int]:
    heirs: dict[int, int] = {}
    for one, other in zip(first, second, strict=True):
        if _look(graph, one) != _look(graph, other):
            raise Unsuited(f"the first two layers are not traced alike: {one.name!r} and {other.name!r} differ")
        heirs.update(zip(one.outputs, other.outputs, strict=True))
    return heirs


def _look(graph: Graph, op: Op) -> tuple[object, ...]:
    """Without what counts units: the op's name and where it comes from, in its bodies too."""
    made = [graph.values[vid] for vid in op.outputs]
    return op.kind, op.attrs, op.line, [(value.spec, value.strides) for value in made], [*map(_inside, op.bodies)]


def _inside(body: Graph) -> tuple[object, ...]:
    ops = [(*_look(body, op), op.inputs, op.outputs) for op in body.ops]
    return body.name, body.inputs, body.outputs, ops
