"""A read-only index over a graph, for finders: who makes a value, who reads it, and which constant stands behind it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto

from passes.weights import DetachedModel

__all__ = ["GraphView", "module_of"]

FIRST_INPUT_OPS = frozenset(
    {"CastLike", "Reshape", "Expand", "Slice", "Gather", "Tile", "Squeeze", "Unsqueeze", "Split", "SplitToSequence"}
)
"""Ops whose further inputs say how, and carry no data: torch casts K's scale like Q."""

LAYOUT_OPS = frozenset({"Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze", "Cast"})


class GraphView:
    """Indexes `model.proto.graph` once; holds references, copies nothing."""

    def __init__(self, model: DetachedModel) -> None:
        graph = model.proto.graph
        self.initializers: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self.producers: dict[str, NodeProto] = {name: node for node in graph.node for name in node.output if name}
        self.consumers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                self.consumers[name].append(node)
        self._model = model

    @cached_property
    def types(self) -> dict[str, ValueInfoProto]:
        """The inferred type and shape of every value that inference can reach."""
        try:
            graph = onnx.shape_inference.infer_shapes(self._model.proto, data_prop=True).graph
        except Exception:  # a model that inference cannot read still has the types that it came with
            graph = self._model.proto.graph
        return {info.name: info for info in (*graph.value_info, *graph.output, *graph.input)}

    def weight_behind(self, name: str) -> TensorProto | None:
        """The initializer that `name` is, or is a mere re-layout of; None if it is computed."""
        while name not in self.initializers:
            node = self.producers.get(name)
            if node is None or node.op_type not in LAYOUT_OPS:
                return None
            name = node.input[0]
        return self.initializers[name]

    def is_constant(self, name: str) -> bool:
        node = self.producers.get(name)
        return self.weight_behind(name) is not None or (node is not None and node.op_type == "Constant")

    def upstream(self, name: str, through: frozenset[str]) -> Iterator[NodeProto]:
        """Nodes that `name` is computed from, nearest first; the walk goes on behind nodes of a type in `through`."""
        seen: set[str] = set()
        front = [name]
        while front:
            producers = [self.producers[value] for value in front if value in self.producers]
            front = []
            for node in producers:
                if node.output[0] in seen:
                    continue
                seen.add(node.output[0])
                yield node
                if node.op_type in through:
                    carried = node.input[:1] if node.op_type in FIRST_INPUT_OPS else node.input
                    front.extend(value for value in carried if value)

    def downstream(self, name: str, through: frozenset[str]) -> Iterator[tuple[NodeProto, str]]:
        """Nodes that read what follows from `name`, nearest first, each with the value by which it is reached."""
        seen: set[str] = set()
        front = [name]
        while front:
            reached = [(node, value) for value in front for node in self.consumers.get(value, [])]
            front = []
            for node, value in reached:
                if node.output[0] in seen:
                    continue
                seen.add(node.output[0])
                yield node, value
                if node.op_type in through:
                    front.extend(node.output)


def module_of(nodes: list[onnx.NodeProto]) -> str:
    """The innermost torch module that holds all of `nodes`, from the exporter's metadata; empty if it is not known."""
    paths = [path for path in map(_module_path, nodes) if path is not None]
    if not paths or len(paths) < len(nodes):
        return ""
    parts = [path.split(".") for path in paths]
    common = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return ".".join(common)


def _module_path(node: NodeProto) -> str | None:
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            scopes = ast.literal_eval(entry.value)
            # The last scope is the call itself, the ones before are modules from the root inwards.
            return scopes[-2] if len(scopes) > 1 else ""
    return None
