"""Put nodes into an order in which every one follows what it reads. ONNX demands it, onnxruntime does not."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict

import onnx

from passes.model.bodies import bodies_of
from passes.model.reads import reads_of

__all__ = ["sort_nodes"]


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Sort the nodes of `graph`, and those of its subgraphs, in place; what is in order keeps its order.

    A circle is left as it is: onnxruntime refuses it by name.
    """
    for inner in (graph for node in graph.node for graph in _subgraphs(node)):
        sort_nodes(inner)
    makers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    needs = [{makers[name] for name in reads_of(node) if name in makers} for node in graph.node]
    if all(max(before, default=-1) < place for place, before in enumerate(needs)):
        return
    order = _order(needs)
    if len(order) < len(needs):
        return
    nodes = [graph.node[place] for place in order]
    moved = onnx.GraphProto(node=nodes)  # a copy, since clearing the field frees the nodes
    del graph.node[:]
    graph.node.extend(moved.node)


def _order(needs: list[set[int]]) -> list[int]:
    """Places such that each follows those that it needs, earliest first; fewer than `needs` if there is a circle."""
    waiting, readers = Counter({place: len(before) for place, before in enumerate(needs)}), defaultdict(list)
    for place, before in enumerate(needs):
        for maker in before:
            readers[maker].append(place)
    ready = [place for place, before in enumerate(needs) if not before]
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for reader in readers[place]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return order


def _subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [graph for attribute in node.attribute for graph in bodies_of(attribute)]
