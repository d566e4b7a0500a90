"""Torch CPU kernels by family: `(ins, outs, attrs) -> Launch`; each writes into the given outputs."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.lowering import Kind
from pipeline.lowering.tables import join
from pipeline.runtime.kernels import (
    aten,
    conv,
    elementwise,
    fallback,
    fused,
    index,
    linear,
    optimizer,
    random,
    recurrent,
    reduce,
    shape,
    vision,
)
from pipeline.runtime.kernels.base import Attrs, Bind, Kernel, Launch
from pipeline.runtime.kernels.packing import PackedMemory, Packer, ProductWeight

__all__ = [
    "FAMILIES",
    "KERNELS",
    "PACKERS",
    "Attrs",
    "Bind",
    "Kernel",
    "Launch",
    "PackedMemory",
    "ProductWeight",
    "bind_attrs",
]

FAMILIES = (
    elementwise,
    linear,
    conv,
    reduce,
    shape,
    index,
    recurrent,
    vision,
    random,
    optimizer,
    fused,
    fallback,
    aten,
)

KERNELS: Mapping[Kind, Kernel] = join(family.KERNELS for family in FAMILIES)

PACKERS: Mapping[Kind, Packer] = join(family.PACKERS for family in (linear, conv, fused, aten))
"""The kinds whose kernels take packed weights, as the attribute `packed`."""


def bind_attrs(kind: Kind, attrs: Attrs) -> Bind:
    """The kernel of `kind` with its attributes bound, and what follows from them decided."""
    if kind in aten.CALLS:
        return aten.bind_attrs(kind, attrs)
    kernel = KERNELS[kind]
    return lambda ins, outs: kernel(ins, outs, attrs)
