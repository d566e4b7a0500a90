"""Write the nodes that take the place of one node. Their names begin with the name of that node, and stay the same from
release to release."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from passes.rewrites.graph_values import Dim, GraphValues


class NotHandledError(Exception):
    """A form of an operator that stays as it is; the message says why, as the end of a sentence."""


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
class NodeWriter:
    """Nodes and constants that replace `node`: each is called NAME/LABEL, by the name of that node; nodes have its
    metadata."""

    node: NodeProto
    graph: GraphValues
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
        name = self.graph.free(self._title(label))
        self._own.add(name)
        return name

    def constant(self, array: np.ndarray, label: str) -> str:
        """An initializer; one of equal content is used again."""
        return self.graph.constant_of(array, self._title(label))

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
            self._append(helper.make_node("Identity", [value], [output], name=self.graph.free(f"{output}/copy")))
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
