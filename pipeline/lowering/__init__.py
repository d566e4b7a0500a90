"""Kinds of kernels by op family, the attribute codec, and Graph → kernel calls. It imports neither torch nor onnx."""

from __future__ import annotations

from pipeline.lowering.attrs import pack, unpack
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import Layout
from pipeline.lowering.lower import KernelCall, lower, with_kernels
from pipeline.lowering.tables import EMITTERS, KINDS, wrong_schema

__all__ = [
    "EMITTERS",
    "KINDS",
    "KernelCall",
    "Kind",
    "Layout",
    "lower",
    "pack",
    "unpack",
    "with_kernels",
    "wrong_schema",
]
