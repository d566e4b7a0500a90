"""How much memory a model may ask for, by the sizes that it declares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from passes.errors import ModelError
from passes.worker.platforms import memory_limit

MOST_ELEMENTS: Final = 2**60
"""Elements of one tensor, on any machine: beyond it sizes in bytes overflow 64 bits, in numpy and in native code."""

MOST_DIMS: Final = 64
"""Dims of one tensor: numpy has no more."""

MOST_DRAWN: Final = 2**27
"""Elements of all inputs that are drawn for one run: half a GiB of floats. A volume of 512 × 512 × 512 has as many."""

LEAST_SECONDS: Final = 45.0
SECONDS_PER_MIB: Final = 20.0
"""The time limit of a run, per MiB of weights and inputs that the model declares."""


def memory_budget() -> int:
    """Bytes: nine tenths of the machine's memory, or of the process's limit if that is less."""
    return memory_limit() * 9 // 10


def seconds_to_run(nbytes: int) -> float:
    """The time limit for one run of a model that declares `nbytes` of weights and inputs; a longer run is taken for an
    endless loop."""
    return LEAST_SECONDS + SECONDS_PER_MIB * nbytes / 2**20


def element_count(dims: Sequence[int]) -> int:
    """The product of `dims`, without a dim of 0: numpy and native code multiply the others too, and overflow."""
    return math.prod(dim for dim in dims if dim)


def check_bytes(what: str, dims: Sequence[int], itemsize: int) -> None:
    """Refuse to make an array that does not fit into this machine.

    Raises:
        ModelError: naming `what`, its shape, the bytes it takes, and what there is.
    """
    needed = 0 if 0 in dims and element_count(dims) <= MOST_ELEMENTS else element_count(dims) * itemsize
    if needed > memory_budget():
        raise ModelError(
            f"{what} has the shape {list(dims)} and takes {needed / 2**30:,.3g} GiB; this machine can give "
            f"{memory_budget() / 2**30:,.3g} GiB; is a size wrong?"
        )


def check_drawn(name: str, dims: Sequence[int]) -> None:
    """Refuse to draw an input that is larger than any that a proof needs.

    Raises:
        ModelError: naming the input and its shape.
    """
    if math.prod(dims) > MOST_DRAWN or element_count(dims) > MOST_ELEMENTS:
        raise ModelError(
            f"input {name!r} has the shape {list(dims)}, {math.prod(dims):,} elements, and {MOST_DRAWN:,} at most are "
            "drawn; is a dim wrong? If not, give smaller sizes, or `feeds`"
        )


def check_drawn_together(shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse to draw inputs that together are larger than any that a proof needs.

    Raises:
        ModelError: naming the largest one.
    """
    counts = {name: math.prod(dims) for name, dims in shapes.items()}
    if sum(counts.values()) > MOST_DRAWN:
        largest = max(counts, key=counts.__getitem__)
        raise ModelError(
            f"the inputs have {sum(counts.values()):,} elements together, most of them in {largest!r} of the shape "
            f"{list(shapes[largest])}, and {MOST_DRAWN:,} at most are drawn; is a dim wrong? If not, give "
            "smaller sizes, or `feeds`"
        )
