"""The values that layout ops and channelwise ops make of the output channels of a product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from onnx import NodeProto

from passes.graph.op_facts import attribute_of, op_of
from passes.rewrites.channel_layout import ChannelLayout, Size
from passes.rewrites.merged_product import MergedProduct
from passes.structures.axes import axes_of
from passes.structures.matrices import matrix_of, matrix_values
from passes.structures.view import GraphView
from passes.weights.stand_ins import Array


@dataclass(frozen=True, slots=True)
class ChannelOp:
    """An operator that treats each channel by itself, so that the operator can also run on the product's own output.

    `params` maps the positions of inputs with one number per channel to places in the layout's `params`.
    """

    node: NodeProto
    data: int = 0
    params: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChannelValue:
    """A value computed from the product's channels: `layout` says which channels, `ops` the operators on the way."""

    name: str
    layout: ChannelLayout
    ops: tuple[ChannelOp, ...] = ()
    node: NodeProto | None = None
    """What makes it; None for the product's own output."""
    nexts: tuple[ChannelValue, ...] = ()
    """The values computed from this value."""
    consumers: tuple[NodeProto, ...] = ()
    """The nodes that read it and do something else."""

    def walk(self) -> Iterator[ChannelValue]:
        yield self
        for following in self.nexts:
            yield from following.walk()


def channel_values(view: GraphView, product: MergedProduct) -> ChannelValue:
    """The tree of values that are made of the channels of `product`."""
    dims = view.dims(product.value)
    assert dims is not None
    layout = ChannelLayout.of_product(dims, product.axis)
    return _expand(view, ChannelValue(product.value, layout))


def _expand(view: GraphView, value: ChannelValue) -> ChannelValue:
    nexts: list[ChannelValue] = []
    consumers: list[NodeProto] = []
    for node in view.consumers.get(value.name, []):
        made = _follow(view, node, value)
        if made is None:
            consumers.append(node)
        else:
            nexts += [_expand(view, result) for result in made]
    return replace(value, nexts=tuple(nexts), consumers=tuple(consumers))


def _follow(view: GraphView, node: NodeProto, value: ChannelValue) -> list[ChannelValue] | None:
    """What `node` makes of the channels; None if it does something else with them."""
    rule = RULES.get(op_of(node))
    if rule is None or list(node.input).count(value.name) != 1:
        return None
    layouts = rule(view, node, value)
    return None if layouts is None or any(out.layout is None for out in layouts) else _channel_values(layouts, node)


@dataclass(frozen=True, slots=True)
class _NodeOutput:
    """An output of a node. A layout of None is not known."""

    name: str
    layout: ChannelLayout | None
    ops: tuple[ChannelOp, ...]
    node: NodeProto | None = None


def _channel_values(results: Sequence[_NodeOutput], node: NodeProto) -> list[ChannelValue]:
    return [
        ChannelValue(result.name, result.layout, result.ops, result.node or node)
        for result in results
        if result.name and result.layout is not None
    ]


Rule = Callable[[GraphView, NodeProto, ChannelValue], "list[_NodeOutput] | None"]


def _layout_rule(change: Callable[[GraphView, NodeProto, ChannelLayout], ChannelLayout | None]) -> Rule:
    """The rule of an op that only rearranges its first input."""

    def follow(view: GraphView, node: NodeProto, value: ChannelValue) -> list[_NodeOutput] | None:
        if node.input[0] != value.name:
            return None
        return [_NodeOutput(node.output[0], change(view, node, value.layout), value.ops)]

    return follow


def _transpose(_: GraphView, node: NodeProto, layout: ChannelLayout) -> ChannelLayout:
    return layout.transpose(attribute_of(node, "perm") or list(reversed(range(len(layout.axes)))))


