"""A model without its head as one part, `model`: tokens, pixels or sounds → last_hidden_state and the like."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from pipeline.config import InputConfig, ModelConfig
from pipeline.export.parts.holder import TaskPart, with_parameters
from pipeline.export.transformers_defaults import with_derived_inputs


class FeaturesPart(TaskPart):
    """The part `model`: the body of a model of transformers, without its head and without a cache."""

    def __init__(self, model: Any, section: ModelConfig, folder: Path | None = None) -> None:
        body = model.base_model
        super().__init__(body)
        self.folder = folder
        self.derived = with_derived_inputs(section.model_copy(update={"inputs": {}, "dims": {}}), body)
        self.forward = with_parameters(self.compute, list(self.derived.inputs))

    def compute(self, **tensors: Any) -> Any:
        """What the body returns."""
        known = inspect.signature(self.held_model.forward).parameters
        extra = {"use_cache": False} if "use_cache" in known else {}
        # not `model(…)`: the tracer would look for the model among the modules of the holder
        return self.held_model.forward(**tensors, **extra)

    def declarations(self) -> dict[str, InputConfig]:
        return dict(self.derived.inputs)

    def example(self) -> None:
        return None
