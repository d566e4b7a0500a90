"""The slopes of a model's outputs by values inside of it, by torch's autograd over ONNX's operators.

Only nodes between the wanted values and the outputs are computed here. What else these nodes read (shapes, masks, and
all that lies before) comes from a run of onnxruntime, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
import torch
from onnx import NodeProto, helper
from torch import Tensor
from torch.nn import functional as fn

from passes.graph.op_facts import ONNX_DOMAINS
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from pipeline.errors import Unsupported
from pipeline.quantsim.sites import float_tensors
from pipeline.runtime.tensors import as_tensor

__all__ = ["Backward"]

Arrays = Mapping[str, np.ndarray]
Inputs = Sequence[Any]
"""Tensors in the order of the node's inputs; None for one that is left out."""
Attributes = Mapping[str, Any]


class Backward:
    """Backward passes through the part of `model` behind the values `names`.

    `reads` are the values that a pass has to be given beside the weights.

    Raises:
        Unsupported: operators on the way have no function here; all are listed.
    """

    def __init__(self, model: DetachedModel, names: Collection[str]) -> None:
        graph = model.proto.graph
        self._names = frozenset(names)
        self._nodes, missing = _path(graph, self._names, float_tensors(model.proto))
        if missing:
            shown = ", ".join(sorted(missing))
            raise Unsupported(f"no gradient goes through {plural(len(missing), 'operator')} of the model: {shown}")
        made = {name for node in self._nodes for name in node.output}
        read = {name for node in self._nodes for name in node.input if name}
        stored = {tensor.name: tensor for tensor in graph.initializer}
        self._weights = {name: as_tensor(model.array(stored[name])) for name in read & stored.keys()}
        self._starts = self._names - made
        self.reads = tuple(sorted((read | self._starts) - made - stored.keys()))
        self._outputs = [info.name for info in graph.output if info.name in made | self._starts]

    def forward(self, values: Arrays) -> Forward:
        """Compute the nodes on the way, from the values named in `reads`."""
        slots: dict[str, Tensor] = dict(self._weights)
        for name in self.reads:
            value = as_tensor(values[name])
            slots[name] = value.requires_grad_() if name in self._starts else value
        with torch.enable_grad():
            for node in self._nodes:
                attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
                results = FUNCTIONS[node.op_type](attributes, [slots.get(name) for name in node.input])
                several = results if isinstance(results, tuple | list) else (results,)
                slots.update(zip(node.output, several, strict=False))
        return Forward({name: slots[name] for name in self._outputs}, {name: slots[name] for name in self._names})


class Forward:
    """The values of one pass, through which slopes can be taken more than once."""

    def __init__(self, outputs: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        self._values = values
        self._outputs = outputs

    def outputs(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().numpy() for name, tensor in self._outputs.items()}

    def slopes(self, directions: Arrays) -> dict[str, np.ndarray]:
        """The slope of the sum of direction · output by each value; values that no output depends on are left out."""
        total = torch.stack([(self._outputs[name] * as_tensor(line)).sum() for name, line in directions.items()]).sum()
        found = torch.autograd.grad(total, list(self._values.values()), retain_graph=True, allow_unused=True)
        return {name: slope.numpy() for name, slope in zip(self._values, found, strict=True) if slope is not None}


def _path(graph: onnx.GraphProto, names: Collection[str], floats: frozenset[str]) -> tuple[list[NodeProto], set[str]]:
    """The nodes between `names` and the outputs, by float values; and the operators that have no function."""
    reached = set(names)
    forward: list[NodeProto] = []
    for node in graph.node:
        if not reached.isdisjoint(node.input) and not floats.isdisjoint(node.output):
            forward.append(node)
            reached.update(floats.intersection(node.output))
    wanted = {info.name for info in graph.output}
    nodes: list[NodeProto] = []
    missing: set[str] = set()
    for node in reversed(forward):
        if wanted.isdisjoint(node.output):
            continue
        nodes.append(node)
        wanted.update(node.input)
        if node.domain not in ONNX_DOMAINS or node.op_type not in FUNCTIONS:
            missing.add(".".join(filter(None, (node.domain, node.op_type))))
    nodes.reverse()
    return nodes, missing


def _gemm(attributes: Attributes, ins: Inputs) -> Tensor:
    left = ins[0].mT if attributes.get("transA") else ins[0]
    right = ins[1].mT if attributes.get("transB") else ins[1]
    product = attributes.get("alpha", 1.0) * (left @ right)
    return product if len(ins) < 3 or ins[2] is None else product + attributes.get("beta", 1.0) * ins[2]


def _padded(attributes: Attributes, data: Tensor, kernel: Sequence[int], value: float = 0.0) -> Tensor:
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
    data = _padded(attributes, ins[0], weight.shape[2:])
    convolve = {1: fn.conv1d, 2: fn.conv2d, 3: fn.conv3d}[rank]
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    bias = ins[2] if len(ins) > 2 else None
    return convolve(data, weight, bias, strides, 0, dilations, attributes.get("group", 1))


def _max_pool(attributes: Attributes, ins: Inputs) -> Tensor:
    kernel = attributes["kernel_shape"]
    pool = {1: fn.max_pool1d, 2: fn.max_pool2d, 3: fn.max_pool3d}[len(kernel)]
    data = _padded(attributes, ins[0], kernel, -math.inf)
    strides, dilations = attributes.get("strides", [1] * len(kernel)), attributes.get("dilations", [1] * len(kernel))
    return pool(data, kernel, strides, 0, dilations, bool(attributes.get("ceil_mode", 0)))


def _layer_norm(attributes: Attributes, ins: Inputs) -> Tensor:
    axis = attributes.get("axis", -1) % ins[0].dim()
    scaled = fn.layer_norm(ins[0], ins[0].shape[axis:], eps=attributes.get("epsilon", 1e-5)) * ins[1]
    return scaled if len(ins) < 3 or ins[2] is None else scaled + ins[2]


def _batch_norm(attributes: Attributes, ins: Inputs) -> Tensor:
    data, scale, bias, mean, variance = ins[:5]
    return fn.batch_norm(data, mean, variance, scale, bias, eps=attributes.get("epsilon", 1e-5))


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
    dtype = helper.tensor_dtype_to_np_dtype(attributes["to"])
    return ins[0].to(torch.tensor(np.zeros((), dtype)).dtype)


def _unary(compute: Callable[[Tensor], Tensor]) -> Callable[[Attributes, Inputs], Tensor]:
    return lambda _, ins: compute(ins[0])


def _binary(compute: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Attributes, Inputs], Tensor]:
    return lambda _, ins: compute(ins[0], ins[1])


