"""The dataclasses of an IR."""

from pipeline.torch_ir import IR, OpNode, TensorMeta

__all__ = ["IR", "OpNode", "TensorMeta"]
