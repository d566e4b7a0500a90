"""onnx's own shape inference, as a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import onnx

from passes.context import PassContext
from passes.errors import StepFailed
from passes.step import Description, PassResult, Step, structure
from passes.weights.detached import DetachedModel
from passes.worker.inference import InferenceError, infer_shapes


@dataclass(frozen=True, slots=True)
class InferShapes(Step):
    """Write the inferred type and shape of every value into the model."""

    data_prop: bool = True
    name: str = field(default="infer_shapes", init=False)
    source: str = field(default="onnx", init=False)
    description: ClassVar[Description] = structure("Write the inferred type and shape of every value into the model")
    annotates: ClassVar[bool] = True

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        try:
            inferred = infer_shapes(model.proto, strict_mode=True, data_prop=self.data_prop)
        except InferenceError as error:
            raise StepFailed(f"shape inference: {error}") from error
        return PassResult(model.with_proto(inferred))

    def call_library(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=self.data_prop)

    def format_call(self) -> str:
        return f"onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop={self.data_prop})"
