"""Separate Q, K and V projections, found by the shape of attention: softmax(Q·Kᵀ)·V, traced back to three matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx
from onnx import NodeProto, TensorProto

from passes.structures.base import Found, Instance, KeptWeight
from passes.structures.qkv_check import lost_projections
from passes.structures.view import GraphView, module_of
from passes.weights import DetachedModel, digest_of

__all__ = ["SeparateQKV"]

SCORE_OPS = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Where", "Min", "Max", "Clip", "Tanh", "MatMul"),
        *("Cast", "CastLike", "Reshape", "Identity", "Expand"),
    }
)
"""What may stand between Q·Kᵀ and the softmax: scale, mask, bias, soft cap, talking heads."""

WEIGHT_OPS = frozenset(
    {"Where", "Mul", "Dropout", "MatMul", "Cast", "CastLike", "Reshape", "Identity", "Transpose", "Expand"}
)
"""What may stand between the softmax and its product with V."""

HEAD_OPS = frozenset(
    {
        *("Reshape", "Transpose", "Identity", "Cast", "CastLike", "Squeeze", "Unsqueeze", "Expand", "Tile", "Flatten"),
        *("Add", "Sub", "Mul", "Div", "Neg", "Concat", "Slice", "Split", "Gather", "Where"),
        *("Pow", "ReduceMean", "Sqrt", "Reciprocal", "LayerNormalization", "RMSNormalization", "SequenceAt"),
        *("SplitToSequence", "LpNormalization", "ReduceL2", "Clip", "RotaryEmbedding"),
    }
)
"""What may stand between a projection and its place in attention: heads, rotary embedding, norms, KV cache."""


@dataclass(frozen=True, slots=True)
class Projection:
    node: NodeProto
    weight: TensorProto


class SeparateQKV:
    """Three projections with a weight of their own each, feeding one attention (MHA, GQA, MQA, cross-attention)."""

    kind: ClassVar[str] = "qkv"
    what: ClassVar[str] = "separate Q, K and V projections"

    def find(self, model: DetachedModel) -> Found:
        view = GraphView(model)
        instances: list[Instance] = []
        merged: list[str] = []
        attentions = 0
        for query, key, value in _attentions(view, model.proto.graph):
            attentions += 1
            triple = [_projection_behind(view, name) for name in (query, key, value)]
            projections = [projection for projection in triple if projection is not None]
            if len(projections) < 3:
                continue
            if len({projection.node.output[0] for projection in projections}) < 3:
                dims = "×".join(str(dim) for dim in projections[0].weight.dims)
                merged.append(f"{projections[0].weight.name} ({dims})")
                continue
            instances.append(_instance(view, model, projections, len(instances)))
        return Found(tuple(instances), _instead(attentions, merged))

    def lost(self, instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
        return lost_projections(instances, model)


def _attentions(view: GraphView, graph: onnx.GraphProto) -> list[tuple[str, str, str]]:
    """The values that enter each attention as Q, K and V."""
    found = []
    for node in graph.node:
        if node.op_type == "Attention" and node.domain == "" and len(node.input) >= 3:
            found.append((node.input[0], node.input[1], node.input[2]))
        if node.op_type != "Softmax":
            continue
        scores = next((up for up in view.upstream(node.input[0], SCORE_OPS) if _mixes(view, up)), None)
        context = next((hit for hit in view.downstream(node.output[0], WEIGHT_OPS) if _mixes(view, hit[0])), None)
        if scores is None or context is None:
            continue
        matmul, weights = context
        value = matmul.input[1] if matmul.input[0] == weights else matmul.input[0]
        found.append((scores.input[0], scores.input[1], value))
    return found


def _mixes(view: GraphView, node: NodeProto) -> bool:
    """A product of two computed values. One with a constant (talking heads mix heads so) is on the way."""
    operands = [name for name in node.input if name]
    return node.op_type in ("MatMul", "Einsum") and len(operands) == 2 and not any(map(view.is_constant, operands))


def _projection_behind(view: GraphView, name: str) -> Projection | None:
    for node in view.upstream(name, HEAD_OPS):
        projection = _as_projection(view, node)
        if projection is not None:
            return projection
    return None


def _as_projection(view: GraphView, node: NodeProto) -> Projection | None:
    """`node` as a product of data with a constant matrix, or None."""
    if node.op_type not in ("MatMul", "Gemm", "Conv") or view.is_constant(node.input[0]):
        return None
    weight = view.weight_behind(node.input[1])
    if weight is None:
        return None
    dims = list(weight.dims)
    is_matrix = len(dims) == 2 and min(dims) > 1
    is_pointwise = node.op_type == "Conv" and len(dims) > 2 and set(dims[2:]) == {1}
    return Projection(node, weight) if is_matrix or is_pointwise else None


def _instance(view: GraphView, model: DetachedModel, projections: list[Projection], index: int) -> Instance:
    module = module_of([projection.node for projection in projections])
    weights = []
    for role, projection in zip("QKV", projections, strict=True):
        array = model.array(projection.weight)
        matrix = array.reshape(array.shape[0], -1)
        digests = frozenset({model.digest(projection.weight), digest_of(matrix.T)})
        weights.append(KeptWeight(role, projection.weight.name, digests))
    outputs = [projection.node.output[0] for projection in projections]
    sums = [_behind_bias(view, name) for name in outputs]
    # A pin needs a type; where inference gives none, the checker alone stands guard.
    known = all(name in view.types for name in (*outputs, *sums))
    pins, loose = (tuple(view.types[name] for name in names if known) for names in (outputs, sums))
    return Instance("qkv", module or f"attention {index}", module, tuple(weights), pins, loose)


def _behind_bias(view: GraphView, name: str) -> str:
    """The sum with a constant that alone reads `name`, or `name` itself: product and sum may become a Gemm."""
    readers = view.consumers.get(name, [])
    if len(readers) == 1 and readers[0].op_type == "Add" and any(map(view.is_constant, readers[0].input)):
        return readers[0].output[0]
    return name


def _instead(attentions: int, merged: list[str]) -> str:
    if merged:
        plural = "s" if len(merged) > 1 else ""
        return (
            f"{len(merged)} attention block{plural} whose Q, K and V are one matrix in the source already: "
            + ", ".join(merged[:3])
            + (" …" if len(merged) > 3 else "")
        )
    if attentions:
        return f"{attentions} attention block(s) whose Q, K and V do not come from three matrices"
    return "no attention (no softmax between two matrix products)"
