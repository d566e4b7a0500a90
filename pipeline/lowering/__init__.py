"""Emitters by op family, the attribute codec, and Graph → kernel calls. Knows neither torch nor onnx."""

from __future__ import annotations

from pipeline.lowering.attrs import pack, unpack
from pipeline.lowering.emit import with_kernels
from pipeline.lowering.emitters import EMITTERS, VIEWS
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import Layout
from pipeline.lowering.lower import KernelCall, lower

__all__ = ["EMITTERS", "VIEWS", "KernelCall", "Kind", "Layout", "lower", "pack", "unpack", "with_kernels"]
