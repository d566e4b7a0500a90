"""Front ends of the IR: each `from_x` reads one kind of source and makes a Graph."""

from passes.doors import list_names
from pipeline.importers.from_onnx import from_onnx as from_onnx

list_names(__name__)
