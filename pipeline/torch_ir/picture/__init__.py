"""An IR as a picture: as Mermaid text (mermaid.py), and as SVG (svg.py)."""

from pipeline.torch_ir.picture.mermaid import generate_op_distribution_pie, ir_to_mermaid
from pipeline.torch_ir.picture.svg import ir_to_svg

__all__ = ["generate_op_distribution_pie", "ir_to_mermaid", "ir_to_svg"]
