"""Layers as torch can differentiate them: convolutions, pools, norms, recurrent cells and Resize, by ONNX operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from onnx import TensorProto, helper
from torch import Tensor
from torch.nn import functional as fn

from passes.weights.detached import detach
from passes.weights.sessions import Session
from pipeline.errors import Unsupported

Inputs = Sequence[Any]
"""Tensors in the order of the node's inputs; None for one that is left out."""
Attributes = Mapping[str, Any]


def _refuse(op: str, attributes: Attributes, usual: Mapping[str, object]) -> None:
    """Raise where an attribute has another value than the usual one."""
    for name, value in usual.items():
        if attributes.get(name, value) != value:
            raise Unsupported(f"no gradient goes through {op} with {name}")


def _pad(attributes: Attributes, data: Tensor, kernel: Sequence[int], value: float = 0.0) -> Tensor:
    """`data` with the padding that a convolution or a pool asks for."""
    rank = len(kernel)
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    pads = list(attributes.get("pads", [0] * 2 * rank))
    auto = attributes.get("auto_pad", b"NOTSET")
    if auto in (b"SAME_UPPER", b"SAME_LOWER"):
        for axis in range(rank):
            size = data.shape[2 + axis]
            reach = (kernel[axis] - 1) * dilations[axis] + 1
            more = max((math.ceil(size / strides[axis]) - 1) * strides[axis] + reach - size, 0)
            first = more // 2 if auto == b"SAME_UPPER" else more - more // 2
            pads[axis], pads[axis + rank] = first, more - first
    if not any(pads):
        return data
    both = [pads[axis + side] for axis in reversed(range(rank)) for side in (0, rank)]
    return fn.pad(data, both, value=value)


def _conv(attributes: Attributes, ins: Inputs) -> Tensor:
    weight, rank = ins[1], ins[1].dim() - 2
    data = _pad(attributes, ins[0], weight.shape[2:])
    convolve = {1: fn.conv1d, 2: fn.conv2d, 3: fn.conv3d}[rank]
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    bias = ins[2] if len(ins) > 2 else None
    return convolve(data, weight, bias, strides, 0, dilations, attributes.get("group", 1))


def _conv_transpose(attributes: Attributes, ins: Inputs) -> Tensor:
    """All products, of which the padding is cut off; onnxruntime has the same where an output shape is given."""
    data, weight, rank = ins[0], ins[1], ins[1].dim() - 2
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    more = attributes.get("output_padding", [0] * rank)
    convolve = {1: fn.conv_transpose1d, 2: fn.conv_transpose2d, 3: fn.conv_transpose3d}[rank]
    whole = convolve(data, weight, None, strides, 0, 0, attributes.get("group", 1), dilations)
    whole = fn.pad(whole, [size for axis in reversed(range(rank)) for size in (0, more[axis])])
    auto, pads = attributes.get("auto_pad", b"NOTSET"), list(attributes.get("pads", [0] * 2 * rank))
    shape = attributes.get("output_shape")
    if shape is None and auto in (b"SAME_UPPER", b"SAME_LOWER"):
        shape = [data.shape[2 + axis] * strides[axis] for axis in range(rank)]
    for axis in range(rank):
        size = whole.shape[2 + axis]
        if shape is not None:
            total = max(size - shape[len(shape) - rank + axis], 0)
            first = total // 2 if auto == b"SAME_UPPER" else total - total // 2
            pads[axis], pads[axis + rank] = first, total - first
        whole = whole.narrow(2 + axis, pads[axis], size - pads[axis] - pads[axis + rank])
    return whole if len(ins) < 3 or ins[2] is None else whole + ins[2].reshape(-1, *[1] * rank)


def _max_pool(attributes: Attributes, ins: Inputs) -> Tensor:
    kernel = attributes["kernel_shape"]
    pool = {1: fn.max_pool1d, 2: fn.max_pool2d, 3: fn.max_pool3d}[len(kernel)]
    data = _pad(attributes, ins[0], kernel, -math.inf)
    strides, dilations = attributes.get("strides", [1] * len(kernel)), attributes.get("dilations", [1] * len(kernel))
    return pool(data, kernel, strides, 0, dilations, bool(attributes.get("ceil_mode", 0)))


