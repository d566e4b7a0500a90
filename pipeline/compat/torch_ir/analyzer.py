"""pytorch-ir's `GraphAnalyzer`: the inputs, outputs, weights and nodes of an exported program."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from pipeline.runtime.tensors import dtype_name as _dtype_to_str
from pipeline.torch_ir import TensorMeta, convert_exported_program
from pipeline.torch_ir.calls import find_known_operator
from pipeline.torch_ir.registry import NodeInfo

__all__ = ["GraphAnalyzer", "NodeInfo", "_dtype_to_str"]


class GraphAnalyzer:
    """The parts of an exported program, read from its IR; single nodes come as torch.export has them."""

    def __init__(self, exported: ExportedProgram) -> None:
        self._ir = convert_exported_program(exported)
        self._nodes = {node.name: node for node in exported.graph.nodes}
        self._stored = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.target is not None}

    def get_graph_inputs(self) -> list[TensorMeta]:
        return list(self._ir.graph_inputs)

    def get_graph_outputs(self) -> list[TensorMeta]:
        return list(self._ir.graph_outputs)

    def get_weights(self) -> list[TensorMeta]:
        return list(self._ir.weights)

    def get_weight_name_mapping(self) -> dict[str, str]:
        return dict(self._ir.weight_name_mapping)

    def get_call_function_nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(
                node.name,
                find_known_operator(node.op_type) or node.op_type,
                node.inputs,
                node.outputs,
                dict(node.attrs),
            )
            for node in self._ir.nodes
        ]

    def get_node_input_meta(self, node: Node) -> list[TensorMeta]:
        """The tensors that `node` reads, with their producers."""
        return [
            meta if read.name in self._stored else TensorMeta(meta.name, meta.shape, meta.dtype, read.name, place)
            for read in node.all_input_nodes
            for place, meta in enumerate(_output_metas(read))
        ]

    def get_node_output_meta(self, node_name: str) -> list[TensorMeta]:
        """The tensors that the node makes; none where there is no such node."""
        return [*_output_metas(self._nodes[node_name])] if node_name in self._nodes else []


def _output_metas(node: Node) -> Iterator[TensorMeta]:
    """The tensors that `node` makes; several results are named by their index: `split_0`, `split_1`."""
    value = node.meta.get("val")
    several = isinstance(value, list | tuple)
    for index, result in enumerate(value if several else [value]):
        if isinstance(result, torch.Tensor):
            name = f"{node.name}_{index}" if several else node.name
            yield TensorMeta(name, tuple(result.shape), _dtype_to_str(result.dtype))
