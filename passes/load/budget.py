"""How much memory a model may ask for, by the sizes that it declares."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Final

from passes.errors import ModelMistake

__all__ = ["MOST_ELEMENTS", "check_bytes", "element_count", "memory_budget"]

MOST_ELEMENTS: Final = 2**60
"""Of one tensor, whatever the machine: beyond it sizes in bytes overflow 64 bits, in numpy and in native code."""


def memory_budget() -> int:
    """Bytes: nine tenths of the machine's memory, as for worker processes (`passes.bench.memory_limit`)."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 9 // 10


def element_count(dims: Sequence[int]) -> int:
    """The product of `dims`, without a dim of 0: numpy and native code multiply the others too, and overflow."""
    return math.prod(dim for dim in dims if dim)


def check_bytes(what: str, dims: Sequence[int], itemsize: int) -> None:
    """Refuse to make an array that does not fit into this machine.

    Raises:
        ModelMistake: naming `what`, its shape, the bytes it takes, and what there is.
    """
    needed = 0 if 0 in dims and element_count(dims) <= MOST_ELEMENTS else element_count(dims) * itemsize
    if needed > memory_budget():
        raise ModelMistake(
            f"{what} has the shape {list(dims)} and takes {needed / 2**30:,.3g} GiB; this machine can give "
            f"{memory_budget() / 2**30:,.3g} GiB; is a size wrong?"
        )
