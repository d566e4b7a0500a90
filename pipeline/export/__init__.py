"""Model sources, and torch → ONNX. Names that need torch are imported at their first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeline.export.load import load_source
from pipeline.export.source import Example, InputSpec, OnnxSource, Source, TorchSource, draw_inputs, named_dims

if TYPE_CHECKING:
    from pipeline.export.exported import ExportedModel, save_model
    from pipeline.export.reference import run_torch
    from pipeline.export.to_onnx import export_onnx
    from pipeline.export.writes import as_configured, describe_lifted

_LATE = {
    "ExportedModel": "exported",
    "as_configured": "writes",
    "describe_lifted": "writes",
    "export_onnx": "to_onnx",
    "run_torch": "reference",
    "save_model": "exported",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)
