"""Weights that are stored as whole numbers with scales, as finders see them; checkers read them with code of their own.

In ONNX's form DequantizeLinear makes the weight, for the tensor as a whole, for each channel or for each block. In that
of onnxruntime MatMulNBits reads it packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onnx import NodeProto, TensorProto

from passes.structures.types import PACKED, QUANTIZED
from passes.structures.view import DEQUANTIZE, LAYOUT_OPS, QUANTIZE, GraphView, attribute_of, op_of


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A constant that DequantizeLinear makes of `stored`: of whole numbers, or of floats that are quantized first."""

    name: str
    stored: TensorProto
    digest: str
    """Of how the constant is computed, `types.QUANTIZED`, and not of its numbers."""


def quantized_weight(view: GraphView, name: str) -> QuantizedWeight | None:
    """The quantized weight `name`, seen through layout ops but no casts; None if it is something else."""
    last = view.producers.get(view.behind(name, LAYOUT_OPS - {"Cast"}))
    if last is None or last.op_type != DEQUANTIZE or last.output[0] not in view.folded:
        return None
    first = view.producers.get(last.input[0])
    chain = [last] if first is None or first.op_type != QUANTIZE else [first, last]
    stored = view.tensor_at(chain[0].input[0])
    if stored is None:
        return None
    texts = [view.model.digest(stored)]
    for node in chain:
        texts += [_digest_at(view, name) for name in node.input[1:3]]
        texts += [str(attribute_of(node, "axis", 1)), str(attribute_of(node, "block_size", 0))]
    return QuantizedWeight(view.behind(chain[0].input[0], LAYOUT_OPS), stored, QUANTIZED + "/".join(texts))


def packing_of(view: GraphView, node: NodeProto) -> str:
    """What follows the digest of the matrix that MatMulNBits reads: its scales, and how it is packed. Else empty."""
    if op_of(node) != NBITS:
        return ""
    tensors = [_digest_at(view, name) for name in node.input[2:5]]
    return PACKED + "/".join((*tensors, str(attribute_of(node, "bits", 4)), str(attribute_of(node, "block_size", 0))))


def _digest_at(view: GraphView, name: str) -> str:
    tensor = view.tensor_at(name) if name else None
    return "" if tensor is None else view.model.digest(tensor)


NBITS: Final = "com.microsoft.MatMulNBits"
