"""A program of torch.export → IR."""

from __future__ import annotations

from torch.export import ExportedProgram

from pipeline.torch_ir import IR, ConversionError, OpNode, convert_exported_program
from torch_ir.aliases import get_conversion_fn, get_op_type
from torch_ir.analyzer import GraphAnalyzer, NodeInfo

__all__ = [
    "ConversionError",
    "GraphAnalyzer",
    "IRConverter",
    "NodeInfo",
    "OpNode",
    "convert_exported_program",
    "convert_node",
    "get_conversion_fn",
    "get_op_type",
]


class IRConverter:
    """`convert_exported_program` as a class, which pytorch-ir documents."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def convert(self, exported: ExportedProgram, model_name: str = "") -> IR:
        return convert_exported_program(exported, model_name, self.strict)


def convert_node(node_info: NodeInfo) -> OpNode:
    """The node that the conversion registered for its type returns; without one, the node as it was called."""
    kind = get_op_type(node_info.target)
    convert = get_conversion_fn(kind)
    if convert is not None:
        return convert(node_info)
    return OpNode(node_info.name, kind, node_info.input_metas, node_info.output_metas, node_info.attrs)
