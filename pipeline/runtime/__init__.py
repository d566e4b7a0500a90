"""Graph → CompiledProgram → outputs, on torch tensors; `capture` once, `replay` many times."""

from __future__ import annotations

from pipeline.runtime.capture import Capture, CaptureReport, CaptureWarning, Snapshot
from pipeline.runtime.checked_builder import CheckedBuilder
from pipeline.runtime.compile import CompiledProgram, compile_graph
from pipeline.runtime.entries import CompiledEntries, EntryPoint, compile_graphs
from pipeline.runtime.open_dims import SizedProgram, compile_open_graph
from pipeline.runtime.recording import RecordingDevice

__all__ = [
    "Capture",
    "CaptureReport",
    "CaptureWarning",
    "CheckedBuilder",
    "CompiledEntries",
    "CompiledProgram",
    "EntryPoint",
    "RecordingDevice",
    "SizedProgram",
    "Snapshot",
    "compile_graph",
    "compile_graphs",
    "compile_open_graph",
]
