"""A model with QuantizeLinear and DequantizeLinear in the form in which it trains, and back.

    stored:    w_quantized (int4) ▸ DequantizeLinear ▸ w_dequantized
    trained:   w (float) ▸ QuantizeLinear (int8) ▸ Clip [-7, 7] ▸ DequantizeLinear ▸ w_dequantized

The trained form is a plain ONNX model too. It has integers of 8 and 16 bits only, with a Clip where the format has
fewer values: after QuantizeLinear, where its limits are integers and do not move with the scale. A bias of 32
bits is as good as a float, and is trained as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from passes.encodings.encoding import Encoding
from passes.encodings.from_qdq import read_qdq
from passes.graph.index import copy_of, initializers_of, producers_of
from passes.weights.detached import detach
from pipeline.errors import Unsupported, UsageError

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Integers that a DequantizeLinear reads, which train as floats."""

    name: str
    """The name of the floats."""
    integers: str
    """The name of the initializer that holds the integers."""
    scale: str
    encoding: Encoding


@dataclass(frozen=True, slots=True)
class NarrowQuantizer:
    """A Clip before a QuantizeLinear: a format with fewer values than its ONNX dtype has."""

    clip: str
    """The name of the Clip's output."""
    limits: tuple[str, str]
    scale: str
    lowest: int
    highest: int
    zero_point: int


@dataclass(frozen=True, slots=True)
class QdqModel:
    """A model, with its weights inside, and its quantized weights and Clips."""

    proto: onnx.ModelProto
    stored: tuple[StoredWeight, ...]
    narrow: tuple[NarrowQuantizer, ...]


def has_quantizers(proto: onnx.ModelProto) -> bool:
    return any(node.op_type in (QUANTIZE, DEQUANTIZE) for node in proto.graph.node)


def read_quantizers(proto: onnx.ModelProto) -> QdqModel:
    """What `proto` quantizes.

    Raises:
        Unsupported: integers that are stored in a node, or that have a computed scale.
    """
    graph = proto.graph
    tensors = initializers_of(graph)
    producers = producers_of(graph.node)
    taken = {*tensors, *producers, *(info.name for info in graph.input)}
    stored: dict[str, StoredWeight] = {}
    narrow = []
    for node in graph.node:
        source = node.input[0] if node.input else ""
        if node.op_type == DEQUANTIZE and producers.get(source) is not None and producers[source].op_type == "Constant":
            raise Unsupported(f"{node.name or source!r} reads integers of a Constant; make it an initializer")
        if node.op_type == DEQUANTIZE and source in tensors and source not in stored:
            name, encoding = _encoding_of(node, tensors)
            name = name if name not in taken else f"{source}_as_float"
            stored[source] = StoredWeight(name, source, node.input[1], encoding)
        clip = producers.get(source)
        if node.op_type == QUANTIZE and clip is not None and _narrows(clip, node, tensors):
            narrow.append(_narrow_quantizer(clip, node, tensors))
    return QdqModel(proto, tuple(stored.values()), tuple(narrow))


def trainable_form(model: QdqModel) -> onnx.ModelProto:
    """The model with float weights before QuantizeLinear; it computes the same.

    Raises:
        Unsupported: a zero point that is no initializer.
    """
    proto = copy_of(model.proto)
    graph = proto.graph
    nodes = list(graph.node)
    del graph.node[:], graph.value_info[:]
    widening = _Widening(initializers_of(graph))
    stored = {weight.integers: weight for weight in model.stored}
    clips = {entry.clip: entry for entry in model.narrow}
    sources = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Clip" and node.input}
    for node in nodes:
        if node.op_type == DEQUANTIZE and node.input[0] in stored:
            weight = stored[node.input[0]]
            if weight.encoding.precision.bits == 32:
                graph.node.append(helper.make_node("Identity", [weight.name], list(node.output), name=node.name))
                continue
            integers = f"{node.output[0]}_numbers"
            graph.node.extend(widening.quantize_weight(node, weight, integers))
            _, limit = widening.zero_point(node)
            dequantize = _copy(node, input=[integers, node.input[1], limit])
            graph.node.append(dequantize)
        elif node.op_type == QUANTIZE:
            graph.node.extend(widening.quantize_activation(node, clips.get(node.input[0]), sources))
        elif node.op_type == DEQUANTIZE:
            _, zero = widening.zero_point(node)
            graph.node.append(_copy(node, input=[*node.input[:2], zero]))
        elif not (node.output and node.output[0] in clips):
            graph.node.append(node)
    dropped = {weight.integers for weight in model.stored}
    kept = [tensor for tensor in graph.initializer if tensor.name not in dropped]
    floats = [numpy_helper.from_array(_as_floats(model.proto, weight), weight.name) for weight in model.stored]
    del graph.initializer[:]
    read = {name for node in graph.node for name in node.input}
    graph.initializer.extend(tensor for tensor in (*kept, *widening.added, *floats) if tensor.name in read)
    return proto


