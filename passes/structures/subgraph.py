"""The nodes of the exported model that an instance of a structure consists of, for drawings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from onnx import NodeProto

from passes.graph.op_facts import ARRANGING, first_output, op_of
from passes.graph.traversal import walk
from passes.structures.types import Boundary, CoreNode, Instance
from passes.structures.view import GraphView

HOPS: Final = 12
"""The longest path between two nodes of one structure."""

GAP: Final = 4
"""The longest path between two nodes whose inner nodes belong to the structure too."""


def subgraph_of(instance: Instance, view: GraphView) -> list[NodeProto]:
    """The data nodes of `instance`, in graph order; nodes that compute constants are left out.

    With a core they are its nodes, with a boundary those inside. Otherwise they are the nodes at the pins, down to the
    node where the paths from the pins meet: for Q, K and V the attention.
    """
    if instance.boundary is not None:
        return _sort(_inside(instance.boundary, view), view)
    seeds = [view.producers[name] for name in instance.values if name in view.producers]
    if instance.core is not None:
        seeds += _core(instance.core.last, view.producers.get(instance.core.value), view)
        return nodes_between(seeds, view)
    starts = [view.producers[site.tight.name] for site in instance.pins if site.tight.name in view.producers]
    return nodes_between([*seeds, *_meeting(starts, view)], view, HOPS)


def is_data(node: NodeProto, view: GraphView) -> bool:
    """Whether `node` computes with data, not only from constants."""
    return not view.folded.issuperset(name for name in node.output if name)


def nodes_between(nodes: Iterable[NodeProto], view: GraphView, hops: int = GAP) -> list[NodeProto]:
    """`nodes`, and the data nodes on paths of at most `hops` nodes from one of them to another, in graph order."""
    chosen = {first_output(node): node for node in nodes if is_data(node, view)}
    downstream = _reach(chosen.values(), lambda node: _consumers(node, view), hops)
    upstream = _reach(chosen.values(), lambda node: _producers(node, view), hops)
    linked = {key: node for key, node in downstream.items() if key in upstream and is_data(node, view)}
    return _sort((chosen | linked).values(), view)


def _sort(nodes: Iterable[NodeProto], view: GraphView) -> list[NodeProto]:
    positions = {view.positions[name] for node in nodes if (name := first_output(node))}
    return [view.nodes[position] for position in sorted(positions)]


def _inside(boundary: Boundary, view: GraphView) -> Iterator[NodeProto]:
    """The data nodes that the outputs are computed from, as far back as the inputs."""
    stops = {crossing.value for crossing in boundary.inputs}

    def before(name: str) -> list[str]:
        node = view.producers.get(name)
        return [] if node is None or not is_data(node, view) else [read for read in node.input if read not in stops]

    nodes = map(view.producers.get, walk([crossing.value for crossing in boundary.outputs], before))
    return (node for node in nodes if node is not None and is_data(node, view))


def _core(core: CoreNode, node: NodeProto | None, view: GraphView) -> list[NodeProto]:
    """The nodes of `core`, of which `node` is the last."""
    if node is None:
        return []
    nodes = [node]
    for read in core.reads:
        back = _reach([node], lambda producer: _producers(producer, view), HOPS).values()
        nearest = next(
            (candidate for candidate in back if candidate is not node and op_of(candidate) in read.ops), None
        )
        nodes += _core(read, nearest, view)
    return nodes


def _meeting(starts: list[NodeProto], view: GraphView) -> list[NodeProto]:
    """The first node that depends on all of `starts`, with the layout ops after it; none if it is far away."""
    if len(starts) < 2:
        return []
    reached = [set(_reach([start], lambda node: _consumers(node, view), HOPS)) for start in starts]
    common = set.intersection(*reached)
    nodes = _sort((view.producers[name] for name in common if name), view)[:1]
    while nodes and (reader := _only_reader(nodes[-1], view)) is not None and reader.op_type in ARRANGING:
        nodes.append(reader)
    return nodes


def _reach(
    start: Iterable[NodeProto], step: Callable[[NodeProto], Iterable[NodeProto]], hops: int
) -> dict[str, NodeProto]:
    """The nodes at most `hops` steps from `start`, nearest first."""
    front = {first_output(node): node for node in start}
    seen = dict(front)
    for _ in range(hops):
        front = {
            first_output(new): new for node in front.values() for new in step(node) if first_output(new) not in seen
        }
        seen |= front
    return seen


def _only_reader(node: NodeProto, view: GraphView) -> NodeProto | None:
    consumers = [consumer for consumer in _consumers(node, view) if is_data(consumer, view)]
    return consumers[0] if len(consumers) == 1 else None


def _producers(node: NodeProto, view: GraphView) -> list[NodeProto]:
    return [view.producers[name] for name in node.input if name in view.producers]


def _consumers(node: NodeProto, view: GraphView) -> list[NodeProto]:
    return [consumer for name in node.output for consumer in view.consumers.get(name, [])]
