"""The float tensors of a model, and along which axes a product reads its weight."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import onnx
from onnx import NodeProto, TensorProto

from passes.graph.traversal import every_graph
from passes.worker.inference import infer_shapes

FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16)
"""The types of tensors that can be quantized."""

EVERY_FLOAT: Final = (*FLOATS, TensorProto.BFLOAT16, TensorProto.DOUBLE)
"""With those that no quantizer takes."""


def float_tensors(proto: onnx.ModelProto) -> frozenset[str]:
    """The names of the float values that are known of the model: its inputs, its outputs, and what shape inference
    finds of the rest."""
    return frozenset(float_shapes(proto))


def float_shapes(proto: onnx.ModelProto) -> dict[str, tuple[int, ...] | None]:
    """The same values with their shapes; None for one of unknown rank, and -1 for a dim that is open."""
    return {name: shape for name, (_, shape) in find_floats(proto, FLOATS).items()}


def find_floats(
    proto: onnx.ModelProto, types: Collection[int], *, in_bodies: bool = False
) -> dict[str, tuple[int, tuple[int, ...] | None]]:
    """The values of one of `types`, each with its type and its shape; those of bodies too if `in_bodies`."""
    inferred = infer_shapes(proto).graph
    graphs = every_graph(inferred) if in_bodies else (inferred,)
    infos = (info for graph in graphs for info in (*graph.input, *graph.value_info, *graph.output))
    kinds = ((info, info.type.tensor_type.elem_type) for info in infos)
    return {info.name: (kind, _shape_of(info)) for info, kind in kinds if kind in types}


def _shape_of(info: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    kind = info.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)


def weight_axes(node: NodeProto, index: int, rank: int) -> tuple[int | None, int | None] | None:
    """The axes of channels and of sums of the weight at input `index`; None if it is no weight."""
    attributes = {entry.name: entry.i for entry in node.attribute}
    match node.op_type, index:
        case "MatMul", (0 | 1) if rank >= 2:
            return (rank - 1, rank - 2) if index == 1 else (rank - 2, rank - 1)
        case "Gemm", 1:
            return (0, 1) if attributes.get("transB") else (1, 0)
        case "Gemm", 0:
            return (1, 0) if attributes.get("transA") else (0, 1)
        case "Conv", 1:
            return 0, 1
        case "ConvTranspose", 1:
            return (1, 0) if attributes.get("group", 1) == 1 else (None, None)
        case (("LSTM" | "GRU" | "RNN"), (1 | 2)):
            return None, None
    return None
