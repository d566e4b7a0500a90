"""Graph → Graph by fusions, and Graph → kernel calls. It imports neither torch nor onnx."""

from __future__ import annotations

from pipeline.lowering.lower import KernelCall, lower, with_kernels

__all__ = ["KernelCall", "lower", "with_kernels"]
