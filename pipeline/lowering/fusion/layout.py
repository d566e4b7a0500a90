"""The order of axes in memory: images with their channels last, and results in the order that their users need.

`channels-last` keeps images as (batch, row, column, channel) between packed convolutions, which are fastest in this
order. A convolution then reads its input permuted and makes a value with its axes in this order; the permutation of
that value to the old order has the old vid, and costs nothing. Pointwise ops, pools and `cat` between two convolutions
follow, so that nothing is copied from one order to the other; every other user sees the strides of a permuted tensor.

`images` stores images with their channels last between torch's convolutions, in both directions of a train step.
torch's kernels for convolutions, pools and normalisations on the CPU are faster in this order. Only the strides of
values change in the graph: an operator whose operand is in this order writes its result in this order. An image of the
batch is copied into this order when it is fed. An operator that depends on strides, and is not in `FOLLOWERS`, reads an
alias with the strides of the trace; the runtime copies the image for it if the image has other strides.

`order` chooses the memory order of results so that their users need no copy. The strides of a value say in which
order its axes lie in memory, and `pipeline.lowering.lower` stores the value in that order. The order changes neither
what the operator computes nor what its users see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations

from pipeline.ir.graph import Attr, Graph, InputRef, Op, Role, TensorSpec, TorchConst
from pipeline.lowering.fusion.rewrite import Rewrite, only_user, producer
from pipeline.ops.aten import as_view, is_call, takes_any_order
from pipeline.ops.aten.memory import ORDERS
from pipeline.ops.aten.views import VIEW_KINDS
from pipeline.ops.attrs import unpack
from pipeline.ops.kinds import Kind
from pipeline.ops.layout import Layout

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
"""Permutations from channels first to channels last, and back."""

CHANNELS = 3
"""The axis of the channels in the new order."""

POINTWISE = frozenset(
    f"aten.{name}"
    for name in (
        *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "relu.default", "gelu.default", "silu.default"),
        *("sigmoid.default", "tanh.default", "hardswish.default", "clamp.default", "leaky_relu.default"),
    )
)


CAT = "aten.cat.default"

AS_STORED = ("aten.max_pool2d.default", "aten.constant_pad_nd.default")
"""Operators of torch that read images with their channels last without a copy, and make such images."""


def keep_channels_last(graph: Graph) -> Graph:
    """`channels-last`: images are stored with their channels last between convolutions."""
    order = _Order(graph)
    for op in graph.ops:
        if op.kind == "ConvPointwise" and not op.attrs["channels_last"] and graph.values[op.outputs[0]].spec.rank == 4:
            images = {0, 2} if op.attrs["add"] else {0}
            ins = [order.turn_channels_last(vid, op) if at in images else vid for at, vid in enumerate(op.inputs)]
            order.compute(op, ins, {**op.attrs, "channels_last": True})
        elif op.kind in AS_STORED and op.inputs[0] in order and ORDERS not in op.attrs:
            order.compute_as_stored(op)
        elif op.kind in POINTWISE and order.has_all(op):
            order.compute(op, [order.turn_channels_last(vid, op) for vid in op.inputs], op.attrs)
        elif op.kind == CAT and op.attrs.get("dim") in (1, -3) and order.has_all(op):
            order.compute(op, [order.turn_channels_last(vid, op) for vid in op.inputs], {**op.attrs, "dim": CHANNELS})
    return order.rewrite.build()


class _Order:
    """The values that exist with their channels last, by the vid of the value with its channels first."""

    def __init__(self, graph: Graph) -> None:
        self.rewrite = Rewrite(graph)
        self._graph = graph
        self._last: dict[int, int] = {}

    def __contains__(self, vid: int) -> bool:
        return vid in self._last

    def has_all(self, op: Op) -> bool:
        """Whether all operands of `op` are known with their channels last, so that it may compute on these."""
        specs = [self._graph.values[vid].spec for vid in op.inputs]
        same = op.kind == CAT or all(spec == specs[0] for spec in specs)
        return same and all(vid in self._last for vid in op.inputs)

    def turn_channels_last(self, vid: int, user: Op) -> int:
        """The vid of `vid` with its channels last; an op before `user` permutes it where no op makes it so."""
        if vid not in self._last:
            self._last[vid] = self._declare(vid)
            self.rewrite.replace(user, "aten.permute.default", [vid], [self._last[vid]], {"dims": LAST})
        return self._last[vid]

    def compute(self, op: Op, ins: Sequence[int], attrs: Mapping[str, Attr]) -> None:
        """`op` on operands with their channels last."""
        (out,) = op.outputs
        self._last[out] = stored = self._declare(out)
        self.rewrite.replace(op, op.kind, ins, [stored], attrs, op.constraints)
        self.rewrite.replace(op, "aten.permute.default", [stored], [out], {"dims": FIRST})

    def compute_as_stored(self, op: Op) -> None:
        """`op` as it is, but its result is stored with its channels last."""
        (out,) = op.outputs
        self._last[out] = stored = self._declare(out)
        self.rewrite.replace(op, op.kind, op.inputs, [stored], {**op.attrs, ORDERS: (FIRST,)})
        self.rewrite.replace(op, "aten.permute.default", [stored], [out], {"dims": FIRST})

    def _declare(self, vid: int) -> int:
        value = self._graph.values[vid]
        spec = TensorSpec(tuple(value.spec.shape[axis] for axis in LAST), value.spec.dtype, value.spec.device)
        return self.rewrite.declare(f"{value.name} channels last", spec)


MOST_AXES = 6


def store_as_copied(graph: Graph) -> Graph:
    """`order`: a result that is only moved and then copied row by row is stored in the order of the copy.

    Then the last copy is a view, and earlier copies on the way are left out.
    """
    rewrite = Rewrite(graph)
    chosen: set[int] = set()
    for op in reversed(graph.ops):
        if op in rewrite or not _is_copy(graph, op):
            continue
        way = _way_to(graph, op)
        source = way[0].inputs[0]
        source_op = producer(graph, source)
        if source_op is None or source in chosen or not _may_choose(graph, source_op, source):
            continue
        layout = _find_layout(graph, source, way)
        if layout is None:
            continue
        chosen.add(source)
        rewrite.store(source, layout.strides)
        if any(_is_copy(graph, inner) for inner in way[:-1]):
            for inner in way[:-1]:
                _leave_out_copy(rewrite, inner)
    return rewrite.build()


def _leave_out_copy(rewrite: Rewrite, op: Op) -> None:
    """Replace a copy by its operand, and a view that needs the copy by a view that takes any order."""
    if _is_copy(rewrite.graph, op):
        rewrite.replace(op, "aten.alias.default", op.inputs, op.outputs, {"self": InputRef(0)})
    elif op.kind in ("aten.view.default", "aten._unsafe_view.default"):
        shape = rewrite.graph.values[op.outputs[0]].spec.shape
        rewrite.replace(op, "aten.reshape.default", op.inputs, op.outputs, {"self": InputRef(0), "shape": shape})


def _way_to(graph: Graph, copy: Op) -> tuple[Op, ...]:
    """The views and copies that lead to `copy`, in order; each has the next as its only user, and `copy` is the
    last."""
    way = [copy]
    while True:
        before = producer(graph, way[-1].inputs[0])
        if before is None or not _moves(graph, before) or only_user(graph, before.outputs[0]) is not way[-1]:
            return tuple(reversed(way))
        way.append(before)


def _may_choose(graph: Graph, source_op: Op, source: int) -> bool:
    """Whether `source_op` computes `source`, for one user, and may write it in any order."""
    return (
        source_op.kind.startswith("aten.")
        and source_op.kind not in IN_ROWS
        and not _moves(graph, source_op)
        and only_user(graph, source) is not None
        and graph.values[source].spec.is_static
        and graph.values[source].spec.rank <= MOST_AXES
    )


def _find_layout(graph: Graph, source: int, way: Sequence[Op]) -> Layout | None:
    """An order of the axes of `source` in memory in which the end of the way is in rows."""
    sizes = graph.values[source].spec.sizes
    for order in permutations(range(len(sizes))):
        stored = Layout.contiguous([sizes[axis] for axis in order])
        layout = stored.permute([order.index(axis) for axis in range(len(sizes))])
        if _is_in_rows_after(graph, layout, way):
            return layout
    return None


def _is_in_rows_after(graph: Graph, layout: Layout, way: Sequence[Op]) -> bool:
    for op in way:
        if _is_copy(graph, op):
            continue
        moved = _move(graph, op, layout)
        if moved is None:
            return False
        layout = moved
    return layout.is_contiguous


def _move(graph: Graph, op: Op, layout: Layout) -> Layout | None:
    """The layout of the result of a view; None if strides cannot express it."""
    ins, outs = _specs(graph, op)
    spec = as_view(op.kind, op.attrs, ins, outs)
    if spec is None:
        return None
    rule = VIEW_KINDS[Kind(spec.kind_id).name].view
    layouts = rule and rule(unpack(spec.attr_schema, spec.attr_blob), layout, outs)
    return layouts[0] if layouts and layouts[0].sizes == outs[0].sizes else None


def _moves(graph: Graph, op: Op) -> bool:
    """Whether `op` only moves the elements of one operand, all of them, to one result."""
    ins, outs = _specs(graph, op)
    whole = len(ins) == len(outs) == 1 and ins[0].is_static and outs[0].is_static and ins[0].numel == outs[0].numel
    return whole and as_view(op.kind, op.attrs, ins, outs) is not None


def _is_copy(graph: Graph, op: Op) -> bool:
    """Whether `op` asks for its operand in rows."""
    if op.kind not in ("aten.clone.default", "aten.contiguous.default"):
        return False
    spec = as_view(op.kind, op.attrs, *_specs(graph, op))
    return spec is not None and spec.kind_id == Kind.Contiguous


def _specs(graph: Graph, op: Op) -> tuple[list[TensorSpec], list[TensorSpec]]:
    return [graph.values[vid].spec for vid in op.inputs], [graph.values[vid].spec for vid in op.outputs]


IN_ROWS = frozenset(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
)
"""Operators that are slower, or copy, if their result is not row-major."""


def store_images_by_channel(graph: Graph) -> Graph:
    """`images`: the results of convolutions, and values computed from these, are stored with their channels last."""
    images = _Images(graph)
    for op in graph.ops:
        if op.kind == "aten.convolution.default" and not op.attrs.get("transposed") and images.is_image(op.outputs[0]):
            images.bring(op, op.inputs[:1])
            images.add(op.outputs[0])
        elif op.kind in FOLLOWERS and not _crashes(op) and any(vid in images for vid in op.inputs):
            images.bring(op, op.inputs)
            for vid in _image_results(op):
                images.add(vid)
    return images.build()


def _crashes(op: Op) -> bool:
    """Whether the process would die: torch 2.13 makes no gradient of the input by this mask, and writes to it in images
    with their channels last."""
    mask = op.attrs.get("output_mask")
    return op.kind == "aten.native_group_norm_backward.default" and isinstance(mask, tuple) and not mask[0]


def _image_results(op: Op) -> tuple[int, ...]:
    """The results that may be images: the gradient of a convolution's weight is none."""
    if op.kind != "aten.convolution_backward.default":
        return op.outputs
    mask = op.attrs["output_mask"]
    return op.outputs[:1] if isinstance(mask, tuple) and mask[0] else ()


