"""Collect new nodes and tensors for a graph one by one, and put them into a copy of the model at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from passes.graph.index import (
    GraphIndex,
    computed_values,
    copy_of,
    initializers_of,
    replace_entries,
    take_name,
    value_names,
)
from passes.graph.op_facts import first_output, op_of, opset_of
from passes.graph.traversal import bodies_in, live_nodes, read_names, reads_of, sort_nodes
from passes.provenance.weight_origins import mark_part, part_name
from passes.rewrites.node_writer import NewTensors, NodeWriter
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import TYPED_FIELDS, Key, Weight, initializer_of

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True)
class GraphEdit(NewTensors):
    """The removals from the graph of `view`, and what is added."""

    view: GraphView = field(kw_only=True)
    removed: set[int] = field(default_factory=set)
    """The nodes that go, by their ids."""
    position: int = 0
    """The position in the graph before which nodes are added."""
    nodes: list[tuple[int, NodeProto]] = field(default_factory=list)
    replaced: set[str] = field(default_factory=set)
    """The names of stored tensors that got new values."""
    weights: dict[Key, Weight] = field(default_factory=dict)
    node_names: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, view: GraphView, second: int = 2) -> GraphEdit:
        node_names = {node.name for node in view.model.proto.graph.node}
        return cls(value_names(view.model.proto.graph) | node_names, second=second, view=view, node_names=node_names)

    def state(self) -> dict[str, object]:
        """A copy of all that was collected, for `restore`."""
        return {entry.name: copy(getattr(self, entry.name)) for entry in fields(self) if entry.name != "view"}

    def restore(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def model(self) -> DetachedModel:
        """The model of `view` with all changes, without the nodes and tensors that nothing reads any more."""
        source = self.view.model
        proto = source.copy_proto()
        graph = proto.graph
        was_alive = computed_values(live_nodes(graph)).keys()
        unread = initializers_of(graph).keys() - read_names(graph.node)
        own = enumerate(zip(graph.node, self.view.own, strict=True))
        stays = [(at, 1, same) for at, (same, node) in own if id(node) not in self.removed]
        placed = sorted([*((at, 0, node) for at, node in self.nodes), *stays], key=lambda entry: entry[:2])
        replace_entries(graph.node, [node for _, _, node in placed])
        replace_entries(
            graph.initializer,
            [initializer for initializer in graph.initializer if initializer.name not in self.replaced],
        )
        graph.initializer.extend(self.tensors)
        sort_nodes(graph)
        alive = computed_values(live_nodes(graph)).keys()
        replace_entries(graph.node, [n for n in graph.node if alive & {*n.output} or not was_alive & {*n.output}])
        index = GraphIndex(graph)
        stays = (tensor for tensor in graph.initializer if tensor.name in index.reads or tensor.name in unread)
        replace_entries(graph.initializer, stays)
        named = index.producers.keys() | index.inputs.keys()
        replace_entries(graph.value_info, [info for info in graph.value_info if info.name in named])
        return DetachedModel(proto, {**source.weights, **self.weights})

    def store(self, array: Array, name: str, whole: TensorProto | None = None, part: str = "") -> str:
        """Store `array`, which is a `part` of the tensor `whole`."""
        return self._store_array(array, self.free(name), whole, part)

    def replace_tensor(self, name: str, array: Array) -> None:
        """Give the stored tensor `name` new values, which all its consumers get."""
        self.replaced.add(name)
        self._store_array(array, name, None, "")

    def renew_tensor(self, name: str, values: Array, on_the_way: Sequence[str] = ()) -> str:
        """Store new values for the tensor `name`, and return the name of the stored tensor: `name` if the old tensor
        has no other consumer.

        Args:
            name: the stored tensor.
            values: the new values.
            on_the_way: values computed from the tensor before the consumer of the new values.
        """
        view = self.view
        shared = any(len(view.consumers.get(value, ())) > 1 or value in view.outputs for value in (name, *on_the_way))
        if shared or name not in view.initializers or name in self.replaced:
            return self.store(values, name)
        self.replace_tensor(name, values)
        return name

    def _store_array(self, array: Array, name: str, whole: TensorProto | None, part: str) -> str:
        if onnx.helper.np_dtype_to_tensor_dtype(array.dtype) not in TYPED_FIELDS:
            return self._add_tensor(numpy_helper.from_array(array, name), whole, part)
        return self._store_bytes(Weight.of(array), name, whole, part)

    def store_weight(self, weight: Weight, name: str, whole: TensorProto | None, part: str) -> str:
        """Store `weight`, which may be unread."""
        return self._store_bytes(weight, self.free(name), whole, part)

    def _store_bytes(self, weight: Weight, name: str, whole: TensorProto | None, part: str) -> str:
        tensor, key = initializer_of(name, weight)
        self.weights |= {} if key is None else {key: weight}
        return self._add_tensor(tensor, whole, part)

    def _add_tensor(self, tensor: TensorProto, whole: TensorProto | None, part: str) -> str:
        if whole is not None:
            mark_part(tensor, whole, part)
        self.tensors.append(tensor)
        return tensor.name

    def copy_node(self, node: NodeProto, inputs: Sequence[str], output: str, role: str, **sizes: int) -> str:
        """Add a copy of `node` on other inputs; `sizes` are the attributes with new values."""
        same = copy_of(node)
        for attribute in same.attribute:
            if attribute.name in sizes:
                attribute.i = sizes[attribute.name]
        del same.input[:], same.output[:]
        same.input.extend(inputs)
        same.output.append(output)
        self.add(same, node, role)
        return output

    def set_inputs(self, node: NodeProto, names: Mapping[int, str]) -> None:
        """Let `node` read other values: position of the input → name."""
        same = copy_of(node)
        for slot, name in names.items():
            same.input[slot] = name
        self.removed.add(id(node))
        self.nodes.append((self.view.positions[first_output(node)], same))

    def replace_node(self, node: NodeProto, op: str, inputs: Sequence[str], output: str) -> None:
        """Put `op` in place of `node`, with its name, its metadata and, for the same operator, its attributes."""
        same = NodeProto(op_type=op, name=node.name, input=inputs, output=[output])
        same.metadata_props.extend(node.metadata_props)
        same.attribute.extend(node.attribute if op == node.op_type else ())
        self.removed.add(id(node))
        self.nodes.append((self.view.positions[node.output[0]], same))

    def add_node(
        self, op: str, inputs: Sequence[str], output: str, template: NodeProto, role: str, **attributes: Any
    ) -> str:
        self.add(onnx.helper.make_node(op, inputs, [output], **attributes), template, role)
        return output

    def add(self, node: NodeProto, template: NodeProto, role: str) -> None:
        """Add `node` with the metadata of `template`, and a name after its."""
        if not node.metadata_props:
            node.metadata_props.extend(template.metadata_props)
        node.name = take_name(part_name(template.name, role), self.node_names) if template.name else ""
        self.nodes.append((self.position, node))

    def replace_by(self, writer: NodeWriter) -> None:
        """Replace the writer's node by the nodes of `writer`."""
        self.removed.add(id(writer.node))
        position = self.view.positions[first_output(writer.node)]
        self.nodes.extend((position, node) for node in writer.nodes)

    def add_bare(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
        """Add a node that stands for none of the graph."""
        self.nodes.append((self.position, onnx.helper.make_node(op, inputs, [output], **attributes)))

    def opset(self) -> int:
        return opset_of(self.view.model.proto)


def outside_readers(view: GraphView) -> dict[str, str]:
    """The values with consumers other than the nodes of this graph → a description of those consumers."""
    fixed = dict.fromkeys(view.outputs, "the model's output")
    for node in view.own:
        if bodies_in(node):
            fixed |= dict.fromkeys(reads_of(node), f"the body of {op_of(node)}")
    return fixed
