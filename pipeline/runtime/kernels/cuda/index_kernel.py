# pyright: reportArgumentType=false
"""Clamp indices and note a wrong one, in Triton. Imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clamp(
    index,  # int[count]
    safe,  # int[count]: the same indices within low and high, or equal to `ignored`
    flag,  # uint8[1]: 1 afterwards if an index was wrong, else as before
    low,
    high,
    ignored,
    count,
    has_ignored: tl.constexpr,
    length: tl.constexpr,
):
    places = tl.program_id(0) * length + tl.arange(0, length)
    inside = places < count
    given = tl.load(index + places, inside, 0)
    found = tl.minimum(tl.maximum(given, low), high)
    if has_ignored:
        found = tl.where(given == ignored, given, found)
    tl.store(safe + places, found, inside)
    tl.store(flag + places * 0, tl.full([length], 1, tl.uint8), inside & (found != given))
