"""Operators of torch: the most expensive ones by a fast path, all others by their schema.

`call.py` reads a call, gives its operands the strides that it expects, and writes into given storage;
`fast_paths.py` holds faster ways, also with packed weights, and `native.py` those in C++; `regions.py` runs operators
that have bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pipeline.ir.graph import TensorSpec
from pipeline.ops import Kind
from pipeline.ops.aten import DRAWING, TYPED, untyped_call
from pipeline.runtime.kernels.aten.call import bring_in_order, launch_draw, make_and_copy, read_call, write_out
from pipeline.runtime.kernels.aten.fast_paths import FAST_PATHS, launch_packed, may_pack, pack_call
from pipeline.runtime.kernels.aten.indices import check_indices
from pipeline.runtime.kernels.aten.native import launch_native
from pipeline.runtime.kernels.aten.regions import higher_order
from pipeline.runtime.kernels.base import Attrs, Bind, Ins, Kernel, Launch, Outs, in_turn
from pipeline.runtime.kernels.packing import PackedWeight, Packer, Stored
from pipeline.runtime.kernels.weight_forms import ProductWeight


def prepare_kernel(kind: Kind, attrs: Attrs) -> Bind:
    """The kernel of a call with its arguments decoded, so that rebinding to other tensors at each run is cheap.

    `functional` is for autocast: torch casts an operator's inputs only where it allocates the result itself.
    `traced` are the strides that operands had in the trace, for an operator that does not take any.
    """
    attrs = _as_call(kind, attrs)
    template, orders = read_call(attrs), attrs["orders"]
    fast_path = make_and_copy if attrs.get("functional") else FAST_PATHS.get(template.kind, write_out)
    if kind in DRAWING:
        fast_path = partial(launch_draw, attrs.get("generator"))

    packed: PackedWeight | None = attrs.get("packed")
    native = None if attrs.get("functional") else attrs.get("native")
    traced = attrs.get("traced")

    def bind(ins: Ins, outs: Outs) -> Launch:
        ins, copies = bring_in_order(ins, traced) if traced else (ins, [])
        ins, checks = check_indices(template, ins)
        call = template.call(ins)
        if any(orders):
            outs = [out.permute(order) if order else out for out, order in zip(outs, orders, strict=True)]
        launch = launch_packed(call, packed, outs[0]) if packed else native and launch_native(native, call, outs)
        return in_turn(*copies, *checks, launch or fast_path(call, outs) or write_out(call, outs))

    return bind


def _as_call(kind: Kind, attrs: Attrs) -> Attrs:
    """The attributes with the operator and its arguments by name, as those of the kind Aten are."""
    return {**attrs, **untyped_call(kind, attrs)} if kind in TYPED else attrs


def launch_call(kind: Kind, ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return prepare_kernel(kind, attrs)(ins, outs)


def pack_weight(kind: Kind, attrs: Attrs, specs: Sequence[TensorSpec], stored: Stored) -> ProductWeight | None:
    """Nothing is packed for autocast, which casts operands of torch's own operators."""
    return None if attrs.get("functional") else pack_call(read_call(_as_call(kind, attrs)), specs, stored, attrs)


CALLS = (Kind.Aten, *TYPED)
"""The kinds whose kernel is an operator of torch with its arguments."""

KERNELS: dict[Kind, Kernel] = {**{kind: partial(launch_call, kind) for kind in CALLS}, Kind.HigherOrder: higher_order}

PACKERS: dict[Kind, Packer] = {kind: partial(pack_weight, kind) for kind in CALLS if may_pack(kind)}
