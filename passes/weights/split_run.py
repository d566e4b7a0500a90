"""Run a model of which onnxruntime computes some nodes, and the reference of a custom operator the others.

The nodes are put into levels: a value that a custom node makes is of the level after those that the node reads. The
nodes of onnxruntime of one level are one session; a session is opened when the dtypes of what it is fed are known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import NodeProto, helper

from passes.custom_ops.declarations import reference_ops
from passes.custom_ops.operator import CustomOp
from passes.errors import PassError, StepFailed
from passes.graph.index import GraphIndex, extract, initializers_of, values_read
from passes.graph.op_facts import domain_of
from passes.graph.traversal import bodies_in, every_node, sort_nodes
from passes.weights.evaluator import open_evaluator

Ops = Mapping[tuple[str, str], CustomOp]
Arrays = dict[str, np.ndarray]


class PartSession(Protocol):
    """A session of onnxruntime over a part of the model."""

    @property
    def is_evaluated(self) -> bool: ...

    def run(self, feeds: Mapping[str, np.ndarray], *, within_s: float | None = None) -> Arrays: ...


@dataclass(slots=True)
class _Level:
    """The nodes of one level: those of onnxruntime, then the custom ones, which read what the others make."""

    native: list[NodeProto] = field(default_factory=list)
    custom: list[NodeProto] = field(default_factory=list)
    session: PartSession | None = None


def names_computed_in_numpy(proto: onnx.ModelProto) -> tuple[str, ...]:
    """The custom operators that their references compute, each as often as a node of a graph or a function has it."""
    ops = reference_ops()
    nodes = [node for part in (proto.graph, *proto.functions) for node in every_node(part)] if ops else ()
    return tuple(ops[key].key for node in nodes if (key := (domain_of(node), node.op_type)) in ops)


class CustomNodes:
    """Tells which nodes of a model only the references of `ops` can compute."""

    def __init__(self, proto: onnx.ModelProto, ops: Ops) -> None:
        self._keys = set(ops)
        functions = {(function.domain, function.name): function for function in proto.functions}
        while found := {
            key
            for key, function in functions.items()
            if key not in self._keys and any(self.has(node) for node in function.node)
        }:
            self._keys |= found

    def has(self, node: NodeProto) -> bool:
        """Whether the node is custom, or calls a function or has a body with a custom node."""
        inner = (deep for body in bodies_in(node) for deep in every_node(body))
        return any((domain_of(known), known.op_type) in self._keys for known in (node, *inner))


class SplitRun:
    """A model whose custom nodes are computed by their references, and all others by sessions.

    Args:
        proto: the graph, whose initializers may be stand-ins.
        array_of: gives the data of an initializer.
        open_session: makes a session of a part of the model.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        array_of: Callable[[onnx.TensorProto], np.ndarray],
        open_session: Callable[[onnx.ModelProto], PartSession],
        ops: Ops,
    ) -> None:
        sort_nodes(proto.graph)
        self._proto, self._ops, self._open_session = proto, ops, open_session
        self._levels = _make_levels(proto, CustomNodes(proto, ops))
        self._outputs = tuple(GraphIndex(proto.graph).outputs)
        stored = initializers_of(proto.graph)
        custom = [node for level in self._levels for node in level.custom]
        wanted = (*self._outputs, *(name for node in custom for name in values_read([node])))
        self._stored = {name: array_of(stored[name]) for name in dict.fromkeys(wanted) if name in stored}
        read = [(*values_read(level.native), *values_read(level.custom)) for level in self._levels]
        self._read = {*self._outputs, *(name for names in read for name in names)}

    @property
    def is_evaluated(self) -> bool:
        """Whether ONNX's own evaluator has run a part."""
        return any(level.session is not None and level.session.is_evaluated for level in self._levels)

    def run(self, feeds: Mapping[str, np.ndarray], *, within_s: float | None = None) -> Arrays:
        """Outputs by name.

        Raises:
            StepFailed: onnxruntime refuses a part or stops, or a reference raises.
        """
        values: Arrays = {**self._stored, **feeds}
        for level in self._levels:
            if level.native:
                level.session = level.session or self._open_session(self._part(level.native, values))
                values.update(level.session.run(values, within_s=within_s))
            for node in level.custom:
                values.update(compute_node(node, self._proto, values, self._ops))
        return {name: values[name] for name in self._outputs}

    def _part(self, nodes: list[NodeProto], values: Arrays) -> onnx.ModelProto:
        """Nodes as a model, with inputs of the dtypes of `values`."""
        stored, declared = initializers_of(self._proto.graph), GraphIndex(self._proto.graph).inputs
        fed = [name for name in values_read(nodes) if name in values and name not in stored]
        inputs = [declared.get(name) or _input_of(name, values[name]) for name in fed]
        made = [name for node in nodes for name in node.output if name in self._read]
        return extract(self._proto, nodes, inputs=inputs, outputs=made)


def compute_node(node: NodeProto, proto: onnx.ModelProto, values: Mapping[str, np.ndarray], ops: Ops) -> Arrays:
    """The outputs of a custom node of `proto`; one with bodies, or that calls a function, is run by ONNX's evaluator.

    Raises:
        StepFailed: a reference raises, or ONNX's evaluator does.
    """
    op = ops.get((domain_of(node), node.op_type))
    if op is not None:
        results = op.run(node, [values[name] if name else None for name in node.input])
        return {name: array for name, array in zip(node.output, results, strict=True) if name}
    names, read = [name for name in node.output if name], [name for name in values_read([node]) if name]
    inputs = [_input_of(name, values[name]) for name in read]
    part = extract(proto, [node], inputs=inputs, outputs=names, initializers=())
    try:
        found: Any = open_evaluator(part, ops.values()).run(names, {name: values[name] for name in read})
    except PassError:
        raise
    except Exception as error:  # it raises errors of many types
        raise StepFailed(
            f"ONNX's evaluator, which runs the custom operators inside of node {node.name or node.output[0]!r} "
            f"({node.op_type}), stopped: {error}"
        ) from error
    return dict(zip(names, map(np.asarray, found), strict=True))


def _make_levels(proto: onnx.ModelProto, custom: CustomNodes) -> list[_Level]:
    levels: defaultdict[int, _Level] = defaultdict(_Level)
    level_of: dict[str, int] = {}
    for node in proto.graph.node:
        place, is_custom = max((level_of.get(name, 0) for name in values_read([node])), default=0), custom.has(node)
        (levels[place].custom if is_custom else levels[place].native).append(node)
        level_of.update(dict.fromkeys(node.output, place + is_custom))
    return [levels[place] for place in sorted(levels)]


def _input_of(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    """An input of the dtype of an array and of any shape: its sizes may differ from draw to draw."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)
