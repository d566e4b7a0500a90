"""What an exported program consists of."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from pipeline.torch_ir import TensorMeta, convert_exported_program
from pipeline.torch_ir.call import resolve
from pipeline.torch_ir.registry import NodeInfo

__all__ = ["GraphAnalyzer", "NodeInfo", "_dtype_to_str"]


def _dtype_to_str(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class GraphAnalyzer:
    """Reads an exported program as an IR, and shows its parts."""

    def __init__(self, exported: ExportedProgram) -> None:
        self._ir = convert_exported_program(exported)

    def get_graph_inputs(self) -> list[TensorMeta]:
        return self._ir.graph_inputs

    def get_graph_outputs(self) -> list[TensorMeta]:
        return self._ir.graph_outputs

    def get_weights(self) -> list[TensorMeta]:
        return self._ir.weights

    def get_weight_name_mapping(self) -> dict[str, str]:
        return self._ir.weight_name_mapping

    def get_call_function_nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(node.name, resolve(node.op_type) or node.op_type, node.inputs, node.outputs, node.attrs)
            for node in self._ir.nodes
        ]