def quantize_floats(weight: StoredWeight, floats: np.ndarray, scale: np.ndarray, like: TensorProto) -> TensorProto:
    """The trained floats as integers of the format; ties go to the even number.

    Raises:
        UsageError: a scale is not above zero, or the shape is another.
    """
    if tuple(like.dims) != floats.shape:
        raise UsageError(f"{weight.name!r} was trained as {list(floats.shape)}; the model has {list(like.dims)}")
    check_scale(weight.scale, scale)
    encoding = weight.encoding
    shape = encoding.scale.shape
    spread_scale, zero = (encoding.spread(floats, part) for part in (scale.reshape(shape), encoding.zero_point))
    integers = np.rint(floats.astype(np.float32) / spread_scale.astype(np.float32)).astype(np.int64) + zero
    integers = np.clip(integers, encoding.precision.lowest, encoding.precision.highest)
    return numpy_helper.from_array(integers.astype(helper.tensor_dtype_to_np_dtype(like.data_type)), like.name)


def check_scale(name: str, scale: np.ndarray) -> None:
    """Raises UsageError: a scale is zero, negative or not finite."""
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise UsageError(
            f"the scale {name!r} was trained down to {float(np.min(scale))}; expected scales above zero: "
            "train scales with a smaller learning rate"
        )


class _Widening:
    """Rewrites nodes of fewer than 8 bits as nodes of 8 bits."""

    def __init__(self, tensors: Mapping[str, TensorProto]) -> None:
        self._tensors = tensors
        self._made: dict[str, TensorProto] = {}

    @property
    def added(self) -> list[TensorProto]:
        return list(self._made.values())

    def zero_point(self, node: NodeProto) -> tuple[int, str]:
        """The ONNX dtype of the integers, and the name of a zero point of 8 bits or more."""
        tensor = self._tensors.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if tensor is None:
            if len(node.input) > 2 and node.input[2]:
                raise Unsupported(f"the zero point {node.input[2]!r} is computed; expected an initializer")
            data_type = next((entry.i for entry in node.attribute if entry.name == "output_dtype"), 0)
            source = self._tensors.get(node.input[0])
            data_type = source.data_type if source is not None else data_type or TensorProto.UINT8
            scale = self._tensors.get(node.input[1])
            if scale is None:
                raise Unsupported(f"the scale {node.input[1]!r} is computed; expected an initializer")
            return data_type, self._keep(f"{node.output[0]}_zero", np.zeros(tuple(scale.dims)), data_type)
        if tensor.data_type not in WIDER:
            return tensor.data_type, tensor.name
        return tensor.data_type, self._keep(f"{tensor.name}_wide", numpy_helper.to_array(tensor), tensor.data_type)

    def quantize_weight(self, node: NodeProto, weight: StoredWeight, result: str) -> Iterator[NodeProto]:
        """The nodes that make the integers `result` of a float weight, for its DequantizeLinear."""
        _, zero = self.zero_point(node)
        precision = weight.encoding.precision
        settings = [entry for entry in node.attribute if entry.name in ("axis", "block_size")]
        yield from self._add_rounding(
            [weight.name, node.input[1], zero], result, settings, (precision.lowest, precision.highest)
        )

    def quantize_activation(
        self, node: NodeProto, narrow: NarrowQuantizer | None, sources: Mapping[str, str]
    ) -> Iterator[NodeProto]:
        data_type, zero = self.zero_point(node)
        source = node.input[0] if narrow is None else sources[narrow.clip]
        settings = [entry for entry in node.attribute if entry.name in ("axis", "block_size")]
        limits = LIMITS.get(data_type) if narrow is None else (narrow.lowest, narrow.highest)
        yield from self._add_rounding([source, node.input[1], zero], node.output[0], settings, limits)

    def _add_rounding(
        self, inputs: list[str], result: str, settings: list[onnx.AttributeProto], limits: tuple[int, int] | None
    ) -> Iterator[NodeProto]:
        zero = self._made.get(inputs[2]) or self._tensors[inputs[2]]
        dtype = helper.tensor_dtype_to_np_dtype(zero.data_type)
        whole = limits is None or limits == (np.iinfo(dtype).min, np.iinfo(dtype).max)
        quantize = helper.make_node(QUANTIZE, inputs, [result if whole else f"{result}_wide"], name=f"{result}_round")
        quantize.attribute.extend(settings)
        yield quantize
        if limits is not None and not whole:
            ends = zip(("lowest", "highest"), limits, strict=True)
            names = [self._keep(f"{result}_{end}", np.asarray(number), zero.data_type) for end, number in ends]
            yield helper.make_node("Clip", [f"{result}_wide", *names], [result], name=f"{result}_Clip")

    def _keep(self, name: str, values: np.ndarray, data_type: int) -> str:
        wide = WIDER.get(data_type, data_type)
        array = np.array(values).astype(np.int64).astype(helper.tensor_dtype_to_np_dtype(wide))
        self._made[name] = numpy_helper.from_array(array, name)
        return name


