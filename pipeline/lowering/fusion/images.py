"""Store images as (batch, row, column, channel) between torch's convolutions, in both directions of a train step.

torch's kernels for convolutions, pools and normalisations on the CPU are faster in this order. The graph stays as it
is, but for the strides of its values: an operator whose operand is in this order writes its result so. An image of the
batch is copied into this order when it is fed. An operator that depends on strides, and is none of those below, reads
an alias with the strides of the trace, for which the runtime makes a copy where the image lies otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.ir.graph import Graph, InputRef, Op, Role, TensorSpec, TorchConst
from pipeline.lowering.fusion.rewrite import Rewrite, producer
from pipeline.ops.aten import as_view, is_call, takes_any_order


def store_images_by_channel(graph: Graph) -> Graph:
    """`images`: the results of convolutions, and what is computed of them, are stored with their channels last."""
    images = _Images(graph)
    for op in graph.ops:
        if op.kind == "aten.convolution.default" and not op.attrs.get("transposed") and images.is_image(op.outputs[0]):
            images.bring(op, op.inputs[:1])
            images.add(op.outputs[0])
        elif op.kind in FOLLOWERS and any(vid in images for vid in op.inputs):
            images.bring(op, op.inputs)
            for vid in _image_results(op):
                images.add(vid)
    return images.build()


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
        self._turned: dict[int, int] = {}
        """{value in rows: its copy with the channels last}."""
        self._replaced: dict[int, dict[int, int]] = {}
        """{oid: {operand: what it reads in its place}}, of operators that read images as they are, and of all others
        where an image lies otherwise than they expect."""

    def __contains__(self, vid: int) -> bool:
        return vid in self._vids

    def is_image(self, vid: int) -> bool:
        spec = self._graph.values[vid].spec
        return spec.rank == IMAGE_RANK and spec.is_static and spec.numel > 0

    def add(self, vid: int) -> None:
        if self.is_image(vid):
            self._vids.add(vid)
            self._rewrite.store(vid, _strides(self._graph.values[vid].spec))

    def bring(self, reader: Op, vids: Iterable[int]) -> None:
        """Let `reader` find `vids` with their channels last; an input is fed so, anything else is copied."""
        places = self._replaced.setdefault(reader.oid, {})
        for vid in vids:
            value, maker = self._graph.values[vid], producer(self._graph, vid)
            if vid in self._vids or not self.is_image(vid) or value.strides == _strides(value.spec):
                continue
            if maker is not None and maker.kind == "aten.expand.default" and takes_any_order(reader.kind):
                continue
            if value.role is Role.INPUT:
                self.add(vid)
            elif maker is not None:
                places[vid] = self._turned.get(vid) or self._turn(reader, vid)

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

    def _as_traced(self, reader: Op, vid: int) -> int:
        """An alias of the image `vid`, which says the strides that the image had in the trace."""
        value = self._graph.values[vid]
        traced = self._rewrite.declare(f"{value.name} as traced", value.spec)
        if value.strides is not None:
            self._rewrite.store(traced, [int(stride) for stride in value.strides])
        self._rewrite.replace(reader, "aten.alias.default", [vid], [traced], {"self": InputRef(0)})
        return traced

    def _turn(self, reader: Op, vid: int) -> int:
        value = self._graph.values[vid]
        self._turned[vid] = turned = self._rewrite.declare(f"{value.name} channels last", value.spec)
        self._rewrite.store(turned, _strides(value.spec))
        self._rewrite.replace(
            reader, "aten.clone.default", [vid], [turned], {"self": InputRef(0), "memory_format": LAST}
        )
        return turned


def _strides(spec: TensorSpec) -> tuple[int, int, int, int]:
    _, channels, rows, columns = spec.sizes
    return rows * columns * channels, 1, columns * channels, channels


IMAGE_RANK = 4

LAST = TorchConst("memory_format", "channels_last")

POINTWISE = """
detach alias relu threshold_backward silu silu_backward gelu gelu_backward sigmoid sigmoid_backward hardtanh
hardtanh_backward leaky_relu leaky_relu_backward
"""

OF_IMAGES = """
_native_batch_norm_legit_functional native_batch_norm_backward convolution_backward max_pool2d_with_indices
max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward native_group_norm native_group_norm_backward
"""

FOLLOWERS = frozenset(
    [
        *(f"aten.{name}.default" for name in (POINTWISE + OF_IMAGES).split()),
        *("aten.add.Tensor", "aten.mul.Tensor", "aten.upsample_nearest2d.vec", "aten.upsample_bilinear2d.vec"),
    ]
)
"""Operators that read and write images in this order as they are, if all of their images lie so."""