def _layer_norm(attributes: Attributes, ins: Inputs) -> Tensor:
    axis = attributes.get("axis", -1) % ins[0].dim()
    scaled = fn.layer_norm(ins[0], ins[0].shape[axis:], eps=attributes.get("epsilon", 1e-5)) * ins[1]
    return scaled if len(ins) < 3 or ins[2] is None else scaled + ins[2]


def _batch_norm(attributes: Attributes, ins: Inputs) -> Tensor:
    data, scale, bias, mean, variance = ins[:5]
    return fn.batch_norm(data, mean, variance, scale, bias, eps=attributes.get("epsilon", 1e-5))


def _average_pool(attributes: Attributes, ins: Inputs) -> Tensor:
    _refuse("AveragePool", attributes, {"ceil_mode": 0, "dilations": [1] * len(attributes["kernel_shape"])})
    kernel = attributes["kernel_shape"]
    pool = {1: fn.avg_pool1d, 2: fn.avg_pool2d, 3: fn.avg_pool3d}[len(kernel)]
    strides = attributes.get("strides", [1] * len(kernel))
    means = pool(_pad(attributes, ins[0], kernel), kernel, strides)
    if attributes.get("count_include_pad"):
        return means
    return means / pool(_pad(attributes, torch.ones_like(ins[0]), kernel), kernel, strides)


def _group_norm(attributes: Attributes, ins: Inputs) -> Tensor:
    return fn.group_norm(ins[0], attributes["num_groups"], ins[1], ins[2], attributes.get("epsilon", 1e-5))


def _instance_norm(attributes: Attributes, ins: Inputs) -> Tensor:
    return fn.instance_norm(ins[0], weight=ins[1], bias=ins[2], eps=attributes.get("epsilon", 1e-5))


def _rms_norm(attributes: Attributes, ins: Inputs) -> Tensor:
    axis = attributes.get("axis", -1) % ins[0].dim()
    return fn.rms_norm(ins[0], list(ins[0].shape[axis:]), eps=attributes.get("epsilon", 1e-5)) * ins[1]


def _lp_norm(attributes: Attributes, ins: Inputs) -> Tensor:
    return fn.normalize(ins[0], attributes.get("p", 2), attributes.get("axis", -1), eps=0.0)


def _lstm(attributes: Attributes, ins: Inputs) -> tuple[Tensor, ...]:
    """Its gates are input, output, forget and cell."""
    peepholes = ins[7] if len(ins) > 7 else None

    def step(read: Parts, back: Parts, states: list[Tensor], way: int) -> list[Tensor]:
        gate_i, gate_o, gate_f, gate_c = map(torch.add, read, back)
        cell = states[1]
        own = (0.0, 0.0, 0.0) if peepholes is None else peepholes[way].chunk(3)
        kept = torch.sigmoid(gate_f + own[2] * cell) * cell
        cell = kept + torch.sigmoid(gate_i + own[0] * cell) * torch.tanh(gate_c)
        return [torch.sigmoid(gate_o + own[1] * cell) * torch.tanh(cell), cell]

    _refuse("LSTM", attributes, {"input_forget": 0})
    return _recur("LSTM", attributes, ins, step, (b"Sigmoid", b"Tanh", b"Tanh"))


def _gru(attributes: Attributes, ins: Inputs) -> tuple[Tensor, ...]:
    """Its gates are update, reset and hidden."""
    is_linear = bool(attributes.get("linear_before_reset", 0))
    bias = ins[3] if len(ins) > 3 else None

    def step(read: Parts, back: Parts, states: list[Tensor], way: int) -> list[Tensor]:
        state = states[0]
        size = state.shape[-1]
        update, reset = torch.sigmoid(read[0] + back[0]), torch.sigmoid(read[1] + back[1])
        if is_linear:
            hidden = reset * back[2]
        else:
            hidden = (reset * state) @ ins[2][way][2 * size :].mT + (0.0 if bias is None else bias[way][5 * size :])
        return [(1 - update) * torch.tanh(read[2] + hidden) + update * state]

    return _recur("GRU", attributes, ins, step, (b"Sigmoid", b"Tanh"))


def _rnn(attributes: Attributes, ins: Inputs) -> tuple[Tensor, ...]:
    return _recur("RNN", attributes, ins, lambda read, back, *_: [torch.tanh(read[0] + back[0])], (b"Tanh",))


