"""Offsets in one arena: blocks that live at the same time do not overlap; others may share bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.planning.lifetime import Lifetime, LifetimeIndex

__all__ = ["ALIGNMENT", "Block", "assign_offsets", "live_peak"]

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register (AVX-512)."""


@dataclass(frozen=True, slots=True)
class Block:
    """The storage of a class of values: its root's vid, its bytes, and when any member is alive."""

    root: int
    nbytes: int
    life: Lifetime


def assign_offsets(blocks: Sequence[Block]) -> tuple[dict[int, int], int]:
    """({root: byte offset}, bytes of the arena). Offsets are multiples of `ALIGNMENT`.

    Optimal packing is NP-hard. Two greedy orders are tried and the smaller arena wins: largest first, which packs
    transformers well, and order of birth, which wins on long chains of equal blocks.
    """
    largest_first = sorted(blocks, key=lambda block: (-block.nbytes, block.life.first, block.root))
    by_birth = sorted(blocks, key=lambda block: (block.life.first, -block.nbytes, block.root))
    return min((_pack(largest_first), _pack(by_birth)), key=lambda packed: packed[1])


def live_peak(blocks: Iterable[Block]) -> int:
    """The most bytes that are alive in any one call: no arena can be smaller."""
    change: dict[int, int] = {}
    for block in blocks:
        change[block.life.first] = change.get(block.life.first, 0) + block.nbytes
        change[block.life.last + 1] = change.get(block.life.last + 1, 0) - block.nbytes
    peak = alive = 0
    for index in sorted(change):
        alive += change[index]
        peak = max(peak, alive)
    return peak


def _pack(blocks: Sequence[Block]) -> tuple[dict[int, int], int]:
    offsets: dict[int, int] = {}
    arena_bytes = 0
    placed = LifetimeIndex[tuple[int, int]](max((block.life.last for block in blocks), default=0))  # offset and end
    for block in blocks:
        size = -(-block.nbytes // ALIGNMENT) * ALIGNMENT
        offset = 0
        if size:  # empty blocks take no room
            offset = _best_fit(sorted(placed.overlapping(block.life)), size)
            placed.add(block.life, (offset, offset + size))
        offsets[block.root] = offset
        arena_bytes = max(arena_bytes, offset + size)
    return offsets, arena_bytes


def _best_fit(busy: Sequence[tuple[int, int]], size: int) -> int:
    """The start of the tightest gap between the sorted `busy` ranges that holds `size`, else the first byte after."""
    tightest: tuple[int, int] | None = None
    free_from = 0
    for offset, end in busy:
        gap = offset - free_from
        if gap >= size and (tightest is None or gap < tightest[0]):
            tightest = gap, free_from
        free_from = max(free_from, end)
    return free_from if tightest is None else tightest[1]
