"""Collect new nodes and tensors for a graph one by one, and put them into a copy of the model at the end.

A `NodeWriter` writes the nodes that take the place of one node. Their names begin with the name of that node, and stay
the same from release to release.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from passes.graph.index import (
    GraphIndex,
    computed_values,
    copy_of,
    drop_unread,
    replace_entries,
    take_name,
    unread_tensors,
    value_names,
)
from passes.graph.inference import dims_of
from passes.graph.op_facts import first_output, op_of
from passes.graph.traversal import bodies_in, live_nodes, reads_of, sort_nodes
from passes.provenance.weight_origins import mark_part, part_name
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import Array, Key, Weight, digest_of, initializer_of, stored_array

Dim = int | str | None
"""A size that is known, the name of a symbolic one, or neither."""


class NotHandledError(Exception):
    """A form of an operator that stays as it is; the message says why, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class GraphTypes:
    """Types and shapes of a graph's values, as far as shape inference finds them."""

    infos: Mapping[str, tuple[int, tuple[Dim, ...] | None]]
    model: DetachedModel
    index: GraphIndex

    @classmethod
    def of(cls, view: GraphView) -> GraphTypes:
        infos = {name: _type_of(info) for name, info in view.types.items()}
        stored = view.initializers.items()
        types = {name: (tensor.data_type, tuple(tensor.dims)) for name, tensor in stored}
        return cls({**infos, **types}, view.model, view)

    def array(self, name: str) -> np.ndarray | None:
        """The values of a constant that nobody can override; None for anything else, and for an unread weight."""
        tensor = None if name in self.index.inputs else self.index.initializers.get(name)
        return None if tensor is None or self.model.is_unread(tensor) else self.model.array(tensor)

    def shape(self, name: str) -> tuple[Dim, ...] | None:
        return self.infos.get(name, (0, None))[1]

    def dim(self, name: str, axis: int) -> Dim:
        shape = self.shape(name)
        return shape[axis] if shape is not None and len(shape) > axis else None

    def rank(self, name: str) -> int | None:
        shape = self.shape(name)
        return None if shape is None else len(shape)

    def dtype(self, name: str) -> int:
        """Its ONNX dtype; 0 if that is not known."""
        return self.infos.get(name, (0, None))[0]


def _type_of(info: ValueInfoProto) -> tuple[int, tuple[Dim, ...] | None]:
    return info.type.tensor_type.elem_type, dims_of(info)


def attributes_of(node: NodeProto, known: Sequence[str]) -> dict[str, Any]:
    """The node's attributes by name.

    Raises:
        NotHandledError: it has one that is not among `known`.
    """
    for attribute in node.attribute:
        if attribute.name not in known:
            raise NotHandledError(f"its attribute {attribute.name} is not known")
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


@dataclass(slots=True)
class NewTensors:
    """Tensors and names that are added to a graph. New names are free names, in a fixed order."""

    names: set[str]
    """The names that the graph has; what is added is added to them."""
    tensors: list[TensorProto] = field(default_factory=list)
    made: dict[tuple[object, ...], str] = field(default_factory=dict)
    """Description of a value → the name of the value that is added already."""
    second: int = 2
    """The number after the second value of one name."""

    def free(self, name: str) -> str:
        """Return `name`, or the next free name derived from it, and mark the result as taken."""
        return take_name(name, self.names, self.second)

    def store(self, array: np.ndarray, name: str) -> str:
        """Store `array`, and return its name."""
        self.tensors.append(numpy_helper.from_array(array, self.free(name)))
        return self.tensors[-1].name

    def constant(self, array: np.ndarray, name: str) -> str:
        """The name of a stored tensor of this content: it is stored once."""
        key = ("constant", array.dtype, array.shape, digest_of(array))
        if key not in self.made:
            self.made[key] = self.store(array, name)
        return self.made[key]

    def ints(self, values: Sequence[int], name: str) -> str:
        """The same of sizes, axes or indices, as int64."""
        return self.constant(np.array(values, np.int64), name)