FUNCTIONS: Final[Mapping[str, Callable[[Attributes, Inputs], Any]]] = {
    "Abs": _unary(torch.abs),
    "Add": _binary(torch.add),
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "CastLike": lambda _, ins: ins[0].to(ins[1].dtype),
    "Clip": _clip,
    "Concat": lambda attributes, ins: torch.cat(list(ins), attributes["axis"]),
    "Conv": _conv,
    "Cos": _unary(torch.cos),
    "Div": _binary(torch.div),
    "Elu": lambda attributes, ins: fn.elu(ins[0], attributes.get("alpha", 1.0)),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Expand": lambda _, ins: ins[0] * torch.ones([int(size) for size in ins[1]], dtype=ins[0].dtype),
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda _, ins: ins[0].mean(tuple(range(2, ins[0].dim())), keepdim=True),
    "HardSigmoid": lambda attributes, ins: torch.clamp(
        attributes.get("alpha", 0.2) * ins[0] + attributes.get("beta", 0.5), 0, 1
    ),
    "HardSwish": _unary(fn.hardswish),
    "Identity": _unary(lambda data: data),
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda attributes, ins: fn.leaky_relu(ins[0], attributes.get("alpha", 0.01)),
    "Log": _unary(torch.log),
    "LogSoftmax": lambda attributes, ins: torch.log_softmax(ins[0], attributes.get("axis", -1)),
    "MatMul": _binary(torch.matmul),
    "Max": _binary(torch.maximum),
    "MaxPool": _max_pool,
    "Min": _binary(torch.minimum),
    "Mul": _binary(torch.mul),
    "Neg": _unary(torch.neg),
    "Pow": lambda _, ins: torch.pow(ins[0], ins[1].to(ins[0].dtype)),
    "Reciprocal": _unary(torch.reciprocal),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin),
    "ReduceSum": _reduce(torch.sum),
    "Relu": _unary(torch.relu),
    "Reshape": _reshape,
    "Sigmoid": _unary(torch.sigmoid),
    "Sin": _unary(torch.sin),
    "Slice": _slice,
    "Softmax": lambda attributes, ins: torch.softmax(ins[0], attributes.get("axis", -1)),
    "Softplus": _unary(fn.softplus),
    "Split": _split,
    "Sqrt": _unary(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _binary(torch.sub),
    "Tanh": _unary(torch.tanh),
    "Transpose": lambda attributes, ins: ins[0].permute(*attributes.get("perm", reversed(range(ins[0].dim())))),
    "Unsqueeze": _unsqueeze,
    "Where": lambda _, ins: torch.where(ins[0], ins[1], ins[2]),
}
"""Operator → what it computes, as torch can differentiate it. Operators without float results need none."""
