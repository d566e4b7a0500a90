"""Put each BatchNormalization into the weight and the bias of the product before it.

In the inference form a BatchNormalization multiplies each channel by a constant factor and adds a constant shift. The
product keeps its name and its weight keeps its name; the result has the values of the BatchNormalization's output, and
so takes the name of that output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np
from onnx import NodeProto

from passes.context import PassContext
from passes.graph.op_facts import BIAS, LAYOUT_OPS, attribute_of, input_of, op_of, opset_of
from passes.rewrites.channel_layout import ChannelLayout
from passes.rewrites.channel_values import ChannelOp, channel_values, constant_array
from passes.rewrites.merged_product import NotSplit, StoredChannels, read_product, stored_channels
from passes.rewrites.rewriter import Rewriter
from passes.step import PassResult, Step
from passes.structures.view import GraphView
from passes.suggest import AND_MORE, join_first
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import Array


@dataclass(frozen=True, slots=True)
class FoldBatchnorm(Step, name="fold-batchnorm", reads="values"):
    """Put BatchNormalization into the weight and bias of the product before it. The product is a Conv, ConvTranspose,
    Gemm or MatMul; their Add and layout operators may come between."""

    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = {"fold-batchnorm": ("batchnorm",)}

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        current = model
        while True:  # of two in a row, the second follows the product once the first is folded
            folded, reasons = _fold_all(current)
            if folded is current:
                break
            current = folded
        notes = [f"{join_first(names, 1, AND_MORE)} {reason}" for reason, names in reasons.items()]
        left = f"left as they are: {'; '.join(notes)}" if notes else None
        why = left if notes or current is not model else "no BatchNormalization"
        return PassResult(current, current is not model, why)


class _NotFolded(Exception):
    """Why a BatchNormalization stays, in words that follow its name."""


def _fold_all(model: DetachedModel) -> tuple[DetachedModel, dict[str, list[str]]]:
    """The model with every BatchNormalization folded that can be; reason → the names of the others."""
    view = GraphView(model)
    graph = Rewriter(view)
    graph.place = 0  # before all that reads what is added
    reasons: dict[str, list[str]] = {}
    used: set[int] = set()
    for node in view.own:
        if op_of(node) != "BatchNormalization":
            continue
        before = graph.state()
        try:
            _refuse_training(model, node)
            path = _path_to_product(view, node, graph.held)
            if used.intersection(map(id, path)):
                continue  # in the next turn
            FOLDERS[op_of(path[-1])](graph, node, path)
            used.update((id(node), *map(id, path)))
        except (_NotFolded, NotSplit) as why:
            graph.restore(before)
            reasons.setdefault(str(why), []).append(node.name or node.output[0])
    return (graph.to_model() if used else model), reasons


def _refuse_training(model: DetachedModel, node: NodeProto) -> None:
    opset = opset_of(model.proto)
    is_training = attribute_of(node, "training_mode", 0) or (opset < 7 and not attribute_of(node, "is_test", 0))
    if is_training or [name for name in node.output[1:] if name]:
        raise _NotFolded("is in training mode")
    if not attribute_of(node, "spatial", 1):
        raise _NotFolded("has values for each place, not for each channel")


def _path_to_product(view: GraphView, norm: NodeProto, fixed: Mapping[str, str]) -> list[NodeProto]:
    """The nodes from the producer of `norm`'s input back to the product; only this path and `norm` read them."""
    path: list[NodeProto] = []
    value = norm.input[0]
    while True:
        node = view.producers.get(value)
        if node is None or op_of(node) not in (*FOLDERS, *BETWEEN):
            raise _NotFolded(
                f"follows {'an input' if node is None else op_of(node)}, which is no product with a weight"
            )
        consumers = [consumer for consumer in view.consumers.get(value, ()) if op_of(consumer) != "Shape"]
        if value in fixed or len(consumers) > 1:
            raise _NotFolded(f"follows a value that {fixed.get(value) or 'others'} read{'s' * (value in fixed)} too")
        path.append(node)
        if op_of(node) in FOLDERS:
            return path
        computed = [name for name in node.input if name and name not in view.folded]
        if len(computed) != 1:
            raise _NotFolded(f"follows an {op_of(node)} of two computed values")
        value = computed[0]


BETWEEN: Final = LAYOUT_OPS | {"Add"}
"""What may stand between a product and its BatchNormalization."""


def _norm_params(view: GraphView, norm: NodeProto) -> tuple[Array, ...]:
    """Scale, shift, mean and variance."""
    arrays = [None if name in view.inputs else constant_array(view, name) for name in norm.input[1:5]]
    found = [array.astype(np.float64) for array in arrays if array is not None]
    if len(found) != 4:
        raise _NotFolded("has values that are computed, fed, or unread")
    return tuple(found)


