"""Operators of torch: those that models spend their time in by torch's quickest way in, all others by their schema.

`call.py` reads a call; `written.py` says how any operator writes into given storage; the families hold the quick ways
(elementwise, linear, norm, reduce, shape, index); `regions.py` runs operators that have bodies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from pipeline.lowering import Kind
from pipeline.lowering.emitters import join
from pipeline.runtime.kernels.aten import elementwise, index, linear, norm, reduce, shape
from pipeline.runtime.kernels.aten.call import Quick, read
from pipeline.runtime.kernels.aten.regions import higher_order
from pipeline.runtime.kernels.aten.written import functional, made, written
from pipeline.runtime.kernels.base import Attrs, Bind, Ins, Kernel, Launch, Outs
from pipeline.runtime.lacking import ON_THE_CPU

__all__ = ["KERNELS", "PREPARED", "QUICK"]

FAMILIES = (elementwise, linear, norm, reduce, shape, index)
LACKING: Mapping[str, Quick] = {kind: made(function) for kind, function in ON_THE_CPU.items()}

QUICK: Mapping[str, Quick] = join((*(family.QUICK for family in FAMILIES), LACKING))


def aten(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return prepared(attrs)(ins, outs)


def prepared(attrs: Attrs) -> Bind:
    """The kernel Aten with its call read: what a run binds anew, since the caller's tensors are others, costs less.

    Under autocast torch picks the dtypes of an operator only when it makes its result itself.
    """
    words, orders = read(attrs), json.loads(attrs["orders"])
    way = functional if attrs.get("functional") else QUICK.get(words.kind, written)

    def bind(ins: Ins, outs: Outs) -> Launch:
        call = words.call(ins)
        if any(orders):
            outs = [out.permute(order) if order else out for out, order in zip(outs, orders, strict=True)]
        return way(call, outs) or written(call, outs)

    return bind


KERNELS: dict[Kind, Kernel] = {Kind.Aten: aten, Kind.HigherOrder: higher_order}

PREPARED: dict[Kind, Callable[[Attrs], Bind]] = {Kind.Aten: prepared}
