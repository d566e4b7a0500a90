"""Graph → CompiledProgram → outputs, on torch tensors."""

from __future__ import annotations

from pipeline.runtime.compile import CompiledProgram, compile_graph
from pipeline.runtime.entries import CompiledEntries, compile_graphs

__all__ = ["CompiledEntries", "CompiledProgram", "compile_graph", "compile_graphs"]
