"""An IR as Mermaid text."""

from pipeline.torch_ir import IR, generate_op_distribution_pie, ir_to_mermaid

__all__ = ["IR", "generate_op_distribution_pie", "ir_to_mermaid"]
