"""Ops that only move elements: what they make of distinct elements says what they make of all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import NodeProto, helper

from passes.model.bodies import bodies_of
from passes.model.weights import DetachedModel

__all__ = ["Distinct", "can_be_distinct", "data_operands", "distinct_arrays", "inferred_shapes"]


@dataclass(frozen=True, slots=True)
class Distinct:
    """A tensor in which no number occurs twice; `dtype` is numpy's name."""

    shape: tuple[int, ...]
    dtype: str


def data_operands(node: NodeProto) -> list[str]:
    """The inputs whose elements `node` moves; empty when it does something else with them."""
    if node.domain not in ("", "ai.onnx"):
        return []
    return list(node.input) if node.op_type == "Concat" else list(node.input[: node.op_type in MOVES])


def inferred_shapes(model: DetachedModel) -> dict[str, Distinct]:
    """The values of a known size, by inference alone: what a model says of its values itself may be wrong."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    _forget_types(proto.graph)
    try:
        graph = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    except Exception:  # then nothing is known
        return {}
    found = {}
    for info in (*graph.value_info, *graph.input, *graph.output):
        tensor = info.type.tensor_type
        dims = [dim.dim_value for dim in tensor.shape.dim if dim.HasField("dim_value")]
        if tensor.elem_type and tensor.HasField("shape") and len(dims) == len(tensor.shape.dim):
            found[info.name] = Distinct(tuple(dims), helper.tensor_dtype_to_np_dtype(tensor.elem_type).name)
    return found


def _forget_types(graph: onnx.GraphProto) -> None:
    """Leave no type but those of the inputs."""
    del graph.value_info[:]
    for output in graph.output:
        output.ClearField("type")
    for node in graph.node:
        for attribute in node.attribute:
            for inner in bodies_of(attribute):
                _forget_types(inner)


def can_be_distinct(wanted: Iterable[Distinct]) -> bool:
    """Whether each dtype tells as many numbers apart as all of them together have elements."""
    every = list(wanted)
    elements = sum(math.prod(one.shape) for one in every)
    return all(elements < DISTINCT.get(one.dtype, 0) for one in every)


def distinct_arrays(wanted: Mapping[str, Distinct]) -> dict[str, np.ndarray]:
    """Arrays that share no number, and in which none occurs twice."""
    arrays: dict[str, np.ndarray] = {}
    start = 1
    for name, one in wanted.items():
        stop = start + math.prod(one.shape)
        arrays[name] = np.arange(start, stop).astype(one.dtype).reshape(one.shape)
        start = stop
    return arrays


MOVES: Final = frozenset(
    {
        *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"),
        *("Slice", "Expand", "Tile", "Split", "Gather", "DepthToSpace", "SpaceToDepth"),
    }
)
"""Ops that move the elements of their first input; the others say where to."""

DISTINCT: Final[Mapping[str, int]] = {"float32": 2**24, "float64": 2**53, "int32": 2**31, "int64": 2**53}
"""Dtype → up to where it tells whole numbers apart."""
