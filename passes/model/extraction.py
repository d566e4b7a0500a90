"""Models made from models: some nodes as a model of their own, functions inlined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto

from passes.graph.index import GraphIndex, computed_values, extract, values_read
from passes.graph.traversal import inline_functions, reads_of
from passes.weights.detached import DetachedModel


def extract_nodes(
    model: DetachedModel, nodes: Sequence[NodeProto], types: Mapping[str, ValueInfoProto]
) -> DetachedModel | None:
    """`nodes` as a model; None when an input or output of it has no known type.

    Values that the nodes only read become inputs; values that they only compute become outputs.
    """
    index = GraphIndex(model.proto.graph)
    read = {name for node in nodes for name in reads_of(node)}
    inputs = [name for name in values_read(nodes) if name not in index.initializers]
    outputs = [name for name in computed_values(nodes) if name in index.outputs or name not in read]
    if not outputs or any(name not in types for name in (*inputs, *outputs)):
        return None
    typed_inputs, typed_outputs = ([types[name] for name in names] for names in (inputs, outputs))
    return model.with_proto(extract(model.proto, nodes, inputs=typed_inputs, outputs=typed_outputs))


def lead_in(part: onnx.ModelProto, info: ValueInfoProto) -> None:
    """Add an input to `part`, and a node that computes the value `info` from it, as a node did in the source model.

    `info` itself does not become an input: onnxoptimizer's fuse_qkv aborts where three products read one input.
    """
    entry = part.graph.input.add()
    entry.CopyFrom(info)
    entry.name = f"outside/{info.name}"
    op = "Not" if info.type.tensor_type.elem_type == TensorProto.BOOL else "Neg"
    part.graph.node.add(op_type=op, input=[entry.name], output=[info.name])
    part.graph.value_info.append(info)


def with_functions_inlined(model: DetachedModel) -> DetachedModel:
    """`model` itself where it has no functions. The values of its own graph keep their names."""
    return model.with_proto(inline_functions(model.proto)) if model.proto.functions else model
