"""Take a product apart by the roles of its channels: a product for each role, and what layout its readers need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from passes.graph.traversal import bodies_in, live_nodes, reads_of, sort_nodes
from passes.provenance.weight_origins import free_name
from passes.rewrites.channel_layout import Group
from passes.rewrites.merged_product import (
    ChannelOp,
    ChannelValue,
    MergedProduct,
    NotSplit,
    StoredChannels,
    channel_values,
    read_product,
    stored_channels,
)
from passes.structures.view import GraphView, attribute_of, modules_of, op_of
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import TYPED_FIELDS, Key, Weight, digest_of, initializer_of

__all__ = ["Roles", "SplitModel", "split_products"]

Array = np.ndarray[Any, np.dtype[Any]]

Roles = Mapping[str, frozenset[str]]
"""Role, such as `q` or `gate` → the names of all values that it is made of."""

REST: Final = "rest"
"""The role of channels that have none: a matrix may be merged with more than Q, K and V."""


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A model with products taken apart. `split` names the merged matrices, `notes` says of others why they stay."""

    model: DetachedModel
    split: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChannelPart:
    """The channels of one product that one consumer takes."""

    role: str
    value: ChannelValue

    @property
    def channels(self) -> Array:
        """Their numbers in the order in which the value has them."""
        return self.value.layout.channels.reshape(-1)


def split_products(view: GraphView, wanted: Mapping[str, Roles]) -> SplitModel:
    """The model of `view` with the products that make the values `wanted` taken apart by their roles.

    A product that cannot be taken apart stays, with a note. The given model does not change.
    """
    build = _GraphBuilder(view)
    split: list[str] = []
    notes: dict[str, list[str]] = {}
    for value, roles in wanted.items():
        node = view.producers[value]
        title = value
        try:
            product = read_product(view, node)
            title = product.matrix.name
            root = channel_values(view, product)
            parts = list(_find_parts(view, root, roles))
            _refuse_shared_channels(parts)
            build.split(product, root, _by_role(parts, roles))
            split.append(title)
        except NotSplit as why:
            notes.setdefault(str(why), []).append(title)
    said = tuple(f"{_join_names(titles)} {why}" for why, titles in notes.items())
    return SplitModel(build.model() if split else view.model, tuple(split), said)


