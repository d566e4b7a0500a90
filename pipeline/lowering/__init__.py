"""Graph → Graph by fusions, and Graph → kernel calls. It imports neither torch nor onnx."""

from pipeline.lowering.lower import KernelCall, lower, with_kernels
