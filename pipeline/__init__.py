"""From a torch module to verified ONNX, to a static IR, to a planned run. Start reading at `pipeline.run`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.config import RunConfig
    from pipeline.result import RunResult
    from pipeline.run import Pipeline

__all__ = ["Pipeline", "RunConfig", "RunResult"]


def __getattr__(name: str) -> Any:
    # Late, since a part of `pipeline` must not load the whole, and `--help` must not load torch.
    home = {"Pipeline": "run", "RunConfig": "config", "RunResult": "result"}.get(name)
    if home is None:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
