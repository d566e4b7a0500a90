"""Graph → CompiledProgram → outputs, on torch tensors; `capture` once, `replay` many times."""

from passes.doors import list_names
from pipeline.runtime.capture import Capture as Capture
from pipeline.runtime.capture import CaptureReport as CaptureReport
from pipeline.runtime.capture import CaptureWarning as CaptureWarning
from pipeline.runtime.capture import Snapshot as Snapshot
from pipeline.runtime.checked_builder import CheckedBuilder as CheckedBuilder
from pipeline.runtime.compile import CompiledProgram as CompiledProgram
from pipeline.runtime.compile import compile_graph as compile_graph
from pipeline.runtime.entries import CompiledEntries as CompiledEntries
from pipeline.runtime.entries import EntryPoint as EntryPoint
from pipeline.runtime.entries import compile_graphs as compile_graphs
from pipeline.runtime.open_dims import SizedProgram as SizedProgram
from pipeline.runtime.open_dims import compile_open_graph as compile_open_graph
from pipeline.runtime.recording import RecordingDevice as RecordingDevice

list_names(__name__)
