"""From a torch module to verified ONNX, to a static IR, to a planned run. Start reading at `pipeline.run`."""

from __future__ import annotations

from pipeline.config import RunConfig
from pipeline.result import RunResult
from pipeline.run import Pipeline

__all__ = ["Pipeline", "RunConfig", "RunResult"]
