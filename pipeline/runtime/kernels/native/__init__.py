"""Kernels in C++, which the compiler of this machine builds once; they run only where they are asked for.

`sources/` holds them, and `call.cpp` the operators by which torch calls them; `kernel_library.py` compiles
and loads them, and makes launches of them. `products.py` and `rows.py` say
for which operands a kernel takes a call, `convolutions.py` which weights are packed for one; `kernels/aten/native.py`
does so for torch's operators. Every other call runs by torch.

The kernels take float32 and use one thread, so with more threads torch keeps what is large.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.ops import Kind
from pipeline.ops.tables import join
from pipeline.runtime.kernels.native import products, rows
from pipeline.runtime.kernels.native.kernel_library import (
    NativeKernel,
    NativeLibrary,
    has_native,
    is_library_built,
    load_library,
)

KERNELS: Mapping[Kind, NativeKernel] = join(family.KERNELS for family in (products, rows))
"""By kind."""