class _Images:
    """The values that are stored with their channels last."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._rewrite = graph, Rewrite(graph)
        self._vids: set[int] = set()
        self._copies: dict[int, int] = {}
        """{value in rows: its copy with the channels last}."""
        self._replaced: dict[int, dict[int, int]] = {}
        """{oid: {operand: the value that is read in its place}}, for operators that read images in any order, and for
        other operators if an image has other strides than in the trace."""

    def __contains__(self, vid: int) -> bool:
        return vid in self._vids

    def is_image(self, vid: int) -> bool:
        spec = self._graph.values[vid].spec
        return spec.rank == IMAGE_RANK and spec.is_static and spec.numel > 0

    def add(self, vid: int) -> None:
        if self.is_image(vid):
            self._vids.add(vid)
            self._rewrite.store(vid, _strides(self._graph.values[vid].spec))

    def bring(self, user: Op, vids: Iterable[int]) -> None:
        """Let `user` find `vids` with their channels last; an input is fed so, anything else is copied."""
        places = self._replaced.setdefault(user.oid, {})
        for vid in vids:
            value, source_op = self._graph.values[vid], producer(self._graph, vid)
            if vid in self._vids or not self.is_image(vid) or value.strides == _strides(value.spec):
                continue
            if source_op is not None and source_op.kind == "aten.expand.default" and takes_any_order(user.kind):
                continue
            if value.role is Role.INPUT:
                self.add(vid)
            elif source_op is not None:
                places[vid] = self._copies.get(vid) or self._copy_channels_last(user, vid)

    def build(self) -> Graph:
        graph = self._graph
        if not self._vids:
            return graph
        for op in graph.ops:
            if op.oid not in self._replaced and self._depends_on_strides(op):
                self._replaced[op.oid] = {vid: self._as_traced(op, vid) for vid in op.inputs if vid in self._vids}
        for oid, places in self._replaced.items():
            op = graph.ops[oid]
            if not places:
                continue
            self._rewrite.replace(op, op.kind, [places.get(vid, vid) for vid in op.inputs], op.outputs, op.attrs)
        return self._rewrite.build()

    def _depends_on_strides(self, op: Op) -> bool:
        ins, outs = ([self._rewrite.spec(vid) for vid in vids] for vids in (op.inputs, op.outputs))
        return is_call(op.kind) and not takes_any_order(op.kind) and as_view(op.kind, op.attrs, ins, outs) is None

    def _as_traced(self, user: Op, vid: int) -> int:
        """An alias of the image `vid`, with the strides that the image had in the trace."""
        value = self._graph.values[vid]
        traced = self._rewrite.declare(f"{value.name} as traced", value.spec)
        if value.strides is not None:
            self._rewrite.store(traced, [int(stride) for stride in value.strides])
        self._rewrite.replace(user, "aten.alias.default", [vid], [traced], {"self": InputRef(0)})
        return traced

    def _copy_channels_last(self, user: Op, vid: int) -> int:
        value = self._graph.values[vid]
        self._copies[vid] = copy = self._rewrite.declare(f"{value.name} channels last", value.spec)
        self._rewrite.store(copy, _strides(value.spec))
        self._rewrite.replace(
            user, "aten.clone.default", [vid], [copy], {"self": InputRef(0), "memory_format": CHANNELS_LAST}
        )
        return copy


def _strides(spec: TensorSpec) -> tuple[int, int, int, int]:
    _, channels, rows, columns = spec.sizes
    return rows * columns * channels, 1, columns * channels, channels


IMAGE_RANK = 4

CHANNELS_LAST = TorchConst("memory_format", "channels_last")

ELEMENTWISE = """
detach alias relu threshold_backward silu silu_backward gelu gelu_backward sigmoid sigmoid_backward hardtanh
hardtanh_backward leaky_relu leaky_relu_backward
"""

OF_IMAGES = """
_native_batch_norm_legit_functional native_batch_norm_backward convolution_backward max_pool2d_with_indices
max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward native_group_norm native_group_norm_backward
"""

FOLLOWERS = frozenset(
    [
        *(f"aten.{name}.default" for name in (ELEMENTWISE + OF_IMAGES).split()),
        *("aten.add.Tensor", "aten.mul.Tensor", "aten.upsample_nearest2d.vec", "aten.upsample_bilinear2d.vec"),
    ]
)
"""Operators that read and write images with their channels last, if all of their images are in this order."""
