"""A copy of a graph that is changed in place: producers and consumers stay right after each change.

`GraphEdit` collects changes to a graph that stays as it is. A chain of small rewrites needs to see what the rewrites
before it have made: it uses a `Rewriter`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

from passes.context import PassContext
from passes.graph.index import (
    computed_values,
    constant_of,
    initializers_of,
    producers_of,
    replace_entries,
    take_name,
    value_names,
)
from passes.graph.op_facts import ONNX_DOMAINS, opset_of
from passes.graph.traversal import bodies_in, live_nodes, read_names, reads_of, sort_nodes
from passes.rewrites.node_writer import Dim, GraphTypes
from passes.step import PassResult
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import DETACH_FROM_BYTES, TYPED_FIELDS, Key, Weight, digest_of, initializer_of, key_of

Array = np.ndarray[Any, np.dtype[Any]]


class Rewriter:
    """The main graph of `model`, to change node by node; bodies of nodes and functions stay as they are.

    A value that is an output of the graph, or that a body reads, is `held`: it keeps its name and stays computed.
    """

    def __init__(self, model: DetachedModel, context: PassContext) -> None:
        self.model = model
        self._types = dict(_types_of(model, context).infos)
        self.proto = model.copy_proto()
        graph = self.proto.graph
        self.opset = opset_of(self.proto)
        self.fed = {info.name for info in graph.input}
        self.stored = initializers_of(graph)
        self.producers: dict[str, NodeProto] = {}
        self.consumers: defaultdict[str, list[NodeProto]] = defaultdict(list)
        self.held = {info.name for info in graph.output}
        self.changes = 0
        self._spare = self.stored.keys() - read_names(graph.node)
        """Stored tensors that nothing read before."""
        self._names = value_names(graph) | {node.name for node in graph.node}
        self._nodes: dict[int, NodeProto] = {}
        self._weights: dict[Key, Weight] = {}
        self._made: dict[tuple[object, ...], str] = {}
        for node in graph.node:
            self._enter(node)
            if bodies_in(node):
                self.held.update(reads_of(node))

    def is_kept(self, name: str) -> bool:
        """Whether a value stays that nodes read as well: a structure that somebody keeps may end there."""
        return name in self.held and bool(self.consumers[name])

    @property
    def nodes(self) -> list[NodeProto]:
        """The nodes, the new nodes last."""
        return list(self._nodes.values())

    def by_op(self, *ops: str, backward: bool = False) -> Iterator[NodeProto]:
        """The nodes of some operators of ONNX's own domain that are still in the graph when they are reached."""
        for node in reversed(self.nodes) if backward else self.nodes:
            if node.op_type in ops and node.domain in ONNX_DOMAINS and id(node) in self._nodes:
                yield node

    def producer(self, name: str, *ops: str) -> NodeProto | None:
        """The node that makes a value, if it is one of `ops` of ONNX's own domain; of any operator without `ops`."""
        node = self.producers.get(name)
        return node if node is not None and (not ops or (node.op_type in ops and node.domain in ONNX_DOMAINS)) else None

    def is_shared(self, name: str) -> bool:
        """Whether more than one input of a node reads a value, or its name has to stay."""
        return name in self.held or sum(list(node.input).count(name) for node in self.consumers[name]) > 1

    def constant(self, name: str) -> Array | None:
        """The elements of a constant that nobody can override; None for other values, and for an unread weight."""
        tensor = self.stored.get(name) if name not in self.fed else None
        if tensor is None and name in self.producers:
            tensor = constant_of(self.producers[name])
        if tensor is None or tensor.data_type == TensorProto.STRING or self.model.is_unread(tensor):
            return None
        weight = self._weight_of(tensor)
        return self.model.array(tensor) if weight is None else weight.array()

    def scalar(self, name: str) -> float | None:
        """The value of a float constant of one element; None for other values."""
        tensor = self.stored.get(name)
        if tensor is not None and any(dim != 1 for dim in tensor.dims):
            return None
        array = self.constant(name)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 and is_float(array) else None

    def ints(self, name: str) -> list[int] | None:
        """The elements of a small constant of integers; None for other values."""
        array = self.constant(name)
        return array.reshape(-1).tolist() if array is not None and array.dtype.kind in "iu" else None

    def shape(self, name: str) -> tuple[Dim, ...] | None:
        """Sizes, names of symbolic sizes, and None for sizes with neither; None if the rank is not known."""
        return self._types.get(name, (0, None))[1]

    def dtype(self, name: str) -> int:
        """The ONNX dtype of a value; 0 if that is not known."""
        return self._types.get(name, (0, None))[0]

    def fixed_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value whose sizes are all known."""
        shape = self.shape(name)
        sizes = tuple(dim for dim in shape or () if isinstance(dim, int))
        return sizes if shape is not None and len(sizes) == len(shape) else None

    def add(
        self,
        op: str,
        inputs: Sequence[str],
        like: NodeProto,
        shape: Sequence[Dim] | None = None,
        *,
        dtype: int = 0,
        output: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node with one output, and return the name of the output.

        Args:
            op: the operator.
            inputs: the values that it reads.
            like: a node that the new node replaces, after which it is named.
            shape: the shape of the output, as far as it is known.
            dtype: that of the output; by default that of the output of `like`.
            output: the name of the output, where it is known; by default a free name.
            **attributes: the attributes of the node, by name.
        """
        names = [output or self.free(f"{like.output[0]}/{op.lower()}")]
        self.add_many(op, inputs, like, names, **attributes)
        self._types[names[0]] = dtype or self.dtype(like.output[0]), None if shape is None else tuple(shape)
        return names[0]

    def add_many(
        self, op: str, inputs: Sequence[str], like: NodeProto, outputs: Sequence[str], **attributes: Any
    ) -> NodeProto:
        """Add a node with these outputs, whose types stay unknown."""
        title = self.free(f"{like.name or like.output[0]}/{op}")
        node = helper.make_node(op, inputs, outputs, name=title, **attributes)
        self._enter(node)
        self.changes += 1
        return node

    def declare(self, name: str, dtype: int, shape: Sequence[Dim]) -> None:
        """Say which type a new value has."""
        self._types[name] = dtype, tuple(shape)

    def add_copy(self, node: NodeProto, inputs: Sequence[str], shape: Sequence[Dim] | None = None) -> str:
        """Add the operator of `node`, which has one output, on other inputs."""
        name = self.add(node.op_type, inputs, node, shape)
        self.producers[name].attribute.extend(node.attribute)
        return name

    def constant_of(self, array: Array, label: str) -> str:
        """The name of a stored tensor of these elements; tensors of equal content that were made here are one."""
        key = array.dtype, array.shape, digest_of(array)
        if key not in self._made:
            self._made[key] = self._store(array, self.free(label))
        return self._made[key]

    def free(self, name: str) -> str:
        return take_name(name, self._names, 2)

    def set_input(self, node: NodeProto, place: int, name: str) -> None:
        """Let `node` read another value."""
        old = node.input[place]
        node.input[place] = name
        if old not in node.input:
            self.consumers[old] = [consumer for consumer in self.consumers[old] if consumer is not node]
        if node not in self.consumers[name]:
            self.consumers[name].append(node)
        self.changes += 1

    def replace(self, old: str, new: str) -> None:
        """Let all consumers of the computed value `old` read `new`, which is equal; `old` goes if it is not held.

        A held `old` keeps its name: the producer of `new` makes it, or an Identity where that is not possible.
        """
        self._reroute(old, new)
        producer = self.producers[old]
        if old not in self.held:
            self.drop_unread(old)
            return
        made, is_held = self.producers.get(new), new in self.held
        self.held.add(new)  # for now: the old producer may be all that reads it
        if any(self.consumers[name] or name in self.held for name in producer.output if name != old):
            self.rename(old, old)  # its other outputs stay
        else:
            self.remove(producer)
        if not is_held:
            self.held.remove(new)
        if made is None or is_held or bodies_in(made):
            self.add("Identity", [new], producer, output=old)
            return
        self._reroute(new, old)
        made.output[list(made.output).index(new)] = old
        self.producers[old] = self.producers.pop(new)

    def rename(self, old: str, new: str) -> None:
        """Give the computed value `old`, which is not held, a name that is free."""
        new = self.free(new)
        producer = self.producers[new] = self.producers.pop(old)
        producer.output[list(producer.output).index(old)] = new
        self._types[new] = self._types.get(old, (0, None))
        self._reroute(old, new)
        self.changes += 1

    def _reroute(self, old: str, new: str) -> None:
        """Let all consumers of `old` read `new`."""
        for node in list(self.consumers[old]):
            for place, name in enumerate(node.input):
                if name == old:
                    self.set_input(node, place, new)

    def remove(self, node: NodeProto) -> None:
        """Take a node out whose outputs nothing reads, with the nodes before it that only it read."""
        pending = [node]
        while pending:  # no recursion: a chain has as many nodes as a model has layers
            gone = pending.pop()
            if gone is not node and id(gone) not in self._nodes:
                continue
            self._nodes.pop(id(gone), None)
            self.changes += 1
            for name in gone.output:
                self.producers.pop(name, None)
            for name in dict.fromkeys(gone.input):
                self.consumers[name] = [consumer for consumer in self.consumers[name] if consumer is not gone]
                before = self.producers.get(name)
                if before is not None and self._is_unread(before):
                    pending.append(before)

    def drop_unread(self, name: str) -> None:
        """Take the node out that makes a value which nothing reads any more."""
        if name in self.producers and self._is_unread(self.producers[name]):
            self.remove(self.producers[name])

    def result(self, why: str | None) -> PassResult:
        """The changed model, without the nodes and tensors that nothing reads any more."""
        if not self.changes:
            return PassResult(self.model, changed=False, why=why)
        graph = self.proto.graph
        replace_entries(graph.node, self._nodes.values())
        sort_nodes(graph)
        live = computed_values(live_nodes(graph)).keys()
        replace_entries(graph.node, [node for node in graph.node if not live.isdisjoint(node.output)])
        stays = read_names(graph.node) | {info.name for info in graph.output} | self._spare | self.fed
        replace_entries(graph.initializer, [tensor for tensor in self.stored.values() if tensor.name in stays])
        computed = computed_values(graph.node).keys() | self.fed
        replace_entries(graph.value_info, [info for info in graph.value_info if info.name in computed])
        return PassResult(DetachedModel(self.proto, {**self.model.weights, **self._weights}), why=why)

    def _enter(self, node: NodeProto) -> None:
        self._nodes[id(node)] = node
        self.producers.update(producers_of([node]))
        for name in dict.fromkeys(node.input):
            self.consumers[name].append(node)

    def _is_unread(self, node: NodeProto) -> bool:
        return id(node) in self._nodes and not any(self.consumers[name] or name in self.held for name in node.output)

    def _store(self, array: Array, name: str) -> str:
        data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        if array.nbytes < DETACH_FROM_BYTES or data_type not in TYPED_FIELDS:
            tensor = onnx.numpy_helper.from_array(array, name)
        else:
            weight = Weight.of(array)
            tensor, key = initializer_of(name, weight)
            self._weights |= {} if key is None else {key: weight}
        self.stored[name] = tensor
        self._types[name] = data_type, array.shape
        return name

    def _weight_of(self, tensor: TensorProto) -> Weight | None:
        return self._weights.get(key) if self._weights and (key := key_of(tensor)) is not None else None


def is_float(array: Array) -> bool:
    """Whether the elements are floats, bfloat16 included."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _types_of(model: DetachedModel, context: PassContext) -> GraphTypes:
    """The inferred types of `model`; steps in a row that change nothing share them."""
    known = context.cache.get(TYPES)
    if known is None or known.model is not model:
        known = context.cache[TYPES] = GraphTypes.of(GraphView(model))
    return known


TYPES: Final = "rewriter/types"
"""The key of the last types in the cache of a context."""
