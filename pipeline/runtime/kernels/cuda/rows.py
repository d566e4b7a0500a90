"""Make a kernel of Triton of a row program, and launch it."""

from __future__ import annotations

import hashlib
import linecache
import os
import shutil
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch

from pipeline.ops.row_programs import Program, needs_whole_rows
from pipeline.runtime.kernels.base import Ins, Launch
from pipeline.runtime.kernels.cuda.source import RowSpace, Tile, join_axes, write_source


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
    """Whether Triton is installed (the extra `cuda`), and what it builds its launches with: a compiler of C."""
    has_compiler = "CC" in os.environ or any(map(shutil.which, ("clang", "gcc")))
    return find_spec("triton") is not None and has_compiler


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
