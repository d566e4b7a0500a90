"""The encodings of a model with QuantizeLinear and DequantizeLinear, by the names of the float tensors.

Tools name the values around these operators in their own ways. The float tensor has the name of the quantized value,
of the dequantized output of the model, or of the stored integers without the affix that the tool adds. The names that
quantized models of our own have, and DequantizeLinear of a stored tensor in them, are at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from passes.encodings.encoding import LPBQ_SCALES, Axes, Encoding, Granularity, Precision, find_axes, is_same_encoding
from passes.errors import UsageError
from passes.graph.index import GraphIndex
from passes.graph.op_facts import attribute_of
from passes.graph.traversal import bodies_in, every_graph, own_names
from passes.weights.detached import DetachedModel


def read_qdq(model: DetachedModel) -> dict[str, Encoding]:
    """The encodings of `model` by float tensor.

    Raises:
        UsageError: no encodings, an encoding that is not integers with constant scales, or two for one tensor.
    """
    reader = QdqReader(model)
    found: dict[str, Encoding] = {}
    for node in model.proto.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            if node.op_type in OPAQUE:
                raise UsageError(
                    f"encodings: {node.name or node.output[0]!r} is a {node.op_type}, whose scales are not read; "
                    "expected QuantizeLinear and DequantizeLinear"
                )
            continue
        read = reader.read_quantizer(node) if node.op_type == "QuantizeLinear" else reader.read_stored(node)
        if read is None:
            continue
        name, encoding = read
        known = found.setdefault(name, encoding)
        if not is_same_encoding(known, encoding):
            raise UsageError(f"encodings: the model quantizes {name!r} in two ways, expected one for each tensor")
    if not found:
        raise UsageError("encodings: the model has no QuantizeLinear or DequantizeLinear, so there is nothing to read")
    return found


def read_weight_axes(model: DetachedModel) -> dict[str, Axes]:
    """The axes of the quantized weights of `model`, by the float tensors of `read_qdq`."""
    reader, names, shapes = QdqReader(model), dict[str, str](), dict[str, tuple[int, ...]]()
    for node in model.proto.graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        maker = model.index.producers.get(node.input[0])
        quantizer = maker if maker is not None and maker.op_type == "QuantizeLinear" else None
        read = reader.read_stored(node) if quantizer is None else reader.read_quantizer(quantizer)
        tensor = reader.tensor((quantizer or node).input[0])
        if read is not None and tensor is not None:
            names[node.output[0]], shapes[node.output[0]] = read[0], tuple(tensor.dims)
    return {names[value]: axes for value, axes in find_axes(model, shapes).items()}


class QdqReader:
    """Reads single operators of one model."""

    def __init__(self, model: DetachedModel) -> None:
        self._model = model
        index = model.index
        self._stored: dict[str, TensorProto] = {}
        for graph in every_graph(model.proto.graph):
            inner = index if graph is model.proto.graph else GraphIndex(graph)
            self._stored |= {**inner.initializers, **inner.constants}
        self._producers, self._consumers, self._outputs = index.producers, index.consumers, index.outputs

    def read_quantizer(self, node: NodeProto) -> tuple[str, Encoding] | None:
        """The tensor that a QuantizeLinear quantizes, with its encoding."""
        clip = self._producers.get(node.input[0])
        clip = clip if clip is not None and clip.op_type == "Clip" and node.input[0].endswith(CLIPPED) else None
        value = clip.input[0] if clip is not None else node.input[0]
        ends = [name for consumer in self._consumers.get(node.output[0], ()) for name in consumer.output]
        output = next((name for name in ends if name in self._outputs), None)
        encoding = self._encoding(node, self._type_of(node, 0))
        if clip is not None:
            encoding = self._narrow(encoding, clip)
        return output or _float_name(value), encoding

    def read_scales(self, node: NodeProto) -> tuple[int, Encoding | None]:
        """The dtype that a QuantizeLinear makes or that a DequantizeLinear reads stored, which may be one of floats;
        and the scales and zero points, None where they are computed. The precision only says how these are arranged."""
        stored = self.tensor(node.input[0]) if node.op_type == "DequantizeLinear" else None
        data_type = self._type_of(node, TensorProto.UINT8) if stored is None else stored.data_type
        try:
            return data_type, self._arrange(node, *FORMATS.get(data_type, (8, True)))
        except UsageError:
            return data_type, None

    def tensor(self, name: str) -> TensorProto | None:
        """The tensor `name`, stored or in a Constant; None for a computed value."""
        return self._stored.get(name)

    def read_stored(self, node: NodeProto) -> tuple[str, Encoding] | None:
        """The tensor whose stored integers a DequantizeLinear reads; None where the integers are computed."""
        tensor = self._stored.get(node.input[0])
        readers = self._consumers.get(node.output[0], ())
        if tensor is None or (readers and all(map(partial(_reads_as_scale, node.output[0]), readers))):
            return None  # computed, or scales that other scales scale in turn
        encoding = self._encoding(node, tensor.data_type)
        if encoding.precision.symmetric and encoding.precision.signed:
            integers = self._array(node.input[0])
            if integers.size and int(integers.astype(np.int64).min()) < encoding.precision.lowest:
                encoding = Encoding(_asymmetric(encoding.precision), encoding.scale, encoding.zero_point, encoding.axis)
        name = _float_name(node.input[0])
        return name if name != node.input[0] else _float_name(node.output[0]), encoding

    def _type_of(self, node: NodeProto, default: int) -> int:
        """The dtype of the integers that a QuantizeLinear makes."""
        if len(node.input) > 2 and node.input[2]:
            tensor = self._stored.get(node.input[2])
            return default if tensor is None else tensor.data_type
        return attribute_of(node, "output_dtype", 0) or TensorProto.UINT8

    def _encoding(self, node: NodeProto, data_type: int) -> Encoding:
        if data_type not in FORMATS:
            name = TensorProto.DataType.Name(data_type).lower() if data_type else "a computed type"
            raise UsageError(f"encodings: {node.name or node.output[0]!r} is of {name}; expected integers")
        return self._arrange(node, *FORMATS[data_type])

    def _arrange(self, node: NodeProto, bits: int, signed: bool) -> Encoding:
        scaled = self._producers.get(node.input[1])
        if scaled is not None and scaled.op_type == "DequantizeLinear" and bits == LPBQ_BITS and signed:
            return self._arrange_lpbq(node, scaled)
        scale = self._array(node.input[1]).astype(np.float32)
        has_zero = len(node.input) > 2 and node.input[2]
        zero = self._array(node.input[2]).astype(np.int64) if has_zero else np.zeros(scale.shape, np.int64)
        block = attribute_of(node, "block_size", 0)
        granularity: Granularity = "block" if block else "channel" if scale.ndim == 1 and scale.size > 1 else "tensor"
        middle = 0 if signed else 2 ** (bits - 1)
        precision = Precision(bits, signed, bool((zero == middle).all()), granularity, block)
        if granularity == "tensor":
            return Encoding(precision, scale.reshape(()), zero.reshape(()))
        return Encoding(precision, scale, zero, self._axis_of(node, scale.ndim if block else 0))

    def _axis_of(self, node: NodeProto, rank: int) -> int:
        """The axis of a quantizer, counted from the front where the rank of the tensor is known: scales of blocks have
        it, and a stored tensor."""
        tensor = self._stored.get(node.input[0])
        rank = rank or (len(tensor.dims) if tensor is not None else 0)
        axis = attribute_of(node, "axis", 1)
        return axis % rank if rank else axis

    def _arrange_lpbq(self, node: NodeProto, scaled: NodeProto) -> Encoding:
        """Blocks whose scales are integers, each scaled by that of its channel, as AIMET's LPBQ is written.

        Raises:
            UsageError: the scales of blocks are of another type, or not from 1 to 16.
        """
        inner, outer = self._array(scaled.input[0]), self._array(scaled.input[1]).astype(np.float32)
        channel, block = attribute_of(scaled, "axis", 1), attribute_of(node, "block_size", 0)
        if inner.dtype != np.uint8 or outer.ndim != 1 or not block or inner.min() < 1 or inner.max() > LPBQ_SCALES:
            raise UsageError(
                f"encodings: {node.name or node.output[0]!r} has scales that are scaled in turn; expected integers "
                f"from 1 to {LPBQ_SCALES} for blocks, and a float for each channel"
            )
        channel %= inner.ndim
        outer = outer.reshape([-1 if axis == channel else 1 for axis in range(inner.ndim)])
        precision = Precision(LPBQ_BITS, True, True, "block", block, scale_type="UINT8")
        scale = inner.astype(np.float32) * outer
        return Encoding(precision, scale, np.zeros(scale.shape, np.int64), self._axis_of(node, scale.ndim), outer)

    def _narrow(self, encoding: Encoding, clip: NodeProto) -> Encoding:
        """The encoding with as many bits as the Clip before the quantizer leaves integers."""
        low, high = (float(self._array(name)) for name in clip.input[1:3])
        numbers = round((high - low) / float(encoding.scale)) + 1
        precision = encoding.precision
        narrow = Precision(
            int(numbers).bit_length() - (not numbers & (numbers - 1)), precision.signed, precision.symmetric
        )
        return Encoding(narrow, encoding.scale, encoding.zero_point)

    def _array(self, name: str) -> np.ndarray:
        tensor = self._stored.get(name)
        if tensor is None:
            raise UsageError(f"encodings: the scale or zero point {name!r} is computed; expected a constant")
        return self._model.array(tensor) if self._model.weight(tensor) is not None else numpy_helper.to_array(tensor)


def _reads_as_scale(value: str, node: NodeProto) -> bool:
    return node.op_type == "DequantizeLinear" and node.input[1] == value


def _asymmetric(precision: Precision) -> Precision:
    """The same format with its lowest number in use."""
    return Precision(precision.bits, precision.signed, False, precision.granularity, precision.block)


def _float_name(name: str) -> str:
    """The name of a float tensor, of a name that a tool has given a value around an operator of quantization."""
    matches = (pattern.fullmatch(name) for pattern in PATTERNS)
    return next((match[1] for match in matches if match is not None), name)


CLIPPED: Final = "_clipped"

PATTERNS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"(.+)_(?:QuantizeLinear_Input|DequantizeLinear_Output|DequantizeLinear)",  # onnxruntime, Quark
        r"(.+)_(?:dequantized|quantized|float|qdq)",  # onnxline, onnxruntime, AIMET
        r"(.+?)(?:/qdq\d+)?/(?:dq|q|f|u?int\d+)",  # onnxsim
        r"d?q_output_(.+)_\d+",  # NNCF
    )
)
"""How tools call the values around these operators, with the float tensor's name in it."""

