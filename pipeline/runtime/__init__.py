"""Graph → CompiledProgram → outputs, on torch tensors."""

from __future__ import annotations

from pipeline.runtime.compile import CompiledProgram, compile_graph
from pipeline.runtime.entries import CompiledEntries, compile_graphs
from pipeline.runtime.open_dims import ProgramCache, compile_open_graph

__all__ = [
    "CompiledEntries",
    "CompiledProgram",
    "ProgramCache",
    "compile_graph",
    "compile_graphs",
    "compile_open_graph",
]
