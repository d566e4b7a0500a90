"""Weights of a file that another tool has quantized to 4 bits, and the models that have them in place of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from passes.encodings.encoding import Precision
from passes.encodings.from_qdq import DEQUANTIZED, choose_stems, dequantize_node
from passes.errors import UsageError
from passes.graph.index import replace_all_uses_with, replace_entries
from passes.graph.op_facts import opset_of
from passes.rewrites.matmul_nbits import OPSET, NibbleWeight
from passes.weights.detached import DetachedModel, detach


@dataclass(frozen=True, slots=True)
class FileWeights:
    """What a file has in place of stored tensors of a model.

    Args:
        nibbles: weight → its integers, zero points and scales.
        turned: the weights that the model stores as [outputs, inputs].
        summary: how many weights of which format, as a phrase.
        minima: weight → float32 [blocks, N], what is taken off each element of a block after it was scaled.
        floats: weight → float32 values, as the model stores it; of what the file has in other formats.
    """

    nibbles: Mapping[str, NibbleWeight]
    turned: Collection[str]
    summary: str
    minima: Mapping[str, np.ndarray] = field(default_factory=dict)
    floats: Mapping[str, np.ndarray] = field(default_factory=dict)

    def store_floats(self, model: DetachedModel) -> DetachedModel:
        """The model with the floats that the file stands for: what `store` has to compute.

        Args:
            model: the float model.

        Returns:
            The same graph with other values.
        """
        values = dict(self.floats)
        for name, weight in self.nibbles.items():
            array = dequantize(weight, self.minima.get(name))
            values[name] = array if name in self.turned else np.ascontiguousarray(array.T)
        return model.with_arrays(values)

    def store(self, model: DetachedModel) -> DetachedModel:
        """The model with the very integers of the file, and DequantizeLinear after them, in place of stored tensors.

        Args:
            model: the float model.

        Returns:
            The quantized model; nodes keep their names.

        Raises:
            UsageError: the model's opset has no blocks of 4 bits.
        """
        opset = opset_of(model.proto)
        if opset < OPSET:
            raise UsageError(
                f"the model has opset {opset}, and DequantizeLinear has blocks of 4 bits starting at opset {OPSET}; "
                f"put {{convert-opset: {{to: {OPSET}}}}} before"
            )
        model = model.with_arrays(self.floats)
        proto = model.copy_proto()
        stems = choose_stems(proto.graph, self.nibbles)
        nodes: list[NodeProto] = []
        tensors: list[TensorProto] = []
        for name, weight in self.nibbles.items():
            axis = int(name in self.turned)
            parts = {
                "quantized": weight.integers,
                "scale": weight.scales.astype(np.float32),
                "zero_point": weight.zero_points,
            }
            for part, array in parts.items():
                dtype = np.float32 if part == "scale" else ml_dtypes.uint4
                array = np.ascontiguousarray(array.T if axis else array).astype(dtype)
                tensors.append(numpy_helper.from_array(array, f"{stems[name]}_{part}"))
            node = dequantize_node(stems[name], Precision(4, False, False, "block", weight.block), axis)
            nodes.append(node)
            if name in self.minima:
                added, constants = _take_off(node, self.minima[name], weight, axis)
                nodes += added
                tensors += constants
        renamed = {name: f"{stem}{DEQUANTIZED}" for name, stem in stems.items()}
        replace_all_uses_with(proto.graph.node, renamed)
        nodes += proto.graph.node
        replace_entries(proto.graph.node, nodes)
        kept = [tensor for tensor in proto.graph.initializer if tensor.name not in self.nibbles]
        replace_entries(proto.graph.initializer, [*kept, *tensors])
        del proto.graph.value_info[:]
        return detach(proto, known=model.weights)


def dequantize(weight: NibbleWeight, minima: np.ndarray | None = None) -> np.ndarray:
    """The floats that a weight stands for.

    Args:
        weight: the weight.
        minima: of its blocks, float32 [blocks, N].

    Returns:
        float32 [N, K].
    """
    rows, columns = weight.integers.shape
    padded = np.zeros((len(weight.scales) * weight.block, columns), np.float32)
    padded[:rows] = weight.integers
    blocks = padded.reshape(len(weight.scales), weight.block, columns)
    scaled = (blocks - weight.zero_points[:, None]) * weight.scales[:, None].astype(np.float32)
    return (scaled if minima is None else scaled - minima[:, None]).reshape(-1, columns)[:rows].T


def _take_off(
    node: NodeProto, minima: np.ndarray, weight: NibbleWeight, axis: int
) -> tuple[list[NodeProto], list[TensorProto]]:
    """The nodes that take the minimum of its block off each element of what `node` gives, and their constants."""
    result, title = node.output[0], node.output[0].removesuffix(DEQUANTIZED)
    node.output[0] = f"{title}_above_minimum"
    rows, columns = weight.integers.shape
    blocked = [len(minima), weight.block, columns] if axis == 0 else [columns, len(minima), weight.block]
    whole = [rows, columns] if axis == 0 else [columns, rows]
    array = minima[:, None, :] if axis == 0 else minima.T[:, :, None]
    constants = [
        numpy_helper.from_array(np.array(blocked, np.int64), f"{title}_blocks"),
        numpy_helper.from_array(np.ascontiguousarray(array, np.float32), f"{title}_minimum"),
        numpy_helper.from_array(np.array(whole, np.int64), f"{title}_shape"),
    ]
    first, minimum, last = (tensor.name for tensor in constants)
    added = [
        helper.make_node("Reshape", [node.output[0], first], [f"{title}_in_blocks"], name=f"{title}_Reshape"),
        helper.make_node("Sub", [f"{title}_in_blocks", minimum], [f"{title}_moved"], name=f"{title}_Sub"),
        helper.make_node("Reshape", [f"{title}_moved", last], [result], name=f"{title}_Reshape_back"),
    ]
    return added, constants