def _join_names(names: Sequence[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _find_parts(view: GraphView, root: ChannelValue, roles: Roles) -> Iterator[ChannelPart]:
    """The nearest values that have the channels of a single role; joined roles where a reader takes several at once.

    Raises:
        NotSplit: the product's output is read whole.
    """
    outputs = dict.fromkeys((info.name for info in view.model.proto.graph.output), "the model's output")
    for node in view.own:
        if bodies_in(node):
            outputs |= dict.fromkeys(reads_of(node), f"the body of {op_of(node)}")
    front = [root]
    while front:
        value = front.pop()
        own = [role for role, reached in roles.items() if value.name in reached]
        readers = [op_of(node) for node in value.readers] + ([outputs[value.name]] if value.name in outputs else [])
        if not value.nexts and not readers:
            continue  # an output of Split that nothing reads
        if len(own) > 1 and not readers:
            front += reversed(value.nexts)
        elif value is root:
            raise NotSplit(f"is read whole by {readers[0]}" if readers else "has channels of one role only")
        else:
            yield ChannelPart("".join(own) or REST, _behind_squeeze(value, outputs))


def _behind_squeeze(value: ChannelValue, outputs: Mapping[str, str]) -> ChannelValue:
    """The value behind a Squeeze or an Identity that is the only reader of `value`."""
    while len(value.nexts) == 1 and not value.readers and value.name not in outputs:
        (behind,) = value.nexts
        if behind.node is None or behind.node.op_type not in ("Squeeze", "Identity"):
            break
        value = behind
    return value


def _by_role(parts: Iterable[ChannelPart], roles: Roles) -> dict[str, list[ChannelPart]]:
    found: dict[str, list[ChannelPart]] = {role: [] for role in roles}
    for part in parts:
        found.setdefault(part.role, []).append(part)
    return {role: own for role, own in found.items() if own}


def _refuse_shared_channels(parts: Sequence[ChannelPart]) -> None:
    """Each channel has to belong to one role; two parts of a role are the same channels, or have none in common."""
    if len({part.role for part in parts}) < 2:
        raise NotSplit("has channels of one role only")
    owners: dict[int, tuple[str, bytes]] = {}
    for part in parts:
        own = (part.role, part.channels.tobytes())
        for channel in part.channels.tolist():
            if owners.setdefault(channel, own) != own:
                raise NotSplit("has channels that several of its parts share")


@dataclass(slots=True)
class _GraphBuilder:
    """Collects the nodes and tensors that replace products."""

    view: GraphView
    removed: set[int] = field(default_factory=set)
    nodes: list[NodeProto] = field(default_factory=list)
    tensors: list[TensorProto] = field(default_factory=list)
    weights: dict[Key, Weight] = field(default_factory=dict)
    made: dict[tuple[object, ...], str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    node_names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        graph = self.view.model.proto.graph
        self.names = {*self.view.initializers, *self.view.producers, *(info.name for info in graph.input)}
        self.node_names = {node.name for node in graph.node}

    def model(self) -> DetachedModel:
        source = self.view.model
        proto = onnx.ModelProto()
        proto.CopyFrom(source.proto)
        graph = proto.graph
        was_alive = {name for node in live_nodes(graph) for name in node.output}
        was_read = {name for node in graph.node for name in reads_of(node)}
        stays = [same for same, node in zip(graph.node, self.view.own, strict=True) if id(node) not in self.removed]
        replaced = onnx.GraphProto(node=[*stays, *self.nodes])
        del graph.node[:]
        graph.node.extend(replaced.node)
        graph.initializer.extend(self.tensors)
        sort_nodes(graph)
        alive = {name for node in live_nodes(graph) for name in node.output}
        left = [node for node in graph.node if alive.intersection(node.output) or not was_alive & {*node.output}]
        kept = onnx.GraphProto(node=left)
        del graph.node[:]
        graph.node.extend(kept.node)
        _drop_unread(graph, was_read)
        return DetachedModel(proto, {**source.weights, **self.weights})

    def split(self, product: MergedProduct, root: ChannelValue, roles: Mapping[str, Sequence[ChannelPart]]) -> None:
        """Add the products of all roles, or nothing at all.

        Raises:
            NotSplit: a tensor that cannot be cut, or sizes that are not known.
        """
        before = {one.name: copy(getattr(self, one.name)) for one in fields(self)}
        ends = {part.value.name for parts in roles.values() for part in parts}
        self.removed |= {id(product.node), *(id(node) for node in _nodes_between(root, ends))}
        try:
            for role, parts in roles.items():
                self._add_role(product, role, parts)
        except NotSplit:
            for name, value in before.items():
                setattr(self, name, value)
            raise

    def _add_role(self, product: MergedProduct, role: str, parts: Sequence[ChannelPart]) -> None:
        ops = parts[0].value.ops
        if any([one.node for one in part.value.ops] != [one.node for one in ops] for part in parts):
            raise NotSplit("has parts of one role that are not computed alike")
        pieces = list({part.channels.tobytes(): part for part in parts}.values())
        channels = np.concatenate([part.channels for part in pieces])
        nodes = [product.node, *(op.node for op in ops)]
        grouping = [part.value.layout.flat_order() for part in parts]
        if any(op.node.op_type == "BatchNormalization" for op in ops) and product.axis != 1 - len(grouping[0]):
            grouping = [(tuple(one for axis in order[:-1] for one in axis), order[-1]) for order in grouping]
        steps = [_layout_steps(order, part.value.layout.axes) for order, part in zip(grouping, parts, strict=True)]
        # The last of the nodes makes the value that readers know, if that is all there is to do.
        final = parts[0].value.name if len(parts) == 1 and not steps[0] else ""
        names = [final if final and node is nodes[-1] else self._free(f"{node.output[0]}.{role}") for node in nodes]
        inputs = list(product.node.input)
        for at, stored in product.weights.items():
            inputs[at] = self._cut(stored, channels, role, product.node)
        value = self._copy_node(product.node, inputs, names[0], role)
        is_flat = False
        for op, name in zip(ops, names[1:], strict=True):
            if op.node.op_type == "BatchNormalization" and len(grouping[0]) == 2 and not is_flat:
                is_flat = True
                value = self._flatten(value, product, len(channels), op.node, role)
            value = self._copy_op(op, value, name, role, pieces, 0 if is_flat else -product.axis - 1)
        flat = {part.channels.tobytes(): value for part in pieces}
        if len(pieces) > 1:
            flat = self._split_pieces(value, pieces, -1 if is_flat else product.axis, role)
        for part, order, todo in zip(parts, grouping, steps, strict=True):
            source = flat[part.channels.tobytes()]
            if source != part.value.name:
                self._lay_out(source, order, todo, part, role)

    def _flatten(self, value: str, product: MergedProduct, count: int, template: NodeProto, role: str) -> str:
        """`value` as a matrix of positions and channels, as BatchNormalization takes it."""
        dims = self.view.dims(product.value)
        if product.axis != -1 or dims is None:
            raise NotSplit("is normalized by a BatchNormalization over another axis than its last")
        if len(dims) == 2:
            return value
        shape = self._constant(np.array([-1, count], np.int64), f"{value}.shape")
        return self._add_node("Reshape", [value, shape], self._free(f"{value}.flat"), template, role)

    def _copy_op(
        self, op: ChannelOp, value: str, name: str, role: str, pieces: Sequence[ChannelPart], trailing: int
    ) -> str:
        inputs = list(op.node.input)
        inputs[op.data] = value
        for at, place in op.params.items():
            numbers = np.concatenate([part.value.layout.params[place].reshape(-1) for part in pieces])
            ones = 0 if op.node.op_type == "BatchNormalization" else trailing
            inputs[at] = self._tensor(numbers.reshape(-1, *[1] * ones), inputs[at], role, op.node)
        return self._copy_node(op.node, inputs, name, role)

    def _split_pieces(self, value: str, pieces: Sequence[ChannelPart], axis: int, role: str) -> dict[bytes, str]:
        """Take the channels of one role apart again, where its readers take them in several pieces."""
        template = pieces[0].value.node
        assert template is not None
        names = [self._free(f"{value}.{at}") for at in range(len(pieces))]
        sizes = np.array([len(part.channels) for part in pieces], np.int64)
        node = onnx.helper.make_node("Split", [value], names, axis=axis)
        if self._opset() < 13:
            node.attribute.append(onnx.helper.make_attribute("split", sizes.tolist()))
        else:
            node.input.append(self._constant(sizes, f"{value}.sizes"))
        self._append(node, template, role)
        return {part.channels.tobytes(): name for part, name in zip(pieces, names, strict=True)}

    def _lay_out(
        self, source: str, order: Sequence[Group], steps: Sequence[_LayoutStep], part: ChannelPart, role: str
    ) -> None:
        template = part.value.node
        assert template is not None
        groups = list(order)
        if not steps:
            self._add_node("Identity", [source], part.value.name, template, role)
        for at, step in enumerate(steps):
            name = part.value.name if at == len(steps) - 1 else self._free(f"{part.value.name}.{STEP_NAMES[at]}")
            if step.perm:
                groups = [groups[one] for one in step.perm]
                source = self._add_node("Transpose", [source], name, template, role, perm=list(step.perm))
            else:
                shape = self._shape(groups, step.groups, name)
                source = self._add_node("Reshape", [source, shape], name, template, role)
                groups = list(step.groups)

    def _shape(self, before: Sequence[Group], after: Sequence[Group], name: str) -> str:
        """The tensor of sizes for a Reshape; sizes that are not fixed are copied, inferred, or read from another one."""
        sizes: list[int | tuple[str, int]] = []
        for at, group in enumerate(after):
            known = [one.size for one in group if isinstance(one.size, int)]
            source = group[0].source if len(group) == 1 else None
            if len(known) == len(group):
                sizes.append(prod(known))
            elif at < len(before) and before[at] == group:
                sizes.append(0)
            else:
                sizes.append(source or ("", at))
        open_places = [at for at, size in enumerate(sizes) if isinstance(size, tuple)]
        if len(open_places) == 1:
            sizes[open_places[0]] = -1
        numbers = [size for size in sizes if isinstance(size, int)]
        if len(numbers) == len(sizes):
            return self._constant(np.array(numbers, np.int64), f"{name}.shape")
        return self._shape_at_run_time(sizes, name)

    def _shape_at_run_time(self, sizes: Sequence[int | tuple[str, int]], name: str) -> str:
        pieces: list[str] = []
        for size in sizes:
            if isinstance(size, int):
                pieces.append(self._constant(np.array([size], np.int64), f"{name}.size"))
                continue
            source, at = size
            if not source:
                raise NotSplit("has more than one size that is only known at run time")
            key = ("size", source, at)
            if key not in self.made:
                place = self._constant(np.array([at], np.int64), f"{source}.place")
                self.made[key] = self._free(f"{source}.{at}")
                self.nodes.append(onnx.helper.make_node("Gather", [source, place], [self.made[key]], axis=0))
            pieces.append(self.made[key])
        whole = ("sizes", *pieces)
        if whole not in self.made:
            self.made[whole] = self._free(f"{name}.shape")
            self.nodes.append(onnx.helper.make_node("Concat", pieces, [self.made[whole]], axis=0))
        return self.made[whole]

    def _cut(self, stored: StoredChannels, channels: Array, role: str, reader: NodeProto) -> str:
        """The channels of a stored tensor, as the product reads them."""
        key = (stored.tensor.name, stored.axis, channels.tobytes())
        if key not in self.made:
            if self.view.model.is_unread(stored.tensor):
                raise NotSplit("has a weight that stays unread")
            whole = self.view.model.array(stored.tensor)
            part = np.ascontiguousarray(np.take(whole, channels, axis=stored.axis))
            self.made[key] = self._tensor(part, stored.tensor.name, role, reader, stored.tensor)
        name = self.made[key]
        for node, axis in reversed(stored.nodes):
            name = self._copy_weight_node(node, axis, name, channels, role)
        return name

    def _copy_weight_node(self, node: NodeProto, axis: int, name: str, channels: Array, role: str) -> str:
        inputs = [name, *node.input[1:]]
        dims = self.view.dims(node.output[0])
        if node.op_type == "DequantizeLinear" and dims is not None:
            along = attribute_of(node, "axis", 1) % len(dims)
            for at in range(1, len(inputs)):
                own = self.view.dims(inputs[at]) if inputs[at] else ()
                if own is None or len(own) > 1:
                    raise NotSplit(f"has a weight, {node.output[0]}, whose scales are not known")
                if own and own != (1,) and along == axis % len(dims):
                    inputs[at] = self._cut(stored_channels(self.view, inputs[at], 0), channels, role, node)
        key = ("weight node", node.output[0], tuple(inputs))
        if key not in self.made:
            self.made[key] = self._copy_node(node, inputs, self._free(f"{node.output[0]}.{role}"), role)
        return self.made[key]

    def _tensor(
        self, array: Array, origin: str, role: str, reader: NodeProto, template: TensorProto | None = None
    ) -> str:
        """Store `array`, a part of the tensor `origin`."""
        name = self._free(_part_name(origin, role, reader))
        data_type = template.data_type if template is not None else onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        if data_type in TYPED_FIELDS:
            data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            weight = Weight(array.shape, data_type, data, digest_of(array))
            tensor, key = initializer_of(name, weight)
            self.weights |= {} if key is None else {key: weight}
        else:
            tensor = numpy_helper.from_array(array, name)
        if template is not None:
            tensor.metadata_props.extend(template.metadata_props)
        self.tensors.append(tensor)
        return name

    def _constant(self, array: Array, name: str) -> str:
        """A small tensor of sizes; equal ones are one."""
        key = ("constant", array.tobytes())
        if key not in self.made:
            self.made[key] = self._free(name)
            self.tensors.append(numpy_helper.from_array(array, self.made[key]))
        return self.made[key]

    def _copy_node(self, node: NodeProto, inputs: Sequence[str], output: str, role: str) -> str:
        same = NodeProto()
        same.CopyFrom(node)
        del same.input[:], same.output[:]
        same.input.extend(inputs)
        same.output.append(output)
        self._append(same, node, role)
        return output

    def _add_node(
        self, op: str, inputs: Sequence[str], output: str, template: NodeProto, role: str, **attributes: Any
    ) -> str:
        self._append(onnx.helper.make_node(op, inputs, [output], **attributes), template, role)
        return output

    def _append(self, node: NodeProto, template: NodeProto, role: str) -> None:
        """Add `node` with the metadata of `template`, and a name after its."""
        if not node.metadata_props:
            node.metadata_props.extend(template.metadata_props)
        node.name = free_name(f"{template.name}.{role}", self.node_names) if template.name else ""
        self.node_names.add(node.name)
        self.nodes.append(node)

    def _free(self, name: str) -> str:
        name = free_name(name, self.names)
        self.names.add(name)
        return name

    def _opset(self) -> int:
        return next((one.version for one in self.view.model.proto.opset_import if one.domain in ("", "ai.onnx")), 0)


STEP_NAMES: Final = ("heads", "turned", "whole")


@dataclass(frozen=True, slots=True)
class _LayoutStep:
    """A Transpose by `perm`, or a Reshape to `groups`."""

    groups: tuple[Group, ...] = ()
    perm: tuple[int, ...] = ()


def _layout_steps(before: Sequence[Group], after: Sequence[Group]) -> list[_LayoutStep]:
    """What makes axes `after` of axes `before`, which have the same factors: a Reshape, a Transpose, a Reshape."""
    order = [one for axis in before for one in axis]
    wanted = [one for axis in after for one in axis]
    if list(before) == list(after):
        return []
    if order == wanted:
        return [_LayoutStep(tuple(after))]
    blocks: list[Group] = []
    for axis in after:
        for at, factor in enumerate(axis):
            is_next = at > 0 and order.index(factor) == order.index(axis[at - 1]) + 1
            blocks = [*blocks[:-1], (*blocks[-1], factor)] if is_next else [*blocks, (factor,)]
    lying = sorted(blocks, key=lambda block: order.index(block[0]))
    steps = [] if lying == list(before) else [_LayoutStep(tuple(lying))]
    steps.append(_LayoutStep(perm=tuple(lying.index(block) for block in blocks)))
    return steps if blocks == list(after) else [*steps, _LayoutStep(tuple(after))]


def _nodes_between(root: ChannelValue, ends: set[str]) -> Iterator[NodeProto]:
    """The nodes behind `root`, up to those that make `ends`."""
    for value in root.nexts:
        if value.node is not None:
            yield value.node
        if value.name not in ends:
            yield from _nodes_between(value, ends)


def _part_name(origin: str, role: str, reader: NodeProto) -> str:
    """`attn.c_attn.q.weight` for `attn.c_attn.weight`; a tensor without a name of its own is called after its module."""
    stem, dot, last = origin.rpartition(".")
    if dot and last in ("weight", "bias"):
        return f"{stem}.{role}.{last}"
    modules = modules_of(reader)
    if modules and ANONYMOUS.fullmatch(origin):
        return f"{modules[-1]}.{role}.{'weight' if reader.input[1:2] == [origin] else 'bias'}"
    return f"{origin}.{role}"


ANONYMOUS: Final = re.compile(r"(onnx::\w+|val_\d+|_?\d+)")
"""Names that an exporter has counted."""


def _drop_unread(graph: onnx.GraphProto, was_read: set[str]) -> None:
    """Drop the initializers that only the replaced nodes read, and the types of values that are gone."""
    read = {name for node in graph.node for name in reads_of(node)} | {info.name for info in graph.output}
    stored = [tensor for tensor in graph.initializer if tensor.name in read or tensor.name not in was_read]
    replaced = onnx.GraphProto(initializer=stored)
    del graph.initializer[:]
    graph.initializer.extend(replaced.initializer)
    made = {name for node in graph.node for name in node.output} | {info.name for info in graph.input}
    known = onnx.GraphProto(value_info=[info for info in graph.value_info if info.name in made])
    del graph.value_info[:]
    graph.value_info.extend(known.value_info)
