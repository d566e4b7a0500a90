"""Graph → CompiledProgram → outputs, on torch tensors."""

from __future__ import annotations

from pipeline.runtime.compile import CompiledProgram, compile_graph

__all__ = ["CompiledProgram", "compile_graph"]
