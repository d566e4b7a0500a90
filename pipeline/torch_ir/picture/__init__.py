"""An IR as a picture: as Mermaid text (mermaid.py), and as a file (file.py)."""

from pipeline.torch_ir.picture.mermaid import generate_op_distribution_pie, ir_to_mermaid

__all__ = ["generate_op_distribution_pie", "ir_to_mermaid"]
