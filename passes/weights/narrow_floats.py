"""Stored tensors in formats that onnxruntime has no kernels for, dequantized by ONNX's own evaluator before a run.

onnxruntime 1.31 has no DequantizeLinear of floats of 4 bits, and none whose scales are powers of 2 in 8 bits. Such
weights are constants, so a run needs only the floats that they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from passes.graph.index import GraphIndex, copy_of, extract, replace_entries
from passes.weights.stand_ins import Weight

WITHOUT_KERNEL: Final = frozenset({TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E8M0})


def dequantize_stored(proto: onnx.ModelProto, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Store in `proto`, in place, what DequantizeLinear makes of such tensors.

    Args:
        proto: the model, which is changed.
        weights: by initializer name, of those that hold no data of their own.

    Returns:
        `weights` with those that were made.
    """
    graph = proto.graph
    if not any(tensor.data_type in WITHOUT_KERNEL for tensor in graph.initializer):
        return weights
    index = GraphIndex(graph)
    stored: dict[str, TensorProto] = dict(index.initializers)

    def is_constant(name: str) -> bool:
        producer = index.producers.get(name)
        if producer is None or producer.op_type != "DequantizeLinear":
            return name in stored
        return all(map(is_constant, filter(None, producer.input)))

    def array_of(name: str) -> np.ndarray:
        if name not in stored:
            return dequantize(index.producers[name])
        return weights[name].array() if name in weights else numpy_helper.to_array(stored[name])

    def dequantize(node: NodeProto) -> np.ndarray:
        return _evaluate(node, {name: array_of(name) for name in node.input if name}, proto)

    folded: dict[str, Weight] = {}
    for node in graph.node:
        types = {stored[name].data_type for name in node.input if name in stored}
        if (
            node.op_type == "DequantizeLinear"
            and types & WITHOUT_KERNEL
            and all(map(is_constant, filter(None, node.input)))
        ):
            array = np.ascontiguousarray(dequantize(node))
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            folded[node.output[0]] = Weight(array.shape, kind, array.reshape(-1).view(np.uint8), "")
    if not folded:
        return weights
    replace_entries(graph.node, [node for node in graph.node if folded.keys().isdisjoint(node.output)])
    for name, weight in folded.items():
        graph.initializer.add(name=name, data_type=weight.data_type, dims=weight.dims)
    return {**weights, **folded}


def _evaluate(node: NodeProto, feeds: dict[str, np.ndarray], proto: onnx.ModelProto) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator  # a tenth of a second, which most sessions do not need

    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=node.output[0])]
    alone = extract(proto, [copy_of(node)], inputs=inputs, outputs=outputs, initializers=())
    results: Any = ReferenceEvaluator(alone).run(None, feeds)
    return np.asarray(results[0])
