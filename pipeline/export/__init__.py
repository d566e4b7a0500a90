"""Model sources, and torch → ONNX. Names that need torch are imported at their first use."""

from typing import TYPE_CHECKING

from passes.doors import open_door
from pipeline.export.load import load_source
from pipeline.export.source import Example, InputSpec, OnnxSource, Source, TorchSource, draw_inputs, named_dims

if TYPE_CHECKING:
    from pipeline.export.exported import ExportedModel as ExportedModel
    from pipeline.export.exported import save_model as save_model
    from pipeline.export.reference import run_torch as run_torch
    from pipeline.export.to_onnx import export_onnx as export_onnx
    from pipeline.export.writes import as_configured as as_configured
    from pipeline.export.writes import describe_lifted as describe_lifted
else:
    __all__, __getattr__ = open_door(__name__, __file__)
