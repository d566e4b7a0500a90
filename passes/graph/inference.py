"""What ONNX's own code finds of a model, under limits: types by shape inference, constants by its evaluator.

A constant is computed by ONNX's reference evaluator: what grows, or may not end, in a process with limits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
import onnx
from onnx import GraphProto, TensorProto, ValueInfoProto

from passes.errors import StepFailed
from passes.graph.index import GraphIndex
from passes.graph.op_facts import LAYOUT_OPS
from passes.graph.traversal import every_graph
from passes.worker.inference import InferenceError, call_limited, infer_shapes

FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16)
"""The types of tensors that can be quantized."""

EVERY_FLOAT: Final = (*FLOATS, TensorProto.BFLOAT16, TensorProto.DOUBLE)
"""`FLOATS`, and the float types that no quantizer takes."""

Dims = tuple[int | str | None, ...]
"""A shape: known sizes, names of symbolic sizes, and None for dims with neither."""


def infer_types(model: onnx.ModelProto, *, data_prop: bool = False) -> GraphProto:
    """The graph with the types of all values that inference can reach, also in bodies; if inference fails, the graph of
    `model` with the types that it declares.

    Args:
        data_prop: compute the values of sizes too, so that more shapes are known.
    """
    try:
        return infer_shapes(model, data_prop=data_prop).graph
    except InferenceError:
        return model.graph


def types_of(model: onnx.ModelProto) -> dict[str, ValueInfoProto]:
    """The inferred type of every value of the main graph that inference can reach."""
    return GraphIndex(infer_types(model)).types


def dims_of(info: ValueInfoProto) -> Dims | None:
    """The shape of a tensor; None where the rank is not known, and for a value that is no tensor."""
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)


def float_tensors(model: onnx.ModelProto) -> frozenset[str]:
    """The names of the float values that are known of the model: its inputs, its outputs, and what shape inference
    finds of the rest."""
    return frozenset(float_shapes(model))


def float_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...] | None]:
    """The same values with their shapes; None for one of unknown rank, and -1 for a dim that is open."""
    return {name: shape for name, (_, shape) in find_floats(model, FLOATS).items()}


def find_floats(
    model: onnx.ModelProto, types: Collection[int], *, in_bodies: bool = False
) -> dict[str, tuple[int, tuple[int, ...] | None]]:
    """The values of one of `types`, each with its type and its shape; values of bodies too if `in_bodies`."""
    inferred = infer_types(model)
    graphs = every_graph(inferred) if in_bodies else (inferred,)
    infos = (info for graph in graphs for info in GraphIndex(graph).types.values())
    kinds = ((info, info.type.tensor_type.elem_type) for info in infos)
    return {info.name: (kind, _sizes_of(info)) for info, kind in kinds if kind in types}


def _sizes_of(info: ValueInfoProto) -> tuple[int, ...] | None:
    dims = dims_of(info)
    return None if dims is None else tuple(dim if isinstance(dim, int) else -1 for dim in dims)


NEVER_GROW: Final = LAYOUT_OPS | {"Slice", "Split", "Cast", "DequantizeLinear"}
"""Operators whose outputs hold no more elements than their inputs, and take as long."""

MOST_SECONDS: Final = 10.0


def evaluate(model: onnx.ModelProto) -> np.ndarray | None:
    """The output of a model without inputs; None where the evaluator cannot compute it, or not within its limits."""
    try:
        if all(node.op_type in NEVER_GROW for node in model.graph.node):
            return compute(model.SerializeToString())
        return call_limited(compute, MOST_SECONDS, content=model.SerializeToString())
    except (StepFailed, ValueError):
        return None


def compute(content: bytes) -> np.ndarray | None:
    """`evaluate`, in this process.

    Raises:
        StepFailed: the evaluator lacks an operator, or fails.
    """
    from onnx.reference import ReferenceEvaluator  # a tenth of a second, which most runs do not need

    try:
        (values,) = ReferenceEvaluator(onnx.load_from_string(content)).run(None, {})
    except Exception as error:
        raise StepFailed(f"{type(error).__name__}: {error}") from error
    return values if isinstance(values, np.ndarray) else None