def _affine(norm: NodeProto, params: Sequence[Array]) -> tuple[Array, Array]:
    """The factor and the shift of each channel."""
    scale, shift, mean, variance = params
    factor = scale / np.sqrt(variance + attribute_of(norm, "epsilon", 1e-5))
    return factor, shift - mean * factor


def _fold_into_conv(graph: Rewriter, norm: NodeProto, path: Sequence[NodeProto]) -> None:
    """Scale the filters of a Conv or ConvTranspose, which has its channels where BatchNormalization has them."""
    conv, view = path[-1], graph.view
    if len(path) > 1:
        raise _NotFolded(f"follows {op_of(path[0])} after {op_of(conv)}")
    factor, shift = _affine(norm, _norm_params(view, norm))
    stored = _stored_weight(view, conv.input[1], 0)
    if op_of(conv) == "Conv":
        weight = _scaled_weight(graph, stored, lambda array: array * _along(factor, array.ndim, 0))
    else:  # (inputs, outputs of one group, …)
        groups = attribute_of(conv, "group", 1)
        parts = factor.reshape(groups, 1, -1)

        def scale(array: Array) -> Array:
            wide = array.reshape(groups, array.shape[0] // groups, array.shape[1], -1)
            return (wide * parts[..., None]).reshape(array.shape)

        weight = _scaled_weight(graph, stored, scale)
    dtype = view.model.array(stored.tensor).dtype
    bias = _bias(graph, norm, conv, dtype, factor, shift)
    _end(graph, norm, path, {id(conv): [conv.input[0], weight, bias]})


def _along(values: Array, rank: int, axis: int) -> Array:
    return values.reshape([-1 if at == axis % rank else 1 for at in range(rank)])


def _fold_into_matrix(graph: Rewriter, norm: NodeProto, path: Sequence[NodeProto]) -> None:
    """Scale the columns of a MatMul or a Gemm, whose channels layout operators may have moved since."""
    node, view = path[-1], graph.view
    product = read_product(view, node)
    value = next((result for result in channel_values(view, product).walk() if result.node is norm), None)
    if value is None:
        raise _NotFolded(f"has other channels than the {op_of(node)} before it")
    *adds, own = value.ops
    (at, stored), *_ = product.weights.items()
    count, channels = stored.tensor.dims[stored.axis], value.layout.channels.reshape(-1)
    if len(channels) != count or any(op_of(channel_op.node) != "Add" for channel_op in adds):
        raise _NotFolded(f"has other channels than the {op_of(node)} before it")
    _norm_params(view, norm)  # refuses what is fed

    def by_channel(values: Array) -> Array:
        found = np.empty(count)
        found[channels] = values.reshape(-1)
        return found

    params = [by_channel(value.layout.params[own.params[position]]) for position in range(1, 5)]
    factor, shift = _affine(norm, params)
    inputs = {id(node): list(node.input)}
    _refuse_other_nodes(stored)
    inputs[id(node)][at] = _scaled_weight(graph, stored, lambda array: array * _along(factor, array.ndim, stored.axis))
    layouts = {
        id(result.node): result.layout for result in channel_values(view, product).walk() if result.node is not None
    }
    for position, add in enumerate(adds):
        more = shift if position == len(adds) - 1 else np.zeros(count)
        inputs[id(add.node)] = _scaled_add(graph, add, layouts[id(add.node)], factor, more)
    dtype = view.model.array(stored.tensor).dtype
    if op_of(node) == "Gemm":
        beta = attribute_of(node, "beta", 1.0)
        if not beta:
            raise _NotFolded("follows a Gemm with beta 0")
        more = np.zeros(count) if adds else shift / beta
        if not adds or (len(node.input) > 2 and node.input[2]):
            bias = _bias(graph, norm, node, dtype, factor, more)
            inputs[id(node)] = [*inputs[id(node)][:2], bias]
    elif not adds:
        name = graph.renew_tensor(norm.input[2], _round_to(_laid_out(value.layout, shift), dtype))
        graph.replace_node(norm, "Add", [norm.input[0], name], norm.output[0])
        for changed in path:
            if id(changed) in inputs:
                graph.replace_node(changed, op_of(changed), inputs[id(changed)], changed.output[0])
        return
    _end(graph, norm, path, inputs)


def _end(graph: Rewriter, norm: NodeProto, path: Sequence[NodeProto], inputs: Mapping[int, Sequence[str]]) -> None:
    """Remove `norm`; the node before `norm` now makes the value that the consumers read."""
    graph.take_out(norm)
    for position, node in enumerate(path):
        if position == 0 or id(node) in inputs:
            output = norm.output[0] if position == 0 else node.output[0]
            graph.replace_node(node, op_of(node), inputs.get(id(node), list(node.input)), output)
    for consumer in graph.view.consumers.get(norm.input[0], ()):
        if op_of(consumer) == "Shape":
            graph.replace_node(consumer, "Shape", [norm.output[0]], consumer.output[0])


def _stored_weight(view: GraphView, name: str, axis: int) -> StoredChannels:
    try:
        stored = stored_channels(view, name, axis)
    except NotSplit as why:
        raise _NotFolded(f"follows a product with {name}, which {why}") from why
    if view.model.is_unread(stored.tensor):
        raise _NotFolded(f"follows a product with {name}, which stays unread")
    if stored.nodes:
        raise _NotFolded(f"follows a product with {name}, which is computed by {op_of(stored.nodes[0][0])}")
    return stored


def _refuse_other_nodes(stored: StoredChannels) -> None:
    other = next((node for node, _ in stored.nodes if op_of(node) not in ("Transpose", "Identity")), None)
    if other is not None:
        raise _NotFolded(f"follows a product with {stored.tensor.name}, which is computed by {op_of(other)}")


def _scaled_weight(graph: Rewriter, stored: StoredChannels, scale: Callable[[Array], Array]) -> str:
    """Store the scaled weight, and return the name for the product to read: the same name if no other node reads it."""
    view, tensor = graph.view, stored.tensor
    if view.model.is_unread(tensor):
        raise _NotFolded(f"follows a product with {tensor.name}, which stays unread")
    array = view.model.array(tensor)
    values = _round_to(scale(array.astype(np.float64)), array.dtype)
    name = graph.renew_tensor(tensor.name, values, [node.output[0] for node, _ in stored.nodes])
    if name == tensor.name and stored.nodes:
        return stored.nodes[0][0].output[0]
    for node, _ in reversed(stored.nodes):
        name = graph.copy_node(node, [name, *node.input[1:]], graph.free(node.output[0]), "")
    return name


def _round_to(values: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
    if not np.isfinite(rounded.astype(np.float64)).all():
        raise _NotFolded("would make a weight that its dtype cannot hold")
    return rounded


def _bias(graph: Rewriter, norm: NodeProto, node: NodeProto, dtype: np.dtype[Any], factor: Array, more: Array) -> str:
    """The bias of the product `node` times `factor`, and `more` added.

    Where the product has none, the shift of `norm` becomes it, under the name that it has.
    """
    view = graph.view
    name = input_of(node, BIAS)
    if not name:
        return graph.renew_tensor(norm.input[2], _round_to(more, dtype))
    if name in view.inputs:
        raise _NotFolded(f"follows a product with {name}, which is an input of the model")
    array = constant_array(view, name)
    if array is None or array.size not in (1, len(factor)):
        raise _NotFolded(f"follows a product with {name}, which is no stored bias of one number per channel")
    values = np.broadcast_to(array.astype(np.float64).reshape(-1), (len(factor),))
    return graph.renew_tensor(name, _round_to(values * factor + more, dtype))


def _scaled_add(graph: Rewriter, add: ChannelOp, layout: ChannelLayout, factor: Array, more: Array) -> list[str]:
    """The inputs of an Add of constants, once its output channels are multiplied by `factor` and `more` is added."""
    node, view = add.node, graph.view
    at = 1 - add.data
    array = constant_array(view, node.input[at])
    if array is None or node.input[at] in {info.name for info in view.model.proto.graph.input}:
        raise _NotFolded(f"follows an Add of {node.input[at]}, which is fed or unread")
    count, channels = len(factor), layout.channels.reshape(-1)
    given = np.broadcast_to(array.reshape(-1), (count,)) if at not in add.params else layout.params[add.params[at]]
    values = np.empty(count)
    values[channels] = given.astype(np.float64).reshape(-1)
    laid = _round_to(_laid_out(layout, values * factor + more), array.dtype)
    inputs = list(node.input)
    inputs[at] = graph.renew_tensor(node.input[at], laid)
    return inputs


def _laid_out(layout: ChannelLayout, values: Array) -> Array:
    """One number for each channel, as they broadcast to a value of this layout."""
    shape: list[int] = []
    for axis in layout.axes:
        if any(factor.is_channel for factor in axis) and not all(factor.is_channel for factor in axis):
            raise _NotFolded("has its channels and places along one axis")
        shape.append(prod(int(factor.size) for factor in axis if factor.is_channel))
    first = next((at for at, size in enumerate(shape) if size > 1), len(shape) - 1)
    return values[layout.channels].reshape(shape[first:])


FOLDERS: Final[Mapping[str, Callable[[Rewriter, NodeProto, Sequence[NodeProto]], None]]] = {
    "Conv": _fold_into_conv,
    "ConvTranspose": _fold_into_conv,
    "Gemm": _fold_into_matrix,
    "MatMul": _fold_into_matrix,
}
"""Product → the function that folds a BatchNormalization after that product."""
