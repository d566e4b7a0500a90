"""The model that was run last, as something to prove others equal to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import onnx
from onnx import NodeProto, TensorProto

from passes.model.canonical import RANDOM_OPS, Meanings
from passes.model.weights import DetachedModel
from passes.proof.moves import Distinct, inferred_shapes

__all__ = ["Base", "is_opaque", "small_values"]

SMALL_ELEMENTS: Final = 2**14
"""Floating-point values of a known size up to this are held; whole numbers and bools always, as they are mostly shapes,
positions and masks."""


@dataclass(frozen=True)
class Base:
    """`model` with what is known of it."""

    model: DetachedModel
    meanings: Meanings

    @cached_property
    def places(self) -> Mapping[str, str]:
        """Meaning → the first value that has it."""
        found: dict[str, str] = {}
        for name, meaning in self.meanings.values.items():
            if name:
                found.setdefault(meaning, name)
        return found

    @cached_property
    def producers(self) -> Mapping[str, NodeProto]:
        return {name: node for node in self.model.proto.graph.node for name in node.output if name}

    @cached_property
    def initializers(self) -> Mapping[str, TensorProto]:
        return {tensor.name: tensor for tensor in self.model.proto.graph.initializer}

    @cached_property
    def shapes(self) -> Mapping[str, Distinct]:
        """Values whose shape and dtype are known for certain."""
        return inferred_shapes(self.model)

    @cached_property
    def inputs(self) -> frozenset[str]:
        return frozenset(info.name for info in self.model.proto.graph.input)


def is_opaque(node: NodeProto) -> bool:
    """A node that is not run in pieces: its value is another one each time, or it holds a graph."""
    return node.op_type in RANDOM_OPS or any(one.HasField("g") or one.graphs for one in node.attribute)


def small_values(model: DetachedModel) -> list[str]:
    """Computed values that are cheap to hold, by their inferred types."""
    try:
        graph = onnx.shape_inference.infer_shapes(model.proto).graph
    except Exception:  # what inference cannot read still has the types that it came with
        graph = model.proto.graph
    made = {name for node in model.proto.graph.node for name in node.output}
    return [info.name for info in graph.value_info if info.name in made and _is_small(info)]


def _is_small(info: onnx.ValueInfoProto) -> bool:
    if info.type.WhichOneof("value") != "tensor_type":
        return False
    tensor = info.type.tensor_type
    if tensor.elem_type in WHOLE:
        return True
    sizes = [dim.dim_value for dim in tensor.shape.dim if dim.HasField("dim_value")]
    if tensor.elem_type not in FLOATS or not tensor.HasField("shape") or len(sizes) < len(tensor.shape.dim):
        return False
    elements = 1
    for size in sizes:
        elements *= size
    return elements <= SMALL_ELEMENTS


WHOLE: Final = frozenset(
    {
        *(TensorProto.BOOL, TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    }
)
FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})