FORMATS: Final[Mapping[int, tuple[int, bool]]] = {
    TensorProto.INT2: (2, True), TensorProto.UINT2: (2, False),
    TensorProto.INT4: (4, True), TensorProto.UINT4: (4, False), TensorProto.INT8: (8, True),
    TensorProto.UINT8: (8, False), TensorProto.INT16: (16, True), TensorProto.UINT16: (16, False),
    TensorProto.INT32: (32, True),
}  # fmt: skip
"""ONNX dtype → bits, and whether it is signed."""

LPBQ_BITS: Final = 4

OPAQUE: Final = frozenset(
    {"MatMulNBits", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger"}
)
"""Operators that hold scales in a form of their own."""


DEQUANTIZED: Final = "_dequantized"
"""What follows the name of a tensor in the name of its value after both operators."""

FLOAT_ENDING: Final = "_float"
"""What follows the name of an output in the name of its value before both operators; the output keeps its own."""

BLOCK_SCALE: Final = "_block_scale"
GLOBAL_SCALE: Final = "_global_scale"


def choose_stems(graph: onnx.GraphProto, names: Iterable[str]) -> dict[str, str]:
    """How the names of the new values and nodes begin, for each tensor: with its own name, or, where the model has a
    value or a node of such a name already, as the weight `bn_scale` next to a value `bn`, with `bn_2`."""
    taken, titles = own_names(graph), {node.name for node in graph.node}
    stems: dict[str, str] = {}
    for name in names:
        stem, number = name, 1
        while any(f"{stem}{ending}" in taken for ending in ENDINGS) or any(
            f"{stem}{ending}" in titles for ending in NODE_ENDINGS
        ):
            number += 1
            stem = f"{name}_{number}"
        taken.update(f"{stem}{ending}" for ending in ENDINGS)
        titles.update(f"{stem}{ending}" for ending in NODE_ENDINGS)
        stems[name] = stem
    return stems


ENDINGS: Final = (
    "_quantized", DEQUANTIZED, "_scale", "_zero_point", "_clipped", "_lowest", "_highest", FLOAT_ENDING, BLOCK_SCALE,
    GLOBAL_SCALE,
)  # fmt: skip
"""What follows the name of a tensor in the names of new values."""

NODE_ENDINGS: Final = ("_Clip", "_QuantizeLinear", "_DequantizeLinear", "_scale_DequantizeLinear")
"""What follows it in the names of new nodes."""


def dequantize_node(name: str, precision: Precision, axis: int | None) -> NodeProto:
    """The DequantizeLinear of a stored tensor; `name` is what the names of its tensors begin with."""
    reads, title = [f"{name}_quantized", f"{name}_scale", f"{name}_zero_point"], f"{name}_DequantizeLinear"
    return helper.make_node(
        "DequantizeLinear", reads, [f"{name}{DEQUANTIZED}"], name=title, **block_axes(precision, axis)
    )


def block_axes(precision: Precision, axis: int | None) -> dict[str, Any]:
    """The attributes that say along which axis the scales lie, and how large a block is."""
    if axis is None:
        return {}
    return {"axis": axis} | ({"block_size": precision.block} if precision.granularity == "block" else {})


def rename_values(node: NodeProto, new_name: Callable[[str], str], *, reads_only: bool = False) -> None:
    """Rename the values that `node` reads and makes, and those that its bodies take from outside."""
    _rename(node.input, new_name)
    if not reads_only:
        _rename(node.output, new_name)
    for body in bodies_in(node):

        def outer_name(name: str, own: Collection[str] = own_names(body)) -> str:
            return name if name in own else new_name(name)

        for inner in body.node:
            rename_values(inner, outer_name, reads_only=True)
        for info in body.output:
            info.name = outer_name(info.name)


def _rename(names: Any, new_name: Callable[[str], str]) -> None:
    for index, name in enumerate(names):
        if name:
            names[index] = new_name(name)
