"""Operators of torch: those that models spend their time in by torch's quickest way in, all others by their schema.

`call.py` reads a call; `written.py` says how any operator writes into given storage; the families hold the quick ways
(elementwise, linear, norm, reduce, shape, index); `regions.py` runs operators that have bodies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest

from pipeline.lowering import Kind
from pipeline.lowering.emitters import join
from pipeline.runtime.kernels.aten import elementwise, index, linear, norm, reduce, shape
from pipeline.runtime.kernels.aten.call import Quick, read
from pipeline.runtime.kernels.aten.regions import higher_order
from pipeline.runtime.kernels.aten.written import functional, made, written
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs
from pipeline.runtime.lacking import ON_THE_CPU

__all__ = ["KERNELS", "QUICK"]

FAMILIES = (elementwise, linear, norm, reduce, shape, index)
LACKING: Mapping[str, Quick] = {kind: made(function) for kind, function in ON_THE_CPU.items()}

QUICK: Mapping[str, Quick] = join((*(family.QUICK for family in FAMILIES), LACKING))


def aten(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """Under autocast torch picks the dtypes of an operator only when it makes its result itself."""
    call = read(attrs, ins)
    outs = [out.permute(order) if order else out for out, order in zip_longest(outs, json.loads(attrs["orders"]))]
    if attrs.get("functional"):
        return functional(call, outs)
    quick = QUICK.get(call.kind)
    return (quick and quick(call, outs)) or written(call, outs)


KERNELS: dict[Kind, Kernel] = {Kind.Aten: aten, Kind.HigherOrder: higher_order}
