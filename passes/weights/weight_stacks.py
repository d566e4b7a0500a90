"""Collapse stacks of unread weights into one weight for the time of a run, and expand them again.

A checkpoint may hold a stack in pieces, such as experts one by one, which the model joins by a Concat. Native tools
search all initializers for each lookup: 70,000 of them take hours. So such a Concat becomes one unread initializer
without data, and is restored after the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from passes.graph.index import copy_of, replace_entries
from passes.graph.op_facts import attribute_of
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import Weight, derived_digest, initializer_of, key_of


@dataclass(frozen=True, slots=True)
class Stack:
    """The Concat that makes a stack of `pieces`, which are initializers or stacks themselves, and its dims."""

    node: NodeProto
    pieces: tuple[TensorProto, ...]
    dims: tuple[int, ...]


Stacks = Mapping[str, Stack]
"""The stacks, by the digest of the weight that replaces each."""


def collapse(model: DetachedModel) -> tuple[DetachedModel, Stacks]:
    """`model` with one unread weight in place of each Concat of unread weights that no other node reads.

    Returns `model` itself if no such Concat exists.
    """
    graph, index = model.proto.graph, model.index
    stored = dict(index.initializers)
    unread = {name for name, tensor in stored.items() if model.is_unread(tensor)}
    stacks: dict[str, Stack] = {}
    weights, gone = dict(model.weights), set[str]()
    for node in graph.node:
        is_read_once = all(index.reads[name] == 1 for name in node.input)
        if node.op_type != "Concat" or not unread.issuperset(node.input) or not is_read_once:
            continue
        pieces = [stored[name] for name in node.input]
        weight = _stand_in(DetachedModel(model.proto, weights), node, pieces)
        tensor, key = initializer_of(node.output[0], weight)
        if key is None:
            continue
        weights[key] = weight
        stacks[weight.digest] = Stack(node, tuple(pieces), weight.dims)
        stored[tensor.name] = tensor
        unread.add(tensor.name)
        gone.update(node.input)
    if not stacks:
        return model, {}
    made = {stack.node.output[0] for stack in stacks.values()}
    left = [tensor for name, tensor in stored.items() if name not in gone]
    keys = {key_of(tensor) for tensor in left}
    # Without the pieces, of which there may be 70,000: every step goes through all weights.
    weights = {key: weight for key, weight in weights.items() if key in keys or weight.digest in stacks}
    proto = model.copy_proto()
    replace_entries(proto.graph.initializer, left)
    replace_entries(proto.graph.node, [node for node in graph.node if made.isdisjoint(node.output)])
    return DetachedModel(proto, weights), stacks


def _stand_in(model: DetachedModel, node: NodeProto, pieces: Sequence[TensorProto]) -> Weight:
    """A weight with the stack's dims; its data has no bytes of its own, so `inline` fails."""
    axis = attribute_of(node, "axis") % len(pieces[0].dims)
    dims = list(pieces[0].dims)
    dims[axis] = sum(piece.dims[axis] for piece in pieces)
    digest = derived_digest(" ".join(map(model.digest, pieces)), "Concat", (axis, *dims))
    itemsize = helper.tensor_dtype_to_np_dtype(pieces[0].data_type).itemsize
    data = np.broadcast_to(np.zeros(1, np.uint8), (math.prod(dims) * itemsize,))
    return Weight(tuple(dims), pieces[0].data_type, data, digest, unread=True)


def expand(after: DetachedModel, stacks: Stacks, before: DetachedModel) -> DetachedModel:
    """`after` with every stack as it was in `before`: pieces and a Concat; `after` itself if it has no stacks."""
    if not stacks:
        return after
    model = DetachedModel(after.proto, {**after.weights, **before.weights})
    proto = model.copy_proto()
    nodes: list[NodeProto] = []
    held: list[TensorProto] = []
    for tensor in model.proto.graph.initializer:
        stack = stacks.get(model.digest(tensor)) if model.is_unread(tensor) else None
        if stack is None:
            held.append(tensor)
        else:
            _restore_stack(tensor.name, tuple(tensor.dims), stack, model, stacks, nodes, held)
    replace_entries(proto.graph.initializer, {tensor.name: tensor for tensor in held}.values())
    replace_entries(proto.graph.node, [*nodes, *model.proto.graph.node])
    return model.with_proto(proto)


def _restore_stack(
    name: str,
    dims: tuple[int, ...],
    stack: Stack,
    model: DetachedModel,
    stacks: Stacks,
    nodes: list[NodeProto],
    held: list[TensorProto],
) -> None:
    """Add the nodes and pieces that compute the value `name`; a pass may have reshaped it to `dims`."""
    for piece in stack.pieces:
        inner = stacks.get(model.digest(piece))
        if inner is None:
            held.append(piece)
        else:
            _restore_stack(piece.name, tuple(piece.dims), inner, model, stacks, nodes, held)
    node = copy_of(stack.node)
    node.output[0] = name if dims == stack.dims else f"{name}.stack"
    nodes.append(node)
    if dims != stack.dims:
        held.append(numpy_helper.from_array(np.array(dims, np.int64), f"{name}.dims"))
        nodes.append(helper.make_node("Reshape", [node.output[0], f"{name}.dims"], [name]))
