"""A copy of a graph that is changed in place: producers and consumers stay right after each change.

Its names, types and stored tensors are in `graph_values.py`; `node_writer.py` writes the nodes that replace one node.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from copy import copy
from typing import Any, Final

from onnx import NodeProto, helper

from passes.context import PassContext
from passes.graph.index import (
    computed_values,
    constant_of,
    copy_of,
    drop_unread,
    replace_entries,
    take_name,
    unread_tensors,
)
from passes.graph.op_facts import ONNX_DOMAINS, first_output, op_of, opset_of
from passes.graph.traversal import bodies_in, live_nodes, reads_of, sort_nodes
from passes.provenance.weight_origins import part_name
from passes.rewrites.graph_values import Dim, GraphValues
from passes.step import PassResult, Step
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import Array


class Rewriter(GraphValues):
    """The main graph of a model, to change node by node; bodies of nodes and functions stay as they are.

    A value that is an output of the graph, or that a body reads, is `held`: it keeps its name and stays computed.

    A rewrite that sees what the rewrites before it have made reads `producers` and `consumers`. One that decides on the
    graph as it was reads `view`, and hands nodes of `view` to `take_out`, `replace_node` and `replace_by`.

    Args:
        view: the graph as it is; it does not change.
        second: the number after the second value of one name.
        keeps_dead: whether nodes stay on which no output depends, and did not before.
    """

    def __init__(self, view: GraphView, second: int = 2, *, keeps_dead: bool = True) -> None:
        super().__init__(view, second)
        self.proto = self.model.copy_proto()
        graph = self.proto.graph
        self.opset = opset_of(self.proto)
        self.producers: dict[str, NodeProto] = {}
        self.consumers: defaultdict[str, list[NodeProto]] = defaultdict(list)
        self.held = dict.fromkeys(view.outputs, "the model's output")
        """Value → the reader for which it keeps its name."""
        self.place: float = math.inf
        """The position in the graph before which nodes are added; by default at the end."""
        self._keeps_dead = keeps_dead
        self._node_names = {node.name for node in graph.node}
        self._nodes: dict[int, NodeProto] = {}
        self._places: dict[int, tuple[float, int]] = {}
        """Id of a node → where it belongs; what is added before a node comes first."""
        self.changes = 0
        for place, node in enumerate(graph.node):
            self.enter(node, (place, 1))
            if bodies_in(node):
                self.held |= dict.fromkeys(reads_of(node), f"the body of {op_of(node)}")
        self.changes = 0  # since the graph as it was
        self._twins = {id(node): twin for node, twin in zip(view.own, graph.node, strict=True)}
        """Id of a node of the view → its copy, which changes."""

    @classmethod
    def of(cls, model: DetachedModel, context: PassContext) -> Rewriter:
        """A rewriter of `model`; steps in a row that change nothing share its inferred types."""
        known = context.cache.get(VIEW)
        if known is None or known.model is not model:
            known = context.cache[VIEW] = GraphView(model)
        return cls(known, keeps_dead=False)

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

    def own_producer(self, name: str, *ops: str) -> NodeProto | None:
        """The same for a value that is not shared; None for a shared one."""
        return None if self.is_shared(name) else self.producer(name, *ops)

    def is_shared(self, name: str) -> bool:
        """Whether more than one input of a node reads a value, or its name has to stay."""
        return name in self.held or sum(list(node.input).count(name) for node in self.consumers[name]) > 1

    def constant(self, name: str) -> Array | None:
        """The elements of a constant that nobody can override; None for other values, and for an unread weight."""
        node = self.producers.get(name)
        return self.array(name) if node is None else self._elements(constant_of(node))

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
        self.declare(names[0], dtype or self.dtype(like.output[0]), shape)
        return names[0]

    def add_many(
        self, op: str, inputs: Sequence[str], like: NodeProto, outputs: Sequence[str], **attributes: Any
    ) -> NodeProto:
        """Add a node with these outputs, whose types stay unknown."""
        title = self.free(f"{like.name or like.output[0]}/{op}")
        return self.enter(helper.make_node(op, inputs, outputs, name=title, **attributes))

    def reshape(self, name: str, shape: Sequence[int], like: NodeProto) -> str:
        """Add a Reshape of a value to fixed sizes."""
        sizes = self.constant_ints(shape, f"{name}/shape")
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
            self.declare(new, self.dtype(old), shape)
        return names

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
        self.held.setdefault(new, "the new producer")  # for now: the old producer may be all that reads it
        if any(self.consumers[name] or name in self.held for name in producer.output if name != old):
            self.rename(old, old)  # its other outputs stay
        else:
            self.remove(producer)
        if not is_held:
            del self.held[new]
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
        self.declare(new, self.dtype(old), self.shape(old))
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
            self.take_out(gone)
            sources = (self.producers.get(name) for name in dict.fromkeys(gone.input))
            pending += [before for before in sources if before is not None and self._is_unread(before)]

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
        return PassResult(self.to_model() if self.changes else self.model, self.changes > 0, why)

    def to_model(self) -> DetachedModel:
        """The model with all changes, without the nodes and tensors that nothing reads any more."""
        graph = self.proto.graph
        replace_entries(graph.node, sorted(self._nodes.values(), key=lambda node: self._places[id(node)]))
        sort_nodes(graph)
        live, was_live = computed_values(live_nodes(graph)).keys(), self.view.live_values
        stays = [
            node
            for node in graph.node
            if not live.isdisjoint(node.output) or (self._keeps_dead and was_live.isdisjoint(node.output))
        ]
        replace_entries(graph.node, stays)
        replace_entries(graph.initializer, self.stored.values())
        drop_unread(graph, spare=unread_tensors(self.model.proto.graph))
        return DetachedModel(self.proto, {**self.model.weights, **self._weights})

    def state(self) -> dict[str, Any]:
        """A copy of what was added and taken out, for `restore`; inputs and outputs that were changed stay changed."""
        kinds = dict | set | int | float
        copies = {name: copy(value) for name, value in vars(self).items() if isinstance(value, kinds)}
        copies["consumers"] = defaultdict(list, {name: [*nodes] for name, nodes in self.consumers.items()})
        return copies

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def take_out(self, node: NodeProto) -> None:
        """Take a node out, which may be one of the view; the nodes before it go at the end, if nothing reads them."""
        own = self._twins.get(id(node), node)
        self._nodes.pop(id(own), None)
        self.changes += 1
        for name in own.output:
            self.producers.pop(name, None)
        for name in dict.fromkeys(own.input):
            self.consumers[name] = [consumer for consumer in self.consumers[name] if consumer is not own]

    def replace_node(self, node: NodeProto, op: str, inputs: Sequence[str], *outputs: str) -> None:
        """Put `op` in place of a node of the view, with its name, its metadata and, for the same operator, its
        attributes."""
        same = NodeProto(op_type=op, name=node.name, input=inputs, output=outputs)
        same.metadata_props.extend(node.metadata_props)
        same.attribute.extend(node.attribute if op == node.op_type else ())
        self.replace_by(node, [same])

    def replace_by(self, node: NodeProto, replacements: Sequence[NodeProto]) -> None:
        """Put other nodes in place of a node of the view."""
        self.take_out(node)
        for replacement in replacements:
            self.enter(replacement, (self.view.positions[first_output(node)], 0))

    def copy_node(self, node: NodeProto, inputs: Sequence[str], output: str, role: str, **sizes: int) -> str:
        """Add a copy of `node` on other inputs; `sizes` are the attributes with new values."""
        same = copy_of(node)
        for attribute in same.attribute:
            if attribute.name in sizes:
                attribute.i = sizes[attribute.name]
        same.input[:], same.output[:] = inputs, [output]
        self.enter_like(same, node, role)
        return output

    def add_node(
        self, op: str, inputs: Sequence[str], output: str, template: NodeProto, role: str, **attributes: Any
    ) -> str:
        """Add a node with one output, as `enter_like` does."""
        self.enter_like(helper.make_node(op, inputs, [output], **attributes), template, role)
        return output

    def enter_like(self, node: NodeProto, template: NodeProto, role: str) -> None:
        """Add `node` with the metadata of `template`, and a name after its."""
        if not node.metadata_props:
            node.metadata_props.extend(template.metadata_props)
        node.name = take_name(part_name(template.name, role), self._node_names) if template.name else ""
        self.enter(node)

    def enter(self, node: NodeProto, place: tuple[float, int] | None = None) -> NodeProto:
        """Add `node` as it is, by default at `self.place`."""
        self._nodes[id(node)] = node
        self._places[id(node)] = place or (self.place, 0)
        self.producers |= {name: node for name in node.output if name}
        for name in dict.fromkeys(node.input):
            self.consumers[name].append(node)
        self.changes += 1
        return node

    def _is_unread(self, node: NodeProto) -> bool:
        return id(node) in self._nodes and not any(self.consumers[name] or name in self.held for name in node.output)


class RewriteStep(Step):
    """A step that changes a graph in place."""

    __slots__ = ()

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        why = self.why_not({node.op_type for node in model.proto.graph.node})
        return PassResult(model, changed=False, why=why) if why else self.rewrite(Rewriter.of(model, context))

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


VIEW: Final = "rewriter/view"
"""The key of the last view in the cache of a context."""
