"""Operators of torch: the most expensive ones by a fast path, all others by their schema.

`call.py` reads a call; `out_variants.py` says how any operator writes into given storage; `fast_paths.py` holds faster
ways, `packed.py` those with packed weights; `regions.py` runs operators that have bodies.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.ir.graph import TensorSpec
from pipeline.lowering import Kind
from pipeline.runtime.kernels.aten.call import read_call
from pipeline.runtime.kernels.aten.fast_paths import FAST_PATHS
from pipeline.runtime.kernels.aten.out_variants import make_and_copy, write_out
from pipeline.runtime.kernels.aten.packed import launch_packed, pack_call
from pipeline.runtime.kernels.aten.regions import higher_order
from pipeline.runtime.kernels.base import Attrs, Bind, Ins, Kernel, Launch, Outs
from pipeline.runtime.kernels.packing import PackedWeight, Packer, ProductWeight, Stored

__all__ = ["KERNELS", "PACKERS", "bind_attrs"]


def bind_attrs(attrs: Attrs) -> Bind:
    """The kernel Aten with its call parsed, so that rebinding to other tensors at each run is cheap.

    `functional` is for autocast: torch casts an operator's inputs only where it allocates the result itself.
    """
    template, orders = read_call(attrs), attrs["orders"]
    fast_path = make_and_copy if attrs.get("functional") else FAST_PATHS.get(template.kind, write_out)

    packed: PackedWeight | None = attrs.get("packed")

    def bind(ins: Ins, outs: Outs) -> Launch:
        call = template.call(ins)
        if any(orders):
            outs = [out.permute(order) if order else out for out, order in zip(outs, orders, strict=True)]
        launch = launch_packed(call, packed, outs[0]) if packed else None
        return launch or fast_path(call, outs) or write_out(call, outs)

    return bind


def aten(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return bind_attrs(attrs)(ins, outs)


def pack_aten(attrs: Attrs, specs: Sequence[TensorSpec], stored: Stored) -> ProductWeight | None:
    """Nothing is packed for autocast, which casts operands of torch's own operators."""
    return None if attrs.get("functional") else pack_call(read_call(attrs), specs, stored)


KERNELS: dict[Kind, Kernel] = {Kind.Aten: aten, Kind.HigherOrder: higher_order}

PACKERS: dict[Kind, Packer] = {Kind.Aten: pack_aten}