def _reshape(view: GraphView, node: NodeProto, layout: ChannelLayout) -> ChannelLayout | None:
    known = view.dims(node.output[0])
    written = view.small_constant(node.input[1]) if node.op_type == "Reshape" else None
    if written is not None:
        sizes: list[Size] = [int(size) for size in written]
        if attribute_of(node, "allowzero", 0) and 0 in sizes:
            return None
        dims = [f"={at}" if size == 0 else "" if size == -1 else size for at, size in enumerate(sizes)]
        if known is not None:
            dims = [own if dim == "" else dim for dim, own in zip(dims, known, strict=True)]
        return layout.reshape(dims, node.input[1])
    return None if known is None else layout.reshape(known, node.input[1] if node.op_type == "Reshape" else "")


def _squeeze(view: GraphView, node: NodeProto, layout: ChannelLayout) -> ChannelLayout | None:
    return layout.squeeze(axes_of(view, node))


def _unsqueeze(view: GraphView, node: NodeProto, layout: ChannelLayout) -> ChannelLayout | None:
    axes = axes_of(view, node)
    return layout.unsqueeze(axes) if axes else None


def _gather(view: GraphView, node: NodeProto, layout: ChannelLayout) -> ChannelLayout | None:
    indices = constant_array(view, node.input[1])
    return None if indices is None else layout.take(attribute_of(node, "axis", 0), indices)


def _gather_nd(view: GraphView, node: NodeProto, layout: ChannelLayout) -> ChannelLayout | None:
    """A GatherND along the first axis alone: torch's `x[:, [0]]` is one, between two Transposes."""
    indices = constant_array(view, node.input[1])
    if indices is None or indices.shape[-1:] != (1,) or attribute_of(node, "batch_dims", 0):
        return None
    return layout.take(0, indices[..., 0])


def _slice(view: GraphView, node: NodeProto, layout: ChannelLayout) -> ChannelLayout | None:
    bounds: list[list[int] | None] = []
    for at, name in enumerate(("starts", "ends", "axes", "steps"), start=1):
        given = attribute_of(node, name)
        array = constant_array(view, node.input[at]) if len(node.input) > at and node.input[at] else None
        if given is None and array is None and (at < 3 or (len(node.input) > at and node.input[at])):
            return None
        bounds.append(list(given) if given is not None else None if array is None else array.ravel().tolist())
    starts, ends = bounds[0] or [], bounds[1] or []
    axes, steps = bounds[2] or list(range(len(starts))), bounds[3] or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        taken = _slice_axis(layout, slice(start, end, step), axis)
        if taken is None:
            return None
        layout = taken
    return layout


def _slice_axis(layout: ChannelLayout, part: slice, axis: int) -> ChannelLayout | None:
    group = layout.axes[axis]
    if not all(factor.is_channel for factor in group) or not group:
        return None
    count = int(np.prod([int(factor.size) for factor in group]))
    end = None if part.stop < -count and part.step < 0 else part.stop
    return layout.take(axis, np.arange(count)[slice(part.start, end, part.step)])


def _split(view: GraphView, node: NodeProto, value: ChannelValue) -> list[_NodeOutput] | None:
    """Split; and SplitToSequence, if the list is only read at known indices."""
    axis = attribute_of(node, "axis", 0)
    group = value.layout.axes[axis]
    if not group or not all(factor.is_channel for factor in group):
        return None
    count = int(np.prod([int(factor.size) for factor in group]))
    reads = _reads_of_sequence(view, node) if node.op_type == "SplitToSequence" else list(enumerate(node.output))
    sizes = None if reads is None else _split_sizes(view, node, count)
    if reads is None or sizes is None or sum(sizes) != count:
        return None
    ends = np.cumsum(sizes)
    results: list[_NodeOutput] = []
    for at, target in reads:
        name, consumer = (target, node) if isinstance(target, str) else (target.output[0], target)
        layout = value.layout.take(axis, np.arange(ends[at] - sizes[at], ends[at]))
        if layout is not None and node.op_type == "SplitToSequence" and not attribute_of(node, "keepdims", 1):
            layout = layout.squeeze([axis]) if len(node.input) < 2 or not node.input[1] else layout
        results.append(_NodeOutput(name, layout, value.ops, consumer))
    return results


