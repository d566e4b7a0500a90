"""Take a product apart by the roles of its channels: a product for each role, and the layout its consumers need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import onnx
from onnx import NodeProto

from passes.graph.op_facts import attribute_of, op_of, opset_of
from passes.provenance.weight_origins import part_name
from passes.rewrites.channel_layout import AxisFactor, Group
from passes.rewrites.channel_values import ChannelOp, ChannelValue, channel_values
from passes.rewrites.layout_map import LayoutStep, layout_steps
from passes.rewrites.merged_product import MergedProduct, NotSplit, StoredChannels, read_product, stored_channels
from passes.rewrites.rewriter import Rewriter
from passes.structures.axes import product_of
from passes.structures.matrices import matrix_of
from passes.structures.view import NBITS, GraphView, modules_of
from passes.suggest import AND_MORE, join_first
from passes.weights.detached import DetachedModel
from passes.weights.mapped import find_file_range
from passes.weights.stand_ins import Array, Weight, derived_digest

Roles = Mapping[str, frozenset[str]]
"""Role, such as `q` or `gate` → the names of all values that the role is computed from."""

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
        """The indices of the channels, in the order in which the value has them."""
        return self.value.layout.channels.reshape(-1)


def split_products(view: GraphView, wanted: Mapping[str, Roles]) -> SplitModel:
    """The model of `view` with the products that make the values `wanted` taken apart by their roles.

    A product that cannot be taken apart stays, with a note. The given model does not change.
    """
    rewriter = Rewriter(view)
    split: list[str] = []
    notes: dict[str, list[str]] = {}
    for value, roles in wanted.items():
        node = view.producers[value]
        title = _matrix_name(view, node)
        try:
            product = read_product(view, node)
            title = product.matrix.name
            root = channel_values(view, product)
            parts = list(_find_parts(product, root, roles, rewriter.held))
            _refuse_shared_channels(parts)
            _Splitter(rewriter).split(product, root, _by_role(parts, roles))
            split.append(title)
        except NotSplit as why:
            notes.setdefault(str(why), []).append(title)
    said = tuple(f"{join_first(titles, 1, AND_MORE)} {why}" for why, titles in notes.items())
    return SplitModel(rewriter.to_model() if split else view.model, tuple(split), said)


def _matrix_name(view: GraphView, node: NodeProto) -> str:
    product = product_of(view, node)
    operands = node.input if product is None else product.operands
    return next((name for name in operands if name and name in view.folded), node.output[0])


def _find_parts(
    product: MergedProduct, root: ChannelValue, roles: Roles, fixed: Mapping[str, str]
) -> Iterator[ChannelPart]:
    """The nearest values that have the channels of a single role; joined roles where a consumer takes several at once.

    Raises:
        NotSplit: the product's output is read whole.
    """
    front = [root]
    while front:
        value = front.pop()
        own = [role for role, reached in roles.items() if value.name in reached]
        sized = value.layout.axes == root.layout.axes and product.has_sizes_of_data
        consumers = [op_of(node) for node in value.consumers if len(own) < 2 or not (sized and node.op_type == "Shape")]
        consumers += [fixed[value.name]] if value.name in fixed else []
        if not value.nexts and not consumers:
            continue  # an output of Split that nothing reads
        if len(own) > 1 and not consumers:
            front += reversed(value.nexts)
        elif value is root:
            raise NotSplit(f"is read whole by {consumers[0]}" if consumers else "has channels of one role only")
        else:
            yield ChannelPart("".join(own) or REST, _skip_squeezes(value, fixed))


def _skip_squeezes(value: ChannelValue, fixed: Mapping[str, str]) -> ChannelValue:
    """The output of a Squeeze or an Identity that is the only consumer of `value`."""
    while len(value.nexts) == 1 and not value.consumers and value.name not in fixed:
        (following,) = value.nexts
        if following.node is None or following.node.op_type not in ("Squeeze", "Identity"):
            break
        value = following
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


@dataclass(frozen=True, slots=True)
class _Splitter:
    """Writes the products of all roles in place of a merged one."""

    graph: Rewriter

    def split(self, product: MergedProduct, root: ChannelValue, roles: Mapping[str, Sequence[ChannelPart]]) -> None:
        """Replace `product` by one for each role; in case of an error nothing is changed.

        Raises:
            NotSplit: a tensor that cannot be cut, or sizes that are not known.
        """
        before = self.graph.state()
        self.graph.place = self.graph.view.positions[product.value]
        ends = {part.value.name for parts in roles.values() for part in parts}
        for node in (product.node, *_nodes_between(root, ends)):
            self.graph.take_out(node)
        try:
            for node in _shapes_between(root, ends):
                self._read_sizes_of_data(product, node)
            for role, parts in roles.items():
                self._add_role(product, role, parts)
        except NotSplit:
            self.graph.restore(before)
            raise

    def _read_sizes_of_data(self, product: MergedProduct, node: NodeProto) -> None:
        """Make `node`, a Shape of the product, one of its data, with the number of channels as the last size."""
        self.graph.take_out(node)
        dims = self.graph.view.dims(product.value)
        assert dims  # the product was read
        axes = list(range(len(dims)))[attribute_of(node, "start", 0) : attribute_of(node, "end")]
        positions, name = [at for at in axes if at != len(dims) - 1], node.output[0]
        pieces: list[str] = []
        if positions:
            sizes = self.graph.add_node("Shape", [product.data], self.graph.free(f"{name}.data"), node, "")
            chosen = self.graph.constant_ints(positions, f"{name}.places")
            pieces.append(
                self.graph.add_node("Gather", [sizes, chosen], self.graph.free(f"{name}.positions"), node, "", axis=0)
            )
        if len(axes) > len(positions):
            pieces.append(self.graph.constant_ints([int(dims[-1])], f"{name}.channels"))
        self.graph.add_node("Concat", pieces, name, node, "", axis=0)

    def _add_role(self, product: MergedProduct, role: str, parts: Sequence[ChannelPart]) -> None:
        """Add the product of one role, the ops on each of its channels, and the layout that each consumer takes."""
        ops = parts[0].value.ops
        if any(
            [channel_op.node for channel_op in part.value.ops] != [channel_op.node for channel_op in ops]
            for part in parts
        ):
            raise NotSplit("has parts of one role that are not computed alike")
        pieces = list({part.channels.tobytes(): part for part in parts}.values())
        channels = np.concatenate([part.channels for part in pieces])
        orders = [part.value.layout.flat_order() for part in parts]
        is_flat = any(op.node.op_type == "BatchNormalization" for op in ops) and product.axis != 1 - len(orders[0])
        if is_flat:
            orders = [_positions_first(order, product) for order in orders]
        steps = [layout_steps(order, part.value.layout.axes) for order, part in zip(orders, parts, strict=True)]
        nodes = [product.node, *(op.node for op in ops)]
        # The last of the nodes makes the value that the consumers know, if that is all there is to do.
        known = {id(nodes[-1]): parts[0].value.name} if len(parts) == 1 and not steps[0] else {}
        names = [known.get(id(node)) or self.graph.free(f"{node.output[0]}.{role}") for node in nodes]
        inputs = list(product.node.input)
        for at, stored in product.weights.items():
            inputs[at] = self._cut_weight(stored, channels, role, product.node)
        sizes = {"N": len(channels)} if op_of(product.node) == NBITS else {}
        value = self.graph.copy_node(product.node, inputs, names[0], role, **sizes)
        trailing = 0 if is_flat else -product.axis - 1
        if is_flat:
            shape = self.graph.constant_ints([-1, len(channels)], f"{value}.shape")
            value = self.graph.add_node("Reshape", [value, shape], self.graph.free(f"{value}.flat"), product.node, role)
        for op, name in zip(ops, names[1:], strict=True):
            value = self._copy_op(op, value, name, role, pieces, trailing)
        flat = {pieces[0].channels.tobytes(): value}
        if len(pieces) > 1:
            as_read = {p.channels.tobytes(): p.value.name for p, todo in zip(parts, steps, strict=True) if not todo}
            flat = self._split_pieces(value, pieces, as_read, -trailing - 1, role)
        for part, order, todo in zip(parts, orders, steps, strict=True):
            source = flat[part.channels.tobytes()]
            if source != part.value.name:
                self._lay_out(source, order, todo, part, role)

    def _copy_op(
        self, op: ChannelOp, value: str, name: str, role: str, pieces: Sequence[ChannelPart], trailing: int
    ) -> str:
        inputs = list(op.node.input)
        inputs[op.data] = value
        for at, position in op.params.items():
            values = np.concatenate([part.value.layout.params[position].reshape(-1) for part in pieces])
            ones = 0 if op.node.op_type == "BatchNormalization" else trailing
            matrix = matrix_of(self.graph.view, inputs[at])
            whole = None if matrix is None else matrix.stored
            part = _part_name(inputs[at], role, op.node)
            inputs[at] = self.graph.store(values.reshape(-1, *[1] * ones), part, whole, role)
        return self.graph.copy_node(op.node, inputs, name, role)

    def _split_pieces(
        self, value: str, pieces: Sequence[ChannelPart], names: Mapping[bytes, str], axis: int, role: str
    ) -> dict[bytes, str]:
        """Split the channels of one role further, because its consumers read them in several pieces, called `names`."""
        keys = [part.channels.tobytes() for part in pieces]
        names = {key: names.get(key) or self.graph.free(f"{value}.{at}") for at, key in enumerate(keys)}
        sizes = [len(part.channels) for part in pieces]
        if opset_of(self.graph.view.model.proto) < SPLIT_TAKES_SIZES:
            node = onnx.helper.make_node("Split", [value], list(names.values()), axis=axis, split=sizes)
        else:
            given = [value, self.graph.constant_ints(sizes, f"{value}.sizes")]
            node = onnx.helper.make_node("Split", given, list(names.values()), axis=axis)
        self.graph.enter_like(node, _producer(pieces[0]), role)
        return dict(names)

    def _lay_out(
        self, source: str, order: Sequence[Group], steps: Sequence[LayoutStep[AxisFactor]], part: ChannelPart, role: str
    ) -> None:
        """Give the channels in `source` the layout in which the consumers of `part` take them, by its name."""
        groups, template = list(order), _producer(part)
        if not steps:
            self.graph.add_node("Identity", [source], part.value.name, template, role)
        for at, step in enumerate(steps):
            name = part.value.name if at == len(steps) - 1 else self.graph.free(f"{part.value.name}.{STEP_NAMES[at]}")
            after = list(map(tuple, step.groups))
            if step.perm:
                source = self.graph.add_node("Transpose", [source], name, template, role, perm=list(step.perm))
            else:
                shape = self._shape(groups, after, name)
                source = self.graph.add_node("Reshape", [source, shape], name, template, role)
            groups = after

    def _shape(self, before: Sequence[Group], after: Sequence[Group], name: str) -> str:
        """The sizes for a Reshape; sizes that are not fixed are copied, inferred, or read from another tensor."""
        sizes: list[int | tuple[str, int]] = []
        for at, group in enumerate(after):
            if all(isinstance(factor.size, int) for factor in group):
                sizes.append(prod(int(factor.size) for factor in group))
            elif at < len(before) and before[at] == group:
                sizes.append(0)
            else:
                sizes.append((len(group) == 1 and group[0].source) or ("", at))
        unknown = [at for at, size in enumerate(sizes) if isinstance(size, tuple)]
        if len(unknown) == 1:
            sizes[unknown[0]] = -1
        known = [size for size in sizes if isinstance(size, int)]
        if len(known) == len(sizes):
            return self.graph.constant_ints(known, f"{name}.shape")
        return self._shape_at_run_time(sizes, name)

    def _shape_at_run_time(self, sizes: Sequence[int | tuple[str, int]], name: str) -> str:
        pieces = [self._size_at_run_time(size, name) for size in sizes]
        key, graph = ("sizes", *pieces), self.graph
        if key not in graph.made:
            graph.made[key] = graph.free(f"{name}.shape")
            graph.enter(onnx.helper.make_node("Concat", pieces, [graph.made[key]], axis=0))
        return graph.made[key]

    def _size_at_run_time(self, size: int | tuple[str, int], name: str) -> str:
        if isinstance(size, int):
            return self.graph.constant_ints([size], f"{name}.size")
        source, at = size
        if not source:
            raise NotSplit("has more than one size that is only known at run time")
        graph = self.graph
        if size not in graph.made:
            index = graph.constant_ints([at], f"{source}.place")
            graph.made[size] = graph.free(f"{source}.{at}")
            graph.enter(onnx.helper.make_node("Gather", [source, index], [graph.made[size]], axis=0))
        return graph.made[size]

    def _cut_weight(self, stored: StoredChannels, channels: Array, role: str, consumer: NodeProto) -> str:
        """The channels of a stored tensor, as the product reads them."""
        key, whole = (stored.tensor.name, stored.axis, channels.tobytes()), stored.tensor
        if key not in self.graph.made:
            model, name = self.graph.view.model, _part_name(whole.name, role, consumer)
            weight = model.weight(whole)
            if weight is not None and weight.unread:
                rows = _unread_rows(weight, stored.axis, stored.positions(channels))
                self.graph.made[key] = self.graph.store_weight(rows, name, whole, role)
            else:
                part = np.take(model.array(whole), stored.positions(channels), axis=stored.axis)
                self.graph.made[key] = self.graph.store(np.ascontiguousarray(part), name, whole, role)
        name = self.graph.made[key]
        for node, axis in reversed(stored.nodes):
            name = self._copy_weight_node(node, axis, name, channels, role)
        return name

    def _copy_weight_node(self, node: NodeProto, axis: int, name: str, channels: Array, role: str) -> str:
        inputs, view = [name, *node.input[1:]], self.graph.view
        dims = view.dims(node.output[0])
        if node.op_type == "DequantizeLinear" and dims is not None:
            along = attribute_of(node, "axis", 1) % len(dims)
            for at, given in enumerate(node.input[1:], start=1):
                own = view.dims(given) if given else ()
                if own is None or len(own) > 1:
                    raise NotSplit("has scales of no known shape")
                if own and own != (1,) and along == axis % len(dims):
                    inputs[at] = self._cut_weight(stored_channels(view, given, 0), channels, role, node)
        key = ("weight node", node.output[0], *inputs)
        if key not in self.graph.made:
            self.graph.made[key] = self.graph.free(f"{node.output[0]}.{role}")
            self.graph.copy_node(node, inputs, self.graph.made[key], role)
        return self.graph.made[key]


def _unread_rows(weight: Weight, axis: int, channels: Array) -> Weight:
    """Some consecutive rows of an unread weight, as a range of its file.

    Raises:
        NotSplit: the rows are not consecutive or in no file, so that the weight would have to be read.
    """
    first, count = int(channels[0]), len(channels)
    if axis or not weight.data.flags.c_contiguous or not np.array_equal(channels, np.arange(first, first + count)):
        raise NotSplit("stays unread, and its parts are not consecutive rows of it")
    size = weight.data.nbytes // weight.dims[0]
    data = weight.data[first * size : (first + count) * size]
    file_range = find_file_range(data)
    if file_range is None:
        raise NotSplit("stays unread, and is in no file")
    digest = derived_digest(file_range.path, "place", (file_range.offset, file_range.nbytes))
    return Weight((count, *weight.dims[1:]), weight.data_type, data, digest, unread=True)


SPLIT_TAKES_SIZES: Final = 13
"""The first opset where the sizes of Split are an input."""


def _producer(part: ChannelPart) -> NodeProto:
    assert part.value.node is not None  # a part is never the whole output
    return part.value.node


def _positions_first(order: Sequence[Group], product: MergedProduct) -> tuple[Group, Group]:
    """A matrix of positions and channels, as BatchNormalization takes it."""
    if product.axis != -1:
        raise NotSplit("comes with a BatchNormalization over another axis than its own")
    return tuple(factor for axis in order[:-1] for factor in axis), order[-1]


STEP_NAMES: Final = ("heads", "transposed", "whole")


def _nodes_between(root: ChannelValue, ends: set[str]) -> Iterator[NodeProto]:
    """The nodes after `root`, up to the producers of `ends`."""
    for value in root.nexts:
        if value.node is not None:
            yield value.node
        if value.name not in ends:
            yield from _nodes_between(value, ends)


def _shapes_between(root: ChannelValue, ends: set[str]) -> Iterator[NodeProto]:
    """The consumers of the sizes of `root` and of the values after `root`, up to `ends`."""
    yield from (node for node in root.consumers if node.op_type == "Shape")
    for value in root.nexts:
        if value.name not in ends:
            yield from _shapes_between(value, ends)


def _part_name(origin: str, role: str, consumer: NodeProto) -> str:
    """`attn.c_attn.q.weight` for `attn.c_attn.weight`; one that an exporter has counted is called by its module."""
    modules = modules_of(consumer)
    if modules and ANONYMOUS.fullmatch(origin):
        return f"{modules[-1]}.{role}.{'weight' if consumer.input[1:2] == [origin] else 'bias'}"
    return part_name(origin, role)


ANONYMOUS: Final = re.compile(r"(onnx::\w+|val_\d+|_?\d+)")
"""Names that an exporter has counted."""
