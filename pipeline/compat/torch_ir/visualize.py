"""Mermaid."""

from pipeline.torch_ir import generate_op_distribution_pie, ir_to_mermaid

__all__ = ["generate_op_distribution_pie", "ir_to_mermaid"]
