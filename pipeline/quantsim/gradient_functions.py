"""ONNX operators as torch can differentiate them: elementwise, by shape, by index; layers are in gradient_layers.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor
from torch.nn import functional as fn

from passes.graph.op_facts import ONNX_DOMAINS
from passes.weights.detached import DetachedModel
from pipeline.errors import Unsupported
from pipeline.quantsim.gradient_layers import LAYERS, Attributes, Inputs
from pipeline.runtime.tensors import torch_dtype


def count_parts(model: DetachedModel) -> DetachedModel:
    """`model` with the number of parts written at each Split that gives no sizes. From opset 18 on it is there; before,
    the number of its results alone says it, which the functions here do not see."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for node in proto.graph.node:
        has_sizes = len(node.input) > 1 or any(entry.name in ("split", "num_outputs") for entry in node.attribute)
        if node.op_type == "Split" and node.domain in ONNX_DOMAINS and not has_sizes:
            node.attribute.append(helper.make_attribute("num_outputs", len(node.output)))
    return DetachedModel(proto, model.weights)


def _gemm(attributes: Attributes, ins: Inputs) -> Tensor:
    left = ins[0].mT if attributes.get("transA") else ins[0]
    right = ins[1].mT if attributes.get("transB") else ins[1]
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    if len(ins) < 3 or ins[2] is None:
        return alpha * (left @ right)
    return torch.addmm(ins[2], left, right, beta=beta, alpha=alpha)


def _axes(attributes: Attributes, ins: Inputs) -> list[int] | None:
    """The axes of a reduction or of a change of rank: an attribute in early opsets, the second input later."""
    if len(ins) > 1 and ins[1] is not None:
        return [int(axis) for axis in ins[1]]
    return list(attributes["axes"]) if "axes" in attributes else None


def _reduce(combine: Callable[..., Tensor]) -> Callable[[Attributes, Inputs], Tensor]:
    def apply(attributes: Attributes, ins: Inputs) -> Tensor:
        axes = _axes(attributes, ins)
        if not axes:
            if attributes.get("noop_with_empty_axes"):
                return ins[0]
            axes = list(range(ins[0].dim()))
        return combine(ins[0], dim=axes, keepdim=bool(attributes.get("keepdims", 1)))

    return apply


def _reshape(attributes: Attributes, ins: Inputs) -> Tensor:
    sizes = [int(size) for size in ins[1]]
    if not attributes.get("allowzero"):
        sizes = [size or ins[0].shape[place] for place, size in enumerate(sizes)]
    return ins[0].reshape(sizes)


def _flatten(attributes: Attributes, ins: Inputs) -> Tensor:
    axis = attributes.get("axis", 1)
    return ins[0].reshape(math.prod(ins[0].shape[:axis]), -1)


def _squeeze(attributes: Attributes, ins: Inputs) -> Tensor:
    axes = _axes(attributes, ins)
    return ins[0].squeeze() if axes is None else ins[0].squeeze(tuple(axes))


def _unsqueeze(attributes: Attributes, ins: Inputs) -> Tensor:
    axes = _axes(attributes, ins) or []
    result = ins[0]
    for axis in sorted(axis % (ins[0].dim() + len(axes)) for axis in axes):
        result = result.unsqueeze(axis)
    return result


def _slice(attributes: Attributes, ins: Inputs) -> Tensor:
    data = ins[0]
    read = [None if value is None else [int(number) for number in value] for value in ins[1:]]
    starts, ends = (attributes.get("starts"), attributes.get("ends")) if not read else read[:2]
    axes = (read[2] if len(read) > 2 else attributes.get("axes")) or range(len(starts or ()))
    steps = (read[3] if len(read) > 3 else None) or [1] * len(starts or ())
    for start, end, axis, step in zip(starts or (), ends or (), axes, steps, strict=True):
        if step > 0:
            places = range(*slice(start, end, step).indices(data.shape[axis]))
        else:  # an end below -size means: down to the first
            size = data.shape[axis]
            places = range(*slice(start, None if end < -size else end, step).indices(size))
        data = data.index_select(axis, torch.tensor(places, dtype=torch.int64))
    return data


def _split(attributes: Attributes, ins: Inputs) -> tuple[Tensor, ...]:
    axis = attributes.get("axis", 0)
    sizes = ins[1].tolist() if len(ins) > 1 and ins[1] is not None else attributes.get("split")
    if sizes is None:
        sizes = math.ceil(ins[0].shape[axis] / attributes["num_outputs"])
    return torch.split(ins[0], sizes, dim=axis)


