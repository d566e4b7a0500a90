"""Plant one change in a model, or give it other names: what a diff has to find, and what it has to look through.

Seeded, so that a miss can be looked at. Everything works on the bare protobuf and knows nothing of how diffs are made.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, numpy_helper

ArrayOf = Callable[[TensorProto], np.ndarray]


@dataclass(frozen=True, slots=True)
class Planted:
    """`where` is the name of the node, or of the initializer; `what` the attribute, or the number of the input."""

    kind: str
    where: str
    what: str
    model: onnx.ModelProto


def plant(kind: str, model: onnx.ModelProto, seed: int, array_of: ArrayOf = numpy_helper.to_array) -> Planted | None:
    """A copy of `model` with one change of `kind`; None where there is nothing to change so.

    `array_of` gives the values of an initializer that lie somewhere else.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found = PLANTS[kind](copy.graph, random.Random(f"{kind}{seed}"), array_of)
    return None if found is None else Planted(kind, *found, copy)


def _attribute(graph: GraphProto, draw: random.Random, _: ArrayOf) -> tuple[str, str] | None:
    """Another number in an attribute of a node that an output depends on."""
    plain = (AttributeProto.INT, AttributeProto.INTS, AttributeProto.FLOAT)
    live = _live(graph)
    places = [(node, one) for node in live for one in node.attribute if one.type in plain]
    if not places:
        return None
    node, attribute = draw.choice(places)
    if attribute.type == AttributeProto.INT:
        attribute.i += draw.choice((-1, 1))
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = attribute.f * 1.5 + 0.25
    elif attribute.ints:
        attribute.ints[draw.randrange(len(attribute.ints))] += 1
    else:
        attribute.ints.append(1)
    return _called(node), attribute.name


def _weight(graph: GraphProto, draw: random.Random, array_of: ArrayOf) -> tuple[str, str] | None:
    """Another value of one element of an initializer."""
    read = {name for node in _live(graph) for name in node.input}
    places = [tensor for tensor in graph.initializer if tensor.name in read and tensor.data_type in NUMBERS]
    places = [tensor for tensor in places if 0 not in tensor.dims]
    if not places:
        return None
    tensor = draw.choice(places)
    array = array_of(tensor).copy()
    place = draw.randrange(array.size)
    was = array.flat[place]
    array.flat[place] = was + 1 if array.dtype.kind != "f" else was * 1.01 + 1e-3 if np.isfinite(was) else 1
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return tensor.name, ""


def _edge(graph: GraphProto, draw: random.Random, _: ArrayOf) -> tuple[str, str] | None:
    """A node reads another value that was made before it, by another computation."""
    made: list[str] = [info.name for info in graph.input]
    computed = {name: name for name in (*made, *(tensor.name for tensor in graph.initializer))}
    places: list[tuple[NodeProto, int, list[str]]] = []
    live = {_called(node) for node in _live(graph)}
    for node in graph.node:
        for position, name in enumerate(node.input):
            others = [one for one in made if computed[one] != computed.get(name)]
            if name and others and _called(node) in live:
                places.append((node, position, others))
        said = [one.SerializeToString(deterministic=True).hex() for one in node.attribute]
        read = [computed.get(name, name) for name in node.input]
        for place, name in enumerate(node.output):
            computed[name] = hashlib.sha256(f"{node.domain} {node.op_type} {said} {read} {place}".encode()).hexdigest()
        made.extend(name for name in node.output if name)
    if not places:
        return None
    node, position, others = draw.choice(places)
    node.input[position] = draw.choice(others)
    return _called(node), str(position)


def _op(graph: GraphProto, draw: random.Random, _: ArrayOf) -> tuple[str, str] | None:
    """Another operator with as many inputs."""
    places = [node for node in _live(graph) if node.op_type in OTHER_OP and not node.domain]
    if not places:
        return None
    node = draw.choice(places)
    node.op_type = OTHER_OP[node.op_type]
    return _called(node), node.op_type


def _called(node: NodeProto) -> str:
    return node.name or next(name for name in node.output if name)


def _live(graph: GraphProto) -> list[NodeProto]:
    wanted = {info.name for info in graph.output}
    live = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            live.append(node)
            wanted.update(node.input)
    return live


def renamed(model: onnx.ModelProto, seed: int) -> tuple[onnx.ModelProto, Mapping[str, str]]:
    """A copy in which every node, value and initializer but the inputs and outputs has another name, and the names."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph, draw = copy.graph, random.Random(seed)
    fixed = {info.name for info in (*graph.input, *graph.output)}
    names: dict[str, str] = {name: name for name in ("", *fixed)}

    def other(name: str) -> str:
        return names.setdefault(name, f"n{draw.getrandbits(64):016x}")

    _rename(graph, other)
    return copy, names


def _rename(graph: GraphProto, other: Callable[[str], str]) -> None:
    for entry in (*graph.initializer, *graph.input, *graph.output, *graph.value_info):
        entry.name = other(entry.name)
    for node in graph.node:
        node.name = other(node.name) if node.name else ""
        node.input[:] = [other(name) for name in node.input]
        node.output[:] = [other(name) for name in node.output]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename(inner, other)


def reordered(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """A copy whose nodes come in another order that ONNX allows, and whose initializers come in any."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph, draw = copy.graph, random.Random(seed)
    made_by = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    needs = [{made_by[name] for name in _reads(node) if name in made_by} for node in graph.node]
    readers: list[list[int]] = [[] for _ in graph.node]
    for place, before in enumerate(needs):
        for one in before:
            readers[one].append(place)
    waits = [len(before) for before in needs]
    ready, order = [place for place, count in enumerate(waits) if not count], []
    while ready:
        place = ready.pop(draw.randrange(len(ready)))
        order.append(graph.node[place])
        for reader in readers[place]:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    stored = list(graph.initializer)
    draw.shuffle(stored)
    other = onnx.ModelProto()
    other.CopyFrom(copy)
    del other.graph.node[:], other.graph.initializer[:]
    other.graph.node.extend(order)
    other.graph.initializer.extend(stored)
    return other


def _reads(node: NodeProto) -> list[str]:
    names = list(node.input)
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            names.extend(name for inner in graph.node for name in _reads(inner))
            names.extend(info.name for info in graph.output)
    return names


Plant = Callable[[GraphProto, random.Random, ArrayOf], tuple[str, str] | None]

PLANTS: Final[Mapping[str, Plant]] = {"attribute": _attribute, "weight": _weight, "edge": _edge, "op": _op}

NUMBERS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64})

OTHER_OP: Final[Mapping[str, str]] = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Div",
    "Div": "Mul",
    "Relu": "Tanh",
    "Tanh": "Relu",
    "Erf": "Tanh",
    "Sqrt": "Exp",
    "Exp": "Sqrt",
    "Neg": "Abs",
    "Sigmoid": "Tanh",
    "Softmax": "LogSoftmax",
    "Gelu": "Relu",
    "ReduceMean": "ReduceSum",
    "Equal": "Greater",
    "Max": "Min",
    "MaxPool": "LpPool",
}
"""Operator → one that takes its place."""
