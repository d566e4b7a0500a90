"""Torch CPU kernels by family: `(ins, outs, attrs) -> Launch`; each writes into the given outputs."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.ops import Kind
from pipeline.ops.tables import join
from pipeline.runtime.kernels import aten, fallback, fused, native, optimizer, row_programs, shape
from pipeline.runtime.kernels.base import Attrs, Bind, Kernel, Launch
from pipeline.runtime.kernels.native import NativeKernel, NativeLibrary, has_native, is_library_built, load_library
from pipeline.runtime.kernels.packing import Packer
from pipeline.runtime.kernels.weight_forms import PackedMemory, ProductWeight

FAMILIES = (shape, optimizer, fused, row_programs, fallback, aten)

KERNELS: Mapping[Kind, Kernel] = join(family.KERNELS for family in FAMILIES)

NATIVE: Mapping[Kind, NativeKernel] = join((native.KERNELS, optimizer.NATIVE))
"""Kernels in C++."""

PACKERS: Mapping[Kind, Packer] = join(family.PACKERS for family in (fused, aten))
"""The kinds whose kernels take packed weights, as the attribute `packed`."""


def prepare_kernel(kind: Kind, attrs: Attrs) -> Bind:
    """The kernel of `kind` with its attributes bound, and what follows from them decided."""
    if kind in aten.CALLS:
        return aten.prepare_kernel(kind, attrs)
    kernel, own, library = KERNELS[kind], NATIVE.get(kind), attrs.get("native")
    if own is None or library is None:
        return lambda ins, outs: kernel(ins, outs, attrs)
    return lambda ins, outs: own(library, ins, outs, attrs) or kernel(ins, outs, attrs)