def _gather(attributes: Attributes, ins: Inputs) -> Tensor:
    axis = attributes.get("axis", 0) % ins[0].dim()
    places = ins[1].long() % ins[0].shape[axis]
    shape = (*ins[0].shape[:axis], *places.shape, *ins[0].shape[axis + 1 :])
    return ins[0].index_select(axis, places.reshape(-1)).reshape(shape)


def _gather_nd(attributes: Attributes, ins: Inputs) -> Tensor:
    if attributes.get("batch_dims"):
        raise Unsupported("no gradient goes through GatherND with batch_dims")
    return ins[0][tuple(ins[1].long().unbind(-1))]


def _clip(attributes: Attributes, ins: Inputs) -> Tensor:
    low, high = [*ins[1:], None, None][:2]
    low = attributes.get("min") if low is None else low
    high = attributes.get("max") if high is None else high
    return ins[0] if low is None and high is None else torch.clamp(ins[0], low, high)


def _gelu(attributes: Attributes, ins: Inputs) -> Tensor:
    return fn.gelu(ins[0], approximate=attributes.get("approximate", b"none").decode())


def _cast(attributes: Attributes, ins: Inputs) -> Tensor:
    return ins[0].to(torch_dtype(helper.tensor_dtype_to_np_dtype(attributes["to"]).name))


def _cumsum(attributes: Attributes, ins: Inputs) -> Tensor:
    axis = int(ins[1])
    data = ins[0].flip(axis) if attributes.get("reverse") else ins[0]
    summed = data.cumsum(axis) - (data if attributes.get("exclusive") else 0)
    return summed.flip(axis) if attributes.get("reverse") else summed


def _gather_elements(attributes: Attributes, ins: Inputs) -> Tensor:
    axis = attributes.get("axis", 0) % ins[0].dim()
    return ins[0].gather(axis, ins[1].long() % ins[0].shape[axis])