def _encoding_of(node: NodeProto, tensors: Mapping[str, TensorProto]) -> tuple[str, Encoding]:
    """The name of the floats that `node` makes of stored integers, and their encoding."""
    names = [name for name in node.input if name]
    computed = [name for name in names if name not in tensors]
    if computed:
        raise Unsupported(f"the scale or zero point {computed[0]!r} of stored integers is computed; expected constants")
    alone = onnx.GraphProto(node=[node], initializer=[tensors[name] for name in dict.fromkeys(names)])
    ((name, encoding),) = read_qdq(detach(onnx.ModelProto(graph=alone))).items()
    return name, encoding


def _narrows(clip: NodeProto, quantize: NodeProto, tensors: Mapping[str, TensorProto]) -> bool:
    """Whether the limits of a Clip before a QuantizeLinear are values of its format, as those of quantsim are."""
    if clip.op_type != "Clip" or len(clip.input) != 3 or not all(name in tensors for name in clip.input[1:]):
        return False
    scale = tensors.get(quantize.input[1])
    return scale is not None and numpy_helper.to_array(scale).size == 1 and clip.output[0].endswith("_clipped")


def _narrow_quantizer(clip: NodeProto, quantize: NodeProto, tensors: Mapping[str, TensorProto]) -> NarrowQuantizer:
    scale = numpy_helper.to_array(tensors[quantize.input[1]]).astype(np.float64).reshape(())
    has_zero = len(quantize.input) > 2 and quantize.input[2]
    zero = int(numpy_helper.to_array(tensors[quantize.input[2]]).astype(np.int64).reshape(())) if has_zero else 0
    low, high = (
        int(np.rint(numpy_helper.to_array(tensors[name]).astype(np.float64) / scale)) + zero for name in clip.input[1:]
    )
    return NarrowQuantizer(clip.output[0], (clip.input[1], clip.input[2]), quantize.input[1], low, high, zero)


def _as_floats(proto: onnx.ModelProto, weight: StoredWeight) -> np.ndarray:
    arrays = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in proto.graph.initializer
        if tensor.name in (weight.integers, weight.scale)
    }
    integers, encoding = arrays[weight.integers].astype(np.int64), weight.encoding
    scale, zero = (encoding.spread(integers, part) for part in (encoding.scale, encoding.zero_point))
    return ((integers - zero).astype(np.float32) * scale).astype(arrays[weight.scale].dtype)


def _copy(node: NodeProto, *, input: list[str]) -> NodeProto:
    copy = copy_of(node)
    copy.input[:] = input
    return copy


WIDER: Mapping[int, int] = {TensorProto.INT4: TensorProto.INT8, TensorProto.UINT4: TensorProto.UINT8}
"""The types that the IR has in place of types of 4 bits."""

LIMITS: Mapping[int, tuple[int, int]] = {TensorProto.INT4: (-8, 7), TensorProto.UINT4: (0, 15)}
