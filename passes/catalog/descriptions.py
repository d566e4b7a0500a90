"""What one pass does, in words. Written by reading the library's sources; `tests/passes/test_gallery.py` checks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["About", "Reads", "structure", "values"]

Reads = Literal["structure", "values"]


@dataclass(frozen=True, slots=True)
class About:
    """`does` is one sentence without a full stop.

    A pass reads `values` if what it does depends on the numbers in weights, or if it computes new ones of them. All
    others read the `structure` only: operators, attributes, shapes, and constants that are as good as attributes (a
    scalar such as an epsilon; axes, pads, shapes, indices). They wire weights, and never look at what is in them.
    """

    does: str
    reads: Reads


def structure(does: str) -> About:
    return About(does, "structure")


def values(does: str) -> About:
    return About(does, "values")
