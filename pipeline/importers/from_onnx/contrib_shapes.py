"""Shapes of the ops of onnxruntime's own domain, which ONNX's shape inference does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from pipeline.importers.from_onnx.attributes import Attributes
from pipeline.ir.spec import TensorSpec

__all__ = ["SHAPES", "qkv_sizes"]

Shapes = Callable[[onnx.NodeProto, Mapping[str, TensorSpec]], dict[str, TensorSpec]]


def qkv_sizes(attributes: Attributes, weight: TensorSpec) -> tuple[int, ...]:
    return attributes.integers("qkv_hidden_sizes") or (weight.sizes[1] // 3,) * 3


def attention_shapes(node: onnx.NodeProto, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    x, weight = specs[node.input[0]], specs[node.input[1]]
    hidden = qkv_sizes(Attributes(node), weight)[2]
    return {node.output[0]: TensorSpec((*x.shape[:2], hidden), x.dtype)}


SHAPES: dict[str, Shapes] = {"com.microsoft::Attention": attention_shapes}
