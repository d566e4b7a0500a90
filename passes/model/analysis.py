"""`AnalyzedModel`: a model with facts that are computed once; `extract_nodes`: some of its nodes as a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx
from onnx import NodeProto, ValueInfoProto

from passes.graph.index import GraphIndex, computed_values, extract, values_read
from passes.graph.traversal import read_names
from passes.model.canonical import CanonicalModel, canonicalize
from passes.model.contents import VoidNodes, count_nodes, count_void_nodes, stored_bytes
from passes.weights.detached import DetachedModel


@dataclass(frozen=True)
class AnalyzedModel:
    """A model whose graph does not change any more; names and metadata may."""

    model: DetachedModel

    @property
    def size(self) -> tuple[int, int]:
        """The number of its nodes and of its initializers."""
        return len(self.model.proto.graph.node), len(self.model.proto.graph.initializer)

    @cached_property
    def canonical(self) -> CanonicalModel:
        return canonicalize(self.model)

    @cached_property
    def stored_bytes(self) -> int:
        return stored_bytes(self.model)

    @cached_property
    def node_count(self) -> int:
        return count_nodes(self.model)

    @cached_property
    def void_nodes(self) -> VoidNodes:
        return count_void_nodes(self.model)

    @cached_property
    def invalid(self) -> str:
        """The error of ONNX's checker; empty for a valid model."""
        return what_is_invalid(self.model)


def what_is_invalid(model: DetachedModel) -> str:
    """The error of ONNX's checker on `model`, in one line; empty when it is valid.

    An input or output whose type or rank is not declared is valid: the standard allows it, though the checker does not.
    The checker expects as many elements as the shape of a tensor asks for. A stand-in holds fewer, so it becomes an
    input of its type. The metadata of nodes may be most of the graph; the checker ignores it, so it is removed first.
    """
    proto = model.copy_proto()
    graph = proto.graph
    for node in graph.node:
        node.ClearField("metadata_props")
    inputs = GraphIndex(graph).inputs
    stands_in = [tensor for tensor in graph.initializer if model.weight(tensor) is not None]
    for tensor in stands_in:
        if tensor.name not in inputs:
            entry = graph.input.add(name=tensor.name)
            entry.type.tensor_type.elem_type = tensor.data_type
            entry.type.tensor_type.shape.SetInParent()  # required; the sizes are not checked
    names = {tensor.name for tensor in stands_in}
    held = [tensor for tensor in graph.initializer if tensor.name not in names]
    del graph.initializer[:]
    graph.initializer.extend(held)
    for info in (*graph.input, *graph.output):
        kind = info.type.WhichOneof("value")
        if kind is None or (kind == "tensor_type" and not info.type.tensor_type.HasField("shape")):
            info.type.tensor_type.elem_type = info.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
            info.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        return " ".join(str(error).split())
    return ""


def extract_nodes(
    model: DetachedModel, nodes: Sequence[NodeProto], types: Mapping[str, ValueInfoProto]
) -> DetachedModel | None:
    """`nodes` as a model; None when an input or output of it has no known type.

    Values that the nodes only read become inputs; values that they only compute become outputs.
    """
    index = model.index
    read = read_names(nodes)
    inputs = [name for name in values_read(nodes) if name not in index.initializers]
    outputs = [name for name in computed_values(nodes) if name in index.outputs or name not in read]
    if not outputs or any(name not in types for name in (*inputs, *outputs)):
        return None
    typed_inputs, typed_outputs = ([types[name] for name in names] for names in (inputs, outputs))
    return model.with_proto(extract(model.proto, nodes, inputs=typed_inputs, outputs=typed_outputs))
