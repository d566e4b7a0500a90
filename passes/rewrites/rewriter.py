"""A copy of a graph that is changed in place: producers and consumers stay right after each change.

`GraphEdit` collects changes to a graph that stays as it is. A chain of small rewrites needs to see what the rewrites
before it have made: it uses a `Rewriter`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, Final

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.context import PassContext
from passes.graph.index import (
    computed_values,
    constant_of,
    drop_unread,
    initializers_of,
    replace_entries,
    take_name,
    unread_tensors,
    value_names,
)
from passes.graph.op_facts import ONNX_DOMAINS, opset_of
from passes.graph.traversal import bodies_in, live_nodes, reads_of, sort_nodes
from passes.rewrites.graph_edit import Dim, GraphTypes
from passes.step import PassResult, Step
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import Array, Key, Weight, digest_of, key_of, stored_array


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
        self._spare = unread_tensors(graph)
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

    def reshape(self, name: str, shape: Sequence[int], like: NodeProto) -> str:
        """Add a Reshape of a value to fixed sizes."""
        sizes = self.constant_of(np.array(shape, np.int64), f"{name}/shape")
        return self.add("Reshape", [name, sizes], like, shape, dtype=self.dtype(name))

    def transpose(self, name: str, perm: Sequence[int], like: NodeProto) -> str:
        """Add a Transpose of a value whose rank is known."""
        shape = self.shape(name)
        assert shape is not None
        turned = [shape[axis] for axis in perm]
        return self.add("Transpose", [name], like, turned, dtype=self.dtype(name), perm=list(perm))

    def add_copy(self, node: NodeProto, inputs: Sequence[str], shape: Sequence[Dim] | None = None) -> str:
        """Add the operator of `node`, which has one output, on other inputs."""
        return self.add_copies(node, inputs, [shape])[0]

    def add_copies(
        self, node: NodeProto, inputs: Sequence[str], shapes: Sequence[Sequence[Dim] | None], **changed: Any
    ) -> list[str]:
        """Add the operator of `node` on other inputs, and return the names of its outputs.

        Args:
            node: the node.
            inputs: the values that it reads.
            shapes: those of the outputs, as far as they are known.
            **changed: the attributes that have other values now, by name.
        """
        names = [self.free(f"{name}/{node.op_type.lower()}") for name in node.output]
        made = self.add_many(node.op_type, inputs, node, names, **changed)
        made.attribute.extend(attribute for attribute in node.attribute if attribute.name not in changed)
        for old, new, shape in zip(node.output, names, shapes, strict=True):
            self._types[new] = self.dtype(old), None if shape is None else tuple(shape)
        return names

    def constant_of(self, array: Array, label: str) -> str:
        """The name of a stored tensor of these elements; tensors of equal content that were made here are one."""
        key = array.dtype, array.shape, digest_of(array)
        if key not in self._made:
            self._made[key] = self.store(array, label)
        return self._made[key]

    def store(self, array: Array, label: str) -> str:
        """The name of a new stored tensor."""
        name = self.free(label)
        self.stored[name], weights = stored_array(array, name)
        self._weights |= weights
        self._types[name] = self.stored[name].data_type, array.shape
        return name

    def free(self, name: str) -> str:
        return take_name(name, self._names, 2)

    def release_names(self, names: Iterable[str]) -> None:
        """Let new values have these names: what has them now goes."""
        self._names.difference_update(names)

    def turn_into(self, node: NodeProto, op: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> None:
        """Make another operator of a node, on other inputs; nodes that only it read go."""
        before = list(node.input)
        for name in before:
            self.consumers[name] = [consumer for consumer in self.consumers[name] if consumer is not node]
        node.CopyFrom(helper.make_node(op, inputs, node.output, node.name, domain=domain, **attributes))
        for name in dict.fromkeys(inputs):
            self.consumers[name].append(node)
        for name in before:
            self.drop_unread(name)
        if domain and all(entry.domain != domain for entry in self.proto.opset_import):
            self.proto.opset_import.append(helper.make_opsetid(domain, 1))
        self.changes += 1

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

    def replace_made(self, nodes: Sequence[NodeProto], remake: Callable[[str], str]) -> None:
        """Take nodes out, the last first; what other nodes still read of them, or what is held, is made in another way.

        Args:
            nodes: the nodes, in their order.
            remake: adds what makes a value that is equal, and returns its name.
        """
        for name in (name for node in reversed(nodes) for name in node.output):
            if name in self.held or self.consumers[name]:
                self.replace(name, remake(name))
            else:
                self.drop_unread(name)

    def rename(self, old: str, new: str) -> None:
        """Give the computed value `old`, which is not held, a name that is free."""
        self._reroute(old, self.take_output(old, new))

    def take_output(self, old: str, label: str) -> str:
        """Give the value `old` a free name, and return that; its consumers still read `old`, which a new node makes."""
        new, producer = self.free(label), self.producers.pop(old)
        self.producers[new] = producer
        producer.output[list(producer.output).index(old)] = new
        self._types[new] = self._types.get(old, (0, None))
        self.changes += 1
        return new

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

    def result(self, *phrases: str, default: str = "") -> PassResult:
        """The changed model, without the nodes and tensors that nothing reads any more.

        Args:
            phrases: what was done and what was left; empty ones do not count.
            default: what is said where all are empty.
        """
        why = "; ".join(filter(None, phrases)) or default or None
        if not self.changes:
            return PassResult(self.model, changed=False, why=why)
        graph = self.proto.graph
        replace_entries(graph.node, self._nodes.values())
        sort_nodes(graph)
        live = computed_values(live_nodes(graph)).keys()
        replace_entries(graph.node, [node for node in graph.node if not live.isdisjoint(node.output)])
        replace_entries(graph.initializer, self.stored.values())
        drop_unread(graph, self._spare)
        return PassResult(DetachedModel(self.proto, {**self.model.weights, **self._weights}), why=why)

    def _enter(self, node: NodeProto) -> None:
        self._nodes[id(node)] = node
        self.producers |= {name: node for name in node.output if name}
        for name in dict.fromkeys(node.input):
            self.consumers[name].append(node)

    def _is_unread(self, node: NodeProto) -> bool:
        return id(node) in self._nodes and not any(self.consumers[name] or name in self.held for name in node.output)

    def _weight_of(self, tensor: TensorProto) -> Weight | None:
        return self._weights.get(key) if self._weights and (key := key_of(tensor)) is not None else None


class RewriteStep(Step):
    """A step that changes a graph in place."""

    __slots__ = ()

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        why = self.why_not({node.op_type for node in model.proto.graph.node})
        return PassResult(model, changed=False, why=why) if why else self.rewrite(Rewriter(model, context))

    def why_not(self, ops: Set[str]) -> str:
        """Why a graph stays as it is whatever its nodes read.

        Args:
            ops: the operators of the graph.

        Returns:
            The reason; nothing where the graph has to be looked at.
        """
        return ""

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        """Change the graph.

        Args:
            rewriter: the graph; it has the model that it was made of.

        Returns:
            The result of `rewriter`.
        """
        raise NotImplementedError


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
