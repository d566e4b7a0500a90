"""Launch the kernels in Triton: Adam over all parameters at once, the check of indices, and row programs.

Blocks of Adam's kernel find their tensor in a table of addresses. The check of indices is one kernel, where torch's
operators are six. A row program is written as a kernel of its own.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_path
from typing import Any, Final

import torch

from pipeline.ops.row_programs import Program, needs_whole_rows
from pipeline.runtime.kernels.base import Ins, Launch
from pipeline.runtime.kernels.cuda.source import RowSpace, Tile, join_axes, write_source
from pipeline.runtime.tensors import dtype_name

BLOCK: Final = 1024
"""Elements of a parameter for a block of the kernel."""


def launch_adam(
    groups: Sequence[Sequence[torch.Tensor]],
    gradients: Sequence[torch.Tensor],
    step: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    attrs: Mapping[str, Any],
) -> Launch | None:
    """The launch that updates all parameters; None where they have several dtypes, or lie otherwise than gradients.

    Args:
        groups: parameters, first moments, second moments, and the largest second moments where there are any, each of
            one tensor for each parameter; they are updated where they are.
        gradients: one for each parameter, of its shape.
        step: float32, one element: the number of updates, this one included.
        rate: the learning rate, of any float dtype, one element.
        skip: float32, one element: 1 where nothing is updated.
        attrs: of `Kind.Adam`.
    """
    tensors = [*gradients, *(tensor for group in groups for tensor in group)]
    if len({tensor.dtype for tensor in tensors}) != 1 or not all(tensor.is_contiguous() for tensor in tensors):
        return None
    from pipeline.runtime.kernels.cuda import triton_kernels

    update: Any = triton_kernels.update
    largest = groups[3] if len(groups) > 3 else [None] * len(gradients)
    parts = [*zip(groups[0], gradients, *groups[1:3], largest, strict=True)]
    places = [[number, first] for number, part in enumerate(parts) for first in range(0, part[0].numel(), BLOCK)]
    blocks = torch.tensor(places, dtype=torch.int64, device=step.device)
    table = AddressTable(parts, step.device)
    return partial(
        _update_at,
        update[len(places),],
        table,
        parts,
        table.memory,  # a launch has to show all memory that it reads
        blocks,
        step,
        rate,
        skip,
        beta1=float(attrs["beta1"]),
        beta2=float(attrs["beta2"]),
        log_beta1=math.log(attrs["beta1"]) if attrs["beta1"] else -math.inf,
        log_beta2=math.log(attrs["beta2"]) if attrs["beta2"] else -math.inf,
        epsilon=float(attrs["epsilon"]),
        decay=float(attrs["weight_decay"]),
        dtype=getattr(triton_kernels.tl, dtype_name(tensors[0].dtype)),
        decoupled=attrs["decoupled"],
        maximize=attrs["maximize"],
        has_largest=len(groups) > 3,
        length=BLOCK,
        enable_fp_fusion=True,
    )


Part = tuple[torch.Tensor | None, ...]
"""Parameter, gradient, first moment, second moment, and the largest second moment so far if AMSGrad keeps it."""


class AddressTable:
    """A row for each part, on the device: the addresses of its tensors, and their number of elements.

    A run may point a gradient at other memory, so `follow` writes new addresses before a launch.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._addresses = addresses_of(parts)
        sizes = [0 if part[0] is None else part[0].numel() for part in parts]
        rows = [[*row, size] for row, size in zip(self._addresses, sizes, strict=True)]
        self.memory = torch.tensor(rows, dtype=torch.int64, device=device)

    def follow(self, parts: Sequence[Part]) -> None:
        """Write the addresses of `parts`, if any differs from the last launch; none does while a graph is recorded."""
        found = addresses_of(parts)
        if found != self._addresses:
            self._addresses = found
            self.memory[:, :-1].copy_(torch.tensor(found, dtype=torch.int64), non_blocking=True)


def addresses_of(parts: Sequence[Part]) -> list[list[int]]:
    """The addresses of each part's tensors; 0 for a tensor that it does not have."""
    return [[0 if tensor is None else tensor.data_ptr() for tensor in part] for part in parts]


def _update_at(update: Any, table: AddressTable, parts: Sequence[Part], *args: Any, **settings: Any) -> None:
    table.follow(parts)
    update(*args, **settings)


CLAMP_BLOCK: Final = 256
"""Indices for a block of the kernel."""


def launch_clamp(
    index: torch.Tensor, safe: torch.Tensor, flag: torch.Tensor, low: int, high: int, ignored: int | None
) -> Launch | None:
    """The launch that clamps `index` into `safe`, and sets `flag` if that changed an element.

    Args:
        index: the indices, on a CUDA device.
        safe: of the shape and dtype of `index`, contiguous.
        flag: bool, one element.
        low: the least index.
        high: the greatest index.
        ignored: an index that stays as it is; None if there is none.

    Returns:
        The launch; None if `index` is not contiguous, has no element, or is neither int32 nor int64.
    """
    if not index.is_contiguous() or not index.numel() or index.dtype not in (torch.int32, torch.int64):
        return None
    from pipeline.runtime.kernels.cuda import triton_kernels

    clamp: Any = triton_kernels.clamp
    return partial(
        clamp[-(-index.numel() // CLAMP_BLOCK),],
        index,
        safe,
        flag.view(torch.uint8),
        low,
        high,
        0 if ignored is None else ignored,
        index.numel(),
        has_ignored=ignored is not None,
        length=CLAMP_BLOCK,
    )


def launch_row_program(program: Program, ins: Ins, out: torch.Tensor) -> Launch:
    """The launch of `program` on `ins` into `out`.

    Args:
        program: what is computed.
        ins: float32, float16, bfloat16 or bool, with any strides, of shapes that can be broadcast to that of `out`.
        out: float32, float16 or bfloat16, contiguous, with at least one element.
    """
    space = space_of(program, ins, out)
    tile = Tile.for_program(program, space)
    kernel = build_kernel(write_source(program, space, tile))
    return partial(kernel[tile.count_blocks(space),], *ins, out, num_warps=tile.warps, enable_fp_fusion=True)


def space_of(program: Program, ins: Ins, out: torch.Tensor) -> RowSpace:
    """The axes that the kernel of `program` counts over."""
    sizes = tuple(out.shape) or (1,)
    strides = [operand.expand(out.shape).stride() or (0,) for operand in ins]
    return join_axes(sizes, strides, keeps_rows=needs_whole_rows(program))


@cache
def has_triton() -> bool:
    """Whether Triton is installed (the extra `cuda`), and what it builds its launches with: a compiler of C, and the
    headers of Python, which some systems have in a package of their own."""
    has_compiler = "CC" in os.environ or any(map(shutil.which, ("clang", "gcc")))
    return find_spec("triton") is not None and has_compiler and Path(get_path("include"), "Python.h").is_file()


@cache
def build_kernel(text: str) -> Any:
    """The kernel whose function `text` defines, on `tl`; the same object for the same text.

    Triton reads the source of a function by `inspect`, so the text is given to `linecache` under a name of its own.
    """
    import triton
    import triton.language as tl

    name = f"<kernel {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    defined: dict[str, Any] = {"tl": tl, "__name__": __name__, "__file__": name}
    exec(compile(text, name, "exec"), defined)
    (function,) = (made for made in defined.values() if getattr(made, "__code__", None) is not None)
    return triton.jit(function)