@dataclass(slots=True)
class NodeWriter:
    """Nodes and constants that replace `node`: each is called NAME/LABEL, by the name of that node; nodes have its
    metadata."""

    node: NodeProto
    tensors: NewTensors
    nodes: list[NodeProto] = field(default_factory=list)
    _own: set[str] = field(default_factory=set)

    def add(self, op_type: str, *inputs: str, label: str, **attributes: Any) -> str:
        """Write one node of ONNX's own operators with one output, and return the name of the output."""
        return self.add_many(op_type, inputs, (label,), **attributes)[0]

    def add_many(self, op_type: str, inputs: Sequence[str], labels: Sequence[str], **attributes: Any) -> list[str]:
        """The same with an output for each label."""
        outputs = [self.name(label) for label in labels]
        self._append(
            helper.make_node(op_type, inputs, outputs, name=self._name_node(op_type, outputs[0]), **attributes)
        )
        return outputs

    def name(self, label: str) -> str:
        """A free name NAME/LABEL for a value that is written."""
        name = self.tensors.free(self._title(label))
        self._own.add(name)
        return name

    def constant(self, array: np.ndarray, label: str) -> str:
        """An initializer; one of equal content is used again."""
        return self.tensors.constant(array, self._title(label))

    def scalar(self, value: float, dtype: int, label: str) -> str:
        return self.constant(np.array(value, helper.tensor_dtype_to_np_dtype(dtype)), label)

    def ints(self, values: Sequence[int], label: str) -> str:
        return self.constant(np.array(values, np.int64), label)

    def positions(self, size: Dim, source: str, axis: int, label: str) -> str:
        """0, 1, 2 … for each index of `axis` of `source`; `size` is the length of the axis, if it is known."""
        if isinstance(size, int):
            return self.constant(np.arange(size), label)
        end = self.add("Shape", source, label=f"{label}_shape", start=axis, end=axis + 1)
        count = self.add("Squeeze", end, label=f"{label}_count")
        zero, one = self.constant(np.array(0), "zero"), self.constant(np.array(1), "one")
        return self.add("Range", zero, count, one, label=label)

    def end(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], keep: Collection[str] = ()) -> None:
        """Write the operator that stays, with the name, the domain and the attributes of the node.

        Args:
            op_type: the operator.
            inputs: the operands; trailing operands may be left out ("").
            outputs: the names that the consumers know.
            keep: the attributes that stay; by default, all.
        """
        count = max(position for position, name in enumerate(inputs, start=1) if name)
        made = helper.make_node(op_type, inputs[:count], outputs, name=self.node.name, domain=self.node.domain)
        made.attribute.extend(attribute for attribute in self.node.attribute if not keep or attribute.name in keep)
        self._append(made)

    def give(self, value: str, output: str) -> str:
        """Make `value` the node's own output `output`, by renaming it; write an Identity where `value` is an input of
        the node or already has the name of another output. Returns the name for the consumers."""
        if value not in self._own:
            self._append(helper.make_node("Identity", [value], [output], name=self.tensors.free(f"{output}/copy")))
            return value
        for node in self.nodes:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name == value:
                        names[index] = output
        self._own.remove(value)
        return output

    def _append(self, node: NodeProto) -> None:
        node.metadata_props.extend(self.node.metadata_props)
        self.nodes.append(node)

    def _title(self, label: str) -> str:
        return f"{self.node.name or self.node.output[0]}/{label}"

    def _name_node(self, op_type: str, output: str) -> str:
        return output


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
        spare = unread_tensors(graph)
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
        drop_unread(graph, spare)
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
        tensor, weights = stored_array(array, name)
        self.weights |= weights
        return self._add_tensor(tensor, whole, part)

    def store_weight(self, weight: Weight, name: str, whole: TensorProto | None, part: str) -> str:
        """Store `weight`, which may be unread."""
        tensor, key = initializer_of(self.free(name), weight)
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
        same.input[:], same.output[:] = inputs, [output]
        self.add(same, node, role)
        return output

    def replace_node(self, node: NodeProto, op: str, inputs: Sequence[str], *outputs: str) -> None:
        """Put `op` in place of `node`, with its name, its metadata and, for the same operator, its attributes."""
        same = NodeProto(op_type=op, name=node.name, input=inputs, output=outputs)
        same.metadata_props.extend(node.metadata_props)
        same.attribute.extend(node.attribute if op == node.op_type else ())
        self.removed.add(id(node))
        self.nodes.append((self.view.positions[first_output(node)], same))

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


def outside_readers(view: GraphView) -> dict[str, str]:
    """The values with consumers other than the nodes of this graph → a description of those consumers."""
    fixed = dict.fromkeys(view.outputs, "the model's output")
    for node in view.own:
        if bodies_in(node):
            fixed |= dict.fromkeys(reads_of(node), f"the body of {op_of(node)}")
    return fixed
