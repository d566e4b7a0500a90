"""Keep images as (batch, row, column, channel) between convolutions, which is how packed convolutions are fastest.

A convolution then reads its input permuted and makes a value whose axes are in that order; that one permuted back has
the old vid, and costs nothing. Pointwise ops, pools and `cat` between two convolutions follow, so that nothing is
copied from one order to the other; every other reader sees the strides of a permuted tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.ir.graph import Attr, Graph, Op, TensorSpec
from pipeline.lowering.fusion.rewrite import Rewrite
from pipeline.lowering.traced_order import ORDERS

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
"""Operators of torch that read images with their channels last as they are, and make such."""


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

    def turn_channels_last(self, vid: int, reader: Op) -> int:
        """The vid of `vid` with its channels last; an op before `reader` permutes it where no op makes it so."""
        if vid not in self._last:
            self._last[vid] = self._declare(vid)
            self.rewrite.replace(reader, "aten.permute.default", [vid], [self._last[vid]], {"dims": LAST})
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
