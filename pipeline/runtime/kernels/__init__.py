"""Torch CPU kernels by family: `(ins, outs, attrs) -> Launch`, each writes the outputs that it is given."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.lowering import Kind
from pipeline.lowering.emitters import join
from pipeline.runtime.kernels import aten, conv, elementwise, index, linear, norm, random, recurrent, reduce, shape
from pipeline.runtime.kernels.base import Attrs, Bind, Kernel, Launch

__all__ = ["KERNELS", "Attrs", "Bind", "Kernel", "Launch", "prepared"]

FAMILIES = (elementwise, linear, conv, norm, reduce, shape, index, recurrent, random, aten)

KERNELS: Mapping[Kind, Kernel] = join(family.KERNELS for family in FAMILIES)


def prepared(kind: Kind, attrs: Attrs) -> Bind:
    """The kernel of `kind` with what can be decided by its attributes alone."""
    if kind in aten.PREPARED:
        return aten.PREPARED[kind](attrs)
    kernel = KERNELS[kind]
    return lambda ins, outs: kernel(ins, outs, attrs)