Parts = Sequence[Tensor]
Step = Callable[[Parts, Parts, list[Tensor], int], list[Tensor]]
"""What the gates get of the input and of the state, the states, and the direction → the new states."""


def _recur(
    op: str, attributes: Attributes, ins: Inputs, step: Step, activations: tuple[bytes, ...]
) -> tuple[Tensor, ...]:
    """The states of each place in one or both directions, and the last ones."""
    data, weights, recurrent = ins[:3]
    ways, places = weights.shape[0], data.shape[0]
    usual = {"activations": [*activations] * ways, "clip": None, "layout": 0}
    _refuse(op, {key: value for key, value in attributes.items() if key in usual}, usual)
    given = [*ins[3:], *[None] * 5][:5]
    if given[1] is not None and bool((given[1] != places).any()):
        raise Unsupported(f"no gradient goes through {op} with rows of unequal length")
    size = recurrent.shape[-1]
    gates = recurrent.shape[1] // size
    zeros = data.new_zeros(ways, data.shape[1], size)
    rows: list[Tensor] = []
    last: list[list[Tensor]] = []
    for way in range(ways):
        is_reverse = way == 1 or attributes.get("direction", b"forward") == b"reverse"
        bias = data.new_zeros(2 * gates * size) if given[0] is None else given[0][way]
        states = [(zeros if start is None else start)[way] for start in given[2 : 4 if op == "LSTM" else 3]]
        read = data @ weights[way].mT + bias[: gates * size]
        made: list[Tensor] = [data] * places
        for place in reversed(range(places)) if is_reverse else range(places):
            back = states[0] @ recurrent[way].mT + bias[gates * size :]
            states = step(read[place].chunk(gates, -1), back.chunk(gates, -1), states, way)
            made[place] = states[0]
        rows.append(torch.stack(made))
        last.append(states)
    return torch.stack(rows, 1), *(torch.stack(states) for states in zip(*last, strict=True))


def _resize(attributes: Attributes, ins: Inputs) -> Tensor:
    """One matrix for each axis that changes; onnxruntime says what they are, by the numbers that it makes of ones."""
    usual = {"keep_aspect_ratio_policy": b"stretch", "antialias": 0, "extrapolation_value": 0.0}
    _refuse("Resize", attributes, usual)
    if attributes.get("coordinate_transformation_mode") == b"tf_crop_and_resize":
        raise Unsupported("no gradient goes through Resize with tf_crop_and_resize")
    data, factors, sizes = ins[0], *[*ins[2:], None, None][:2]
    asked, key = (factors, "scales") if factors is not None and factors.numel() else (sizes, "sizes")
    axes = attributes.get("axes") or range(data.dim())
    for axis, number in zip(axes, asked.tolist(), strict=True):
        if number != (1 if key == "scales" else data.shape[axis]):
            matrix = _resize_matrix(attributes, data.shape[axis], key, number)
            data = torch.movedim(torch.movedim(data, axis, -1) @ matrix, -1, axis)
    return data


def _resize_matrix(attributes: Attributes, size: int, key: str, number: float) -> Tensor:
    kept = {name: value for name, value in attributes.items() if name != "axes"}
    reads = ["x", "", "n"] if key == "scales" else ["x", "", "", "n"]
    node = helper.make_node("Resize", reads, ["y"], **kept)
    kind, first = (TensorProto.FLOAT, 1.0) if key == "scales" else (TensorProto.INT64, size)
    graph = helper.make_graph(
        [node],
        "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [size, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [size, None])],
        [helper.make_tensor("n", kind, [2], [first, number])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    return torch.from_numpy(Session.of(detach(model)).run({"x": np.eye(size, dtype=np.float32)})["y"])


def _spatial(data: Tensor) -> tuple[int, ...]:
    return tuple(range(2, data.dim()))


LAYERS: Final[Mapping[str, Callable[[Attributes, Inputs], Any]]] = {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "GRU": _gru,
    "GlobalAveragePool": lambda _, ins: ins[0].mean(_spatial(ins[0]), keepdim=True),
    "GlobalMaxPool": lambda _, ins: ins[0].amax(_spatial(ins[0]), keepdim=True),
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LSTM": _lstm,
    "LayerNormalization": _layer_norm,
    "LpNormalization": _lp_norm,
    "MaxPool": _max_pool,
    "RMSNormalization": _rms_norm,
    "RNN": _rnn,
    "Resize": _resize,
}