def _pad(attributes: Attributes, ins: Inputs) -> Tensor:
    data, mode = ins[0], attributes.get("mode", b"constant").decode()
    pads = ins[1].tolist() if len(ins) > 1 else attributes["pads"]
    axes = ins[3].tolist() if len(ins) > 3 and ins[3] is not None else range(data.dim())
    value = float(ins[2]) if len(ins) > 2 and ins[2] is not None else attributes.get("value", 0.0)
    for place, axis in enumerate(axes):
        first, last = pads[place], pads[place + len(pads) // 2]
        axis = axis % data.dim()
        if mode == "constant":
            data = fn.pad(data, [0, 0] * (data.dim() - 1 - axis) + [first, last], value=value)
        elif first or last:
            places = np.pad(np.arange(data.shape[axis]), (max(first, 0), max(last, 0)), mode)  # type: ignore[call-overload]
            places = places[max(-first, 0) : len(places) - max(-last, 0)]
            data = data.index_select(axis, torch.from_numpy(places.copy()))
    return data


def _depth_to_space(attributes: Attributes, ins: Inputs) -> Tensor:
    batch, channels, height, width = ins[0].shape
    block = attributes["blocksize"]
    if attributes.get("mode", b"DCR") == b"CRD":
        parts = ins[0].reshape(batch, channels // block**2, block, block, height, width).permute(0, 1, 4, 2, 5, 3)
    else:
        parts = ins[0].reshape(batch, block, block, channels // block**2, height, width).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(batch, channels // block**2, height * block, width * block)


def _space_to_depth(attributes: Attributes, ins: Inputs) -> Tensor:
    batch, channels, height, width = ins[0].shape
    block = attributes["blocksize"]
    parts = ins[0].reshape(batch, channels, height // block, block, width // block, block).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(batch, channels * block**2, height // block, width // block)


def _selu(attributes: Attributes, data: Tensor) -> Tensor:
    alpha, gamma = (
        attributes.get("alpha", 1.67326319217681884765625),
        attributes.get("gamma", 1.05070102214813232421875),
    )
    return gamma * torch.where(data > 0, data, alpha * torch.expm1(data))


def _trilu(attributes: Attributes, ins: Inputs) -> Tensor:
    diagonal = int(ins[1]) if len(ins) > 1 and ins[1] is not None else 0
    return torch.triu(ins[0], diagonal) if attributes.get("upper", 1) else torch.tril(ins[0], diagonal)


def _fold(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Attributes, Inputs], Tensor]:
    return lambda _, ins: functools.reduce(combine, ins)


def _unary(compute: Callable[[Tensor], Tensor]) -> Callable[[Attributes, Inputs], Tensor]:
    return lambda _, ins: compute(ins[0])


def _binary(compute: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Attributes, Inputs], Tensor]:
    return lambda _, ins: compute(ins[0], ins[1])


FUNCTIONS: Final[Mapping[str, Callable[[Attributes, Inputs], Any]]] = {
    **LAYERS,
    "Abs": _unary(torch.abs),
    "Add": _binary(torch.add),
    "Cast": _cast,
    "CastLike": lambda _, ins: ins[0].to(ins[1].dtype),
    "Celu": lambda attributes, ins: fn.celu(ins[0], attributes.get("alpha", 1.0)),
    "Clip": _clip,
    "Concat": lambda attributes, ins: torch.cat(list(ins), attributes["axis"]),
    "Cos": _unary(torch.cos),
    "CumSum": _cumsum,
    "DepthToSpace": _depth_to_space,
    "Div": _binary(torch.div),
    "Einsum": lambda attributes, ins: torch.einsum(attributes["equation"].decode(), *ins),
    "Elu": lambda attributes, ins: fn.elu(ins[0], attributes.get("alpha", 1.0)),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Expand": lambda _, ins: ins[0] * torch.ones([int(size) for size in ins[1]], dtype=ins[0].dtype),
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "HardSigmoid": lambda attributes, ins: torch.clamp(
        attributes.get("alpha", 0.2) * ins[0] + attributes.get("beta", 0.5), 0, 1
    ),
    "HardSwish": _unary(fn.hardswish),
    "Identity": _unary(lambda data: data),
    "LeakyRelu": lambda attributes, ins: fn.leaky_relu(ins[0], attributes.get("alpha", 0.01)),
    "Log": _unary(torch.log),
    "LogSoftmax": lambda attributes, ins: torch.log_softmax(ins[0], attributes.get("axis", -1)),
    "MatMul": _binary(torch.matmul),
    "Max": _fold(torch.maximum),
    "Mean": lambda _, ins: sum(ins[1:], ins[0]) / len(ins),
    "Min": _fold(torch.minimum),
    "Mish": _unary(fn.mish),
    "Mul": _binary(torch.mul),
    "Neg": _unary(torch.neg),
    "PRelu": lambda _, ins: torch.where(ins[0] < 0, ins[0] * ins[1], ins[0]),
    "Pad": _pad,
    "Pow": lambda _, ins: torch.pow(ins[0], ins[1].to(ins[0].dtype)),
    "Reciprocal": _unary(torch.reciprocal),
    "ReduceL1": _reduce(lambda data, **more: data.abs().sum(**more)),
    "ReduceL2": _reduce(lambda data, **more: torch.linalg.vector_norm(data, **more)),
    "ReduceLogSumExp": _reduce(torch.logsumexp),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin),
    "ReduceSum": _reduce(torch.sum),
    "ReduceSumSquare": _reduce(lambda data, **more: data.square().sum(**more)),
    "Relu": _unary(torch.relu),
    "Reshape": _reshape,
    "Sigmoid": _unary(torch.sigmoid),
    "Selu": lambda attributes, ins: _selu(attributes, ins[0]),
    "Sin": _unary(torch.sin),
    "Slice": _slice,
    "Softmax": lambda attributes, ins: torch.softmax(ins[0], attributes.get("axis", -1)),
    "Softplus": lambda _, ins: fn.softplus(ins[0], threshold=80.0),
    "Softsign": _unary(fn.softsign),
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Sqrt": _unary(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _binary(torch.sub),
    "Sum": lambda _, ins: sum(ins[1:], ins[0]),
    "Swish": lambda attributes, ins: ins[0] * torch.sigmoid(attributes.get("alpha", 1.0) * ins[0]),
    "Tanh": _unary(torch.tanh),
    "ThresholdedRelu": lambda attributes, ins: torch.where(
        ins[0] > attributes.get("alpha", 1.0), ins[0], torch.zeros_like(ins[0])
    ),
    "Tile": lambda _, ins: ins[0].repeat(*ins[1].tolist()),
    "Transpose": lambda attributes, ins: ins[0].permute(*attributes.get("perm", reversed(range(ins[0].dim())))),
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Where": lambda _, ins: torch.where(ins[0], ins[1], ins[2]),
}
"""Operator → what it computes, as torch can differentiate it. Operators without float results need none."""
