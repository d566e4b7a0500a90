"""Sparse tensors made dense, for readers that know dense ones only."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper

from passes.graph.index import copy_of
from passes.graph.traversal import every_graph, every_node


def without_sparse(model: ModelProto) -> ModelProto:
    """`model` with dense initializers and Constants in place of the sparse ones; itself where it has none.

    Args:
        model: its sparse tensors have passed the door (passes/load), which has seen that they fit into memory; no
            function of it holds a sparse Constant.
    """
    graphs = [graph for graph in every_graph(model.graph) if graph.sparse_initializer]
    if not graphs and not any(map(is_sparse, every_node(model.graph))):
        return model
    dense = copy_of(model)
    for graph in every_graph(dense.graph):
        graph.initializer.extend(map(dense_of, graph.sparse_initializer))
        del graph.sparse_initializer[:]
    for node in filter(is_sparse, every_node(dense.graph)):
        (attribute,) = node.attribute
        attribute.CopyFrom(helper.make_attribute("value", dense_of(attribute.sparse_tensor)))
    return dense


def is_sparse(node: NodeProto) -> bool:
    """Whether a node is a Constant with a sparse tensor."""
    return node.op_type == "Constant" and any(attribute.name == "sparse_value" for attribute in node.attribute)


def dense_of(sparse: SparseTensorProto) -> TensorProto:
    """The dense tensor of a sparse one, with its name: zero where it names no element."""
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(sparse.dims, values.dtype)
    flat = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))
    dense.reshape(-1)[flat] = values
    return numpy_helper.from_array(dense, sparse.values.name)
