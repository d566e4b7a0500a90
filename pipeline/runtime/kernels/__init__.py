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

__all__ = ["FAMILIES", "KERNELS", "Attrs", "Bind", "Kernel", "Launch", "bind_attrs"]

FAMILIES = (elementwise, linear, conv, reduce, shape, index, recurrent, vision, random, optimizer, fallback, aten)

KERNELS: Mapping[Kind, Kernel] = join(family.KERNELS for family in FAMILIES)


def bind_attrs(kind: Kind, attrs: Attrs) -> Bind:
    """The kernel of `kind` with its attributes bound, and what follows from them decided."""
    if kind is Kind.Aten:
        return aten.bind_attrs(attrs)
    kernel = KERNELS[kind]
    return lambda ins, outs: kernel(ins, outs, attrs)
