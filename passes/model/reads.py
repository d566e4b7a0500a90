"""Who reads what: the values of a node, and the nodes that a graph's outputs depend on."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from math import prod
from typing import Final

from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from passes.model.bodies import bodies_of

__all__ = ["SIZES", "live_nodes", "reads_of"]


def reads_of(node: NodeProto) -> list[str]:
    """Names read by `node` or, for If, Loop and Scan, by what is inside of it; what is made there is not among them."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in bodies_of(attribute):
            names.extend(_from_outside(graph))
    return names


def _from_outside(graph: GraphProto) -> list[str]:
    read = [name for node in graph.node for name in reads_of(node)]
    own = {name for node in graph.node for name in node.output}
    own.update(entry.name for entry in (*graph.input, *graph.initializer))
    return [name for name in (*read, *(output.name for output in graph.output)) if name not in own]


def live_nodes(graph: GraphProto, *, by_numbers: bool = False) -> list[NodeProto]:
    """The nodes that an output depends on, last first. onnxoptimizer's fusions leave the others behind.

    Args:
        by_numbers: leave out those of which no more than the shape counts, or that come to nothing (times zero).
    """
    wanted = {output.name for output in graph.output}
    zeros = _zeros(graph) if by_numbers else set()
    live = []
    for node in reversed(list(graph.node)):  # to ask the graph for each by its place takes longer
        if not wanted.isdisjoint(node.output):
            live.append(node)
            if not (by_numbers and (node.op_type in SIZES or _is_constant(node, zeros))):
                wanted.update(reads_of(node))
    return live


def _is_constant(node: NodeProto, zeros: AbstractSet[str]) -> bool:
    """Whether a node makes the same numbers whatever it reads: zero times, less itself, to the power of zero."""
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type in ("Mul", "And"):
        return not zeros.isdisjoint(node.input)
    if node.op_type in ("Sub", "Xor"):
        return node.input[0] == node.input[1]
    return node.op_type == "Pow" and node.input[1] in zeros


def _zeros(graph: GraphProto) -> set[str]:
    """The constants that are zero, as far as they are small."""
    tensors = [(tensor.name, tensor) for tensor in graph.initializer]
    found = set()
    for node in graph.node:
        if node.op_type in ("Constant", "ConstantOfShape") and node.domain in ("", "ai.onnx"):
            tensors += [(node.output[0], one.t) for one in node.attribute if one.HasField("t")]
            found.update(node.output[0] for one in node.attribute if one.name == "value_float" and one.f == 0)
    for name, tensor in tensors:
        is_known = tensor.data_location != TensorProto.EXTERNAL and tensor.data_type in NUMBERS
        if is_known and prod(tensor.dims) <= SMALL and not numpy_helper.to_array(tensor).any():
            found.add(name)
    return found


SMALL: Final = 16
"""Numbers of a constant that is looked at; larger ones may lie outside of the model."""

NUMBERS: Final = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BOOL})

SIZES: Final = frozenset({"Shape", "Size"})
"""To ask for a size is not to compute with a value."""
