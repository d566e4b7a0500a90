"""A model with QuantizeLinear and DequantizeLinear at every tensor that has an encoding, in ONNX's own operators."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from passes.encodings.encoding import Precision, refuse_unfitted
from passes.encodings.from_qdq import (
    BLOCK_SCALE,
    DEQUANTIZED,
    FLOAT_ENDING,
    GLOBAL_SCALE,
    block_axes,
    choose_stems,
    dequantize_node,
    rename_values,
)
from passes.graph.op_facts import opset_of
from passes.graph.traversal import reads_of
from passes.model.signature import drop_stale_training
from passes.weights.detached import DetachedModel, detach
from pipeline.argument_checks import Check, a, expects
from pipeline.config import KEYS, OptionNames
from pipeline.errors import UsageError
from pipeline.quantsim.encodings import Encoding, quantize


def first_opset(precision: Precision) -> tuple[int, str]:
    """The first opset whose QuantizeLinear and DequantizeLinear take a format, and what of the format needs it."""
    if precision.scale_type == "FLOAT8E8M0":
        return 24, "scales that are powers of 2"
    if precision.float_type == "FLOAT4E2M1":
        return 23, str(precision)
    if precision.stored_bits not in (8, 32):
        return 21, f"{precision.stored_bits} bits"
    if precision.granularity == "block":
        return 21, "a scale for each block"
    if precision.float_type:
        return 19, str(precision)
    return (13, "a scale for each channel") if precision.granularity == "channel" else (10, str(precision))


def check_opset(proto: onnx.ModelProto, formats: Mapping[str, Precision], names: OptionNames | None = None) -> None:
    """Whether the model's opset has the format of each tensor; `names` are the words of the message, for a caller who
    has the model itself where there are none.

    Raises:
        UsageError: one needs a later opset.
    """
    opset = opset_of(proto)
    for name, precision in formats.items():
        first, needs = first_opset(precision)
        if opset < first:
            step = f"{{convert-opset: {{to: {first}}}}}"
            how = f"convert it by onnxline.convert_opset(model, {first})" if names is None else names.step.format(step)
            more = f", or set export.opset to {first} for a model of torch" if names == KEYS else ""
            raise UsageError(
                f"{name!r} is to have {needs}, for which QuantizeLinear needs opset {first}, and the model "
                f"has {opset}; {how}{more}"
            )


@expects(
    model=a(DetachedModel, "a model, as read_model gives"),
    encodings=Check(
        lambda item: isinstance(item, Mapping) and all(isinstance(entry, Encoding) for entry in item.values()),
        "a mapping of tensors to encodings, as fit_encodings gives",
    ),
)
def insert_qdq(model: DetachedModel, encodings: Mapping[str, Encoding]) -> DetachedModel:
    """`model` with every tensor of `encodings` quantized and dequantized where it is made.

    A constant is stored as integers, with a DequantizeLinear after it; one that is an input, too, stays the default of
    that input, which is quantized when the model runs. Inputs and outputs keep their names. A training_info that names
    a constant which is stored as integers is left out. Where a format has fewer bits than its ONNX dtype, a Clip in
    front keeps an activation within its numbers.

    Raises:
        UsageError: a format needs a later opset than the model has, scales are along an axis that their file does not
            say, or an argument is of another type.
    """
    graph = model.proto.graph
    refuse_unfitted(encodings, "insert_qdq")
    check_opset(model.proto, {name: encoding.precision for name, encoding in encodings.items()})
    stems = choose_stems(graph, encodings)
    outputs = {info.name for info in graph.output}
    proto = model.copy_proto()
    del proto.graph.node[:], proto.graph.initializer[:], proto.graph.value_info[:]
    added: list[TensorProto] = []
    renamed: dict[str, str] = {}
    inputs = {info.name for info in graph.input}
    for tensor in graph.initializer:
        encoding = encodings.get(tensor.name)
        if encoding is None or tensor.name in inputs:
            proto.graph.initializer.append(tensor)
            continue
        stored = quantize(model.array(tensor), encoding)
        stem = stems[tensor.name]
        kind = _stored_type(encoding.precision, opset_of(proto))
        added.append(_stored_numbers(f"{stem}_quantized", stored, kind))
        added += _parameters(stem, encoding, kind)
        proto.graph.node.extend(dequantize_nodes(stem, encoding))
        renamed[tensor.name] = f"{stem}{DEQUANTIZED}"
    for info in graph.input:
        if info.name in encodings:
            name, encoding, stem = info.name, encodings[info.name], stems[info.name]
            _check_input(name, encoding)
            renamed[name] = f"{stem}{DEQUANTIZED}"
            proto.graph.node.extend(quantize_nodes(name, renamed[name], encoding, stem, stem))
            added += _parameters(stem, encoding)
    for node in graph.node:
        copy = proto.graph.node.add()
        copy.CopyFrom(node)
        rename_values(copy, lambda name: renamed.get(name, name), reads_only=True)
        for index, name in enumerate(node.output):
            encoding = encodings.get(name)
            if encoding is None:
                continue
            stem = stems[name]
            made, read = (f"{stem}{FLOAT_ENDING}", name) if name in outputs else (name, f"{stem}{DEQUANTIZED}")
            copy.output[index] = made
            proto.graph.node.extend(quantize_nodes(made, read, encoding, stem, stem))
            added += _parameters(stem, encoding)
            renamed[name] = read
    quantized = detach(onnx.ModelProto(graph=onnx.GraphProto(initializer=added)))
    proto.graph.initializer.extend(quantized.proto.graph.initializer)
    return drop_stale_training(model, DetachedModel(proto, {**model.weights, **quantized.weights}))


def quantize_nodes(value: str, result: str, encoding: Encoding, parameters: str, title: str) -> Iterator[NodeProto]:
    """The nodes that compute `result`, which is `value` quantized and dequantized.

    Args:
        parameters: how the names of its scale, its zero point and its limits begin.
        title: how the names of the nodes begin, and of the values between them.
    """
    source = value
    if not encoding.precision.fills_its_type:
        source = f"{title}_clipped"
        limits = [f"{parameters}_lowest", f"{parameters}_highest"]
        yield helper.make_node("Clip", [value, *limits], [source], name=f"{title}_Clip")
    numbers, scales = f"{title}_quantized", [f"{parameters}_scale", f"{parameters}_zero_point"]
    axes = block_axes(encoding.precision, encoding.axis)
    yield helper.make_node("QuantizeLinear", [source, *scales], [numbers], name=f"{title}_QuantizeLinear", **axes)
    yield helper.make_node("DequantizeLinear", [numbers, *scales], [result], name=f"{title}_DequantizeLinear", **axes)


def _check_input(name: str, encoding: Encoding) -> None:
    """Refuse an input with a default, such as an adapter, in a format that nodes do not compute from floats.

    Raises:
        UsageError: it has such a format.
    """
    precision = encoding.precision
    if encoding.axis is not None and (precision.scale_type or not precision.fills_its_type):
        raise UsageError(
            f"the input {name!r} has a default and is to be {precision}; expected 4, 8 or 16 bits with "
            "scales in float for a weight that callers may feed"
        )


def dequantize_nodes(name: str, encoding: Encoding) -> Iterator[NodeProto]:
    """The DequantizeLinear of a stored tensor, after that of its scales where these are scaled in turn."""
    if encoding.global_scale is not None:
        axes: dict[str, Any] = {}
        if encoding.global_scale.ndim:
            axes["axis"] = _channel_axis(encoding.global_scale, encoding.axis)
        reads, title = [f"{name}{BLOCK_SCALE}", f"{name}{GLOBAL_SCALE}"], f"{name}_scale_DequantizeLinear"
        yield helper.make_node("DequantizeLinear", reads, [f"{name}_scale"], name=title, **axes)
    node = dequantize_node(name, encoding.precision, encoding.axis)
    if encoding.precision.scale_type:
        del node.input[2:]
    if encoding.precision.scale_type == "FLOAT8E8M0":  # whose type that of the result is not
        node.attribute.append(helper.make_attribute("output_dtype", TensorProto.FLOAT))
    yield node


def _channel_axis(scale: np.ndarray, block_axis: int | None) -> int:
    """The axis along which a scale has several values; for a single scale, an axis that no blocks divide."""
    return max(range(scale.ndim), key=lambda axis: (scale.shape[axis], axis != block_axis, -axis))


def _parameters(name: str, encoding: Encoding, stored_type: str = "") -> Iterator[TensorProto]:
    """Scales and zero points. `stored_type` is the ONNX dtype of the integers of a constant."""
    if encoding.precision.scale_type:
        kind = TensorProto.DataType.Value(encoding.precision.scale_type)
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        outer = encoding.global_scale
        if outer is None:
            yield numpy_helper.from_array(encoding.scale.astype(dtype), f"{name}_scale")
            return
        yield numpy_helper.from_array(encoding.inner_scale().astype(dtype), f"{name}{BLOCK_SCALE}")
        yield numpy_helper.from_array(outer.reshape(-1) if outer.ndim else outer, f"{name}{GLOBAL_SCALE}")
        return
    yield numpy_helper.from_array(encoding.scale, f"{name}_scale")
    yield _stored_numbers(f"{name}_zero_point", encoding.zero_point, stored_type or encoding.precision.onnx_name)
    precision = encoding.precision
    if encoding.axis is None and not precision.fills_its_type:
        for what, number in (("lowest", precision.lowest), ("highest", precision.highest)):
            limit = (number - encoding.zero_point) * encoding.scale.astype(np.float64)
            yield numpy_helper.from_array(np.asarray(limit, np.float32), f"{name}_{what}")


def stored_bits(precision: Precision, opset: int) -> int:
    """How many bits an integer or float of a constant has in a file: ONNX has 2 since opset 25."""
    has_two = opset >= FIRST_WITH_TWO_BITS and precision.bits == TWO_BITS
    return TWO_BITS if has_two else precision.stored_bits


def _stored_type(precision: Precision, opset: int) -> str:
    """The ONNX dtype of a constant."""
    if stored_bits(precision, opset) == precision.stored_bits:
        return precision.onnx_name
    return f"{'' if precision.signed else 'U'}INT{TWO_BITS}"


TWO_BITS: Final = 2
FIRST_WITH_TWO_BITS: Final = 25
"""The first opset whose DequantizeLinear takes 2 bits; below, and for activations, they lie in 4 bits."""


def _stored_numbers(name: str, numbers: np.ndarray, onnx_name: str) -> TensorProto:
    """Integers as a tensor of an ONNX dtype."""
    data_type = TensorProto.DataType.Value(onnx_name)
    dtype = helper.tensor_dtype_to_np_dtype(data_type)
    tensor = numpy_helper.from_array(numbers.astype(dtype), name)
    assert tensor.data_type == data_type
    return tensor


def find_fixed_values(graph: onnx.GraphProto, constants: Collection[str]) -> frozenset[str]:
    """The values that are computed from `constants` alone, such as a weight after a Transpose."""
    fixed = set(constants)
    for node in graph.node:
        reads = reads_of(node)
        if reads and fixed.issuperset(reads):
            fixed.update(node.output)
    return frozenset(fixed.difference(constants))