def _split_sizes(view: GraphView, node: NodeProto, count: int) -> list[int] | None:
    given = attribute_of(node, "split")
    if given:
        return list(given)
    if len(node.input) > 1 and node.input[1]:
        array = constant_array(view, node.input[1])
        if array is None:
            return None
        size = int(array) if array.ndim == 0 else 0
        return [min(size, count - at) for at in range(0, count, size)] if size else array.tolist()
    if node.op_type == "SplitToSequence":
        return [1] * count
    number = attribute_of(node, "num_outputs", len(node.output))
    size = -(-count // number)
    return [min(size, max(count - at * size, 0)) for at in range(number)]


def _reads_of_sequence(view: GraphView, node: NodeProto) -> list[tuple[int, NodeProto]] | None:
    found: list[tuple[int, NodeProto]] = []
    for consumer in view.consumers.get(node.output[0], []):
        index = view.scalar(consumer.input[1]) if op_of(consumer) == "SequenceAt" else None
        if index is None:
            return None
        found.append((int(index), consumer))
    return found


def _elementwise(view: GraphView, node: NodeProto, value: ChannelValue) -> list[_NodeOutput] | None:
    """An op on each element, whose other inputs are constants: a scalar, or an element for each channel."""
    layout, params = value.layout, dict[int, int]()
    data = list(node.input).index(value.name)
    for at, name in enumerate(node.input):
        if at == data or not name or _is_single(view, name):
            continue
        array = constant_array(view, name) if op_of(node) in WITH_PARAMS else None
        wider = None if array is None else layout.with_param(array)
        if wider is None:
            return None
        params[at], layout = len(layout.params), wider
    op = ChannelOp(node, data, params)
    return [_NodeOutput(node.output[0], layout, (*value.ops, op))]


def _batch_norm(view: GraphView, node: NodeProto, value: ChannelValue) -> list[_NodeOutput] | None:
    layout = value.layout
    if len(layout.axes) < 2 or not layout.is_channel_axis(1) or attribute_of(node, "training_mode", 0):
        return None
    if node.input[0] != value.name or [name for name in node.output[1:] if name]:
        return None
    params = dict[int, int]()
    for at in range(1, 5):
        array = constant_array(view, node.input[at])
        shape = None if array is None else array.reshape(-1, *[1] * (len(layout.axes) - 2))
        wider = None if shape is None else layout.with_param(shape)
        if wider is None:
            return None
        params[at], layout = len(layout.params), wider
    return [_NodeOutput(node.output[0], layout, (*value.ops, ChannelOp(node, 0, params)))]


def _is_single(view: GraphView, name: str) -> bool:
    dims = view.dims(name)
    return dims is not None and len(dims) <= 1 and all(dim == 1 for dim in dims)


def constant_array(view: GraphView, name: str) -> Array | None:
    """The elements of a stored tensor, after layout ops and casts; None if they are computed or unread."""
    matrix = matrix_of(view, name)
    return matrix_values(view, matrix) if matrix is not None and matrix.is_plain else None


WITH_PARAMS: Final = frozenset({"Add", "Sub", "Mul", "Div"})

RULES: Final[Mapping[str, Rule]] = {
    "Identity": _layout_rule(lambda _view, _node, layout: layout),
    "Transpose": _layout_rule(_transpose),
    **dict.fromkeys(("Reshape", "Flatten"), _layout_rule(_reshape)),
    "Squeeze": _layout_rule(_squeeze),
    "Unsqueeze": _layout_rule(_unsqueeze),
    "Gather": _layout_rule(_gather),
    "GatherND": _layout_rule(_gather_nd),
    "Slice": _layout_rule(_slice),
    **dict.fromkeys(("Split", "SplitToSequence"), _split),
    **dict.fromkeys((*sorted(WITH_PARAMS), "Clip", "Cast", "Neg", "QuantizeLinear", "DequantizeLinear"), _elementwise),
    "BatchNormalization": _batch_norm,
}
"""Op → the function that gives the layouts of its outputs."""
