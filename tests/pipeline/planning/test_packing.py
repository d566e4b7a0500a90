"""Offsets: blocks that live together do not touch, and room is not wasted where it can be seen."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.arena import (
    Block,
    Lifetime,
    aligned_peak,
    assign_offsets,
    live_peak,
    pack_by_birth,
    pack_in_order,
)

Row = tuple[int, int, int]
"""Bytes, first and last call."""


def blocks_of(rows: Sequence[Row]) -> list[Block]:
    return [Block(root, nbytes, Lifetime(first, last)) for root, (nbytes, first, last) in enumerate(rows)]


@st.composite
def block_lists(draw: st.DrawFn, *, least: int = 0, step: int = 1) -> list[Block]:
    sizes = st.one_of(st.integers(least, 8).map(lambda units: units * 64), st.integers(least, 500 // step))
    spans = st.tuples(st.integers(0, 9), st.integers(0, 4)).map(lambda span: (span[0], sum(span)))
    drawn = draw(st.lists(st.tuples(sizes, spans), min_size=least, max_size=16))
    return blocks_of([(size * step, first, last) for size, (first, last) in drawn])


def refuse_overlaps(blocks: Sequence[Block], offsets: Mapping[int, int], total: int) -> None:
    assert all(offset % 64 == 0 for offset in offsets.values())
    assert all(offsets[block.root] >= 0 and offsets[block.root] + block.nbytes <= total for block in blocks)
    for a, b in combinations([block for block in blocks if block.nbytes], 2):
        if {*range(a.life.first, a.life.last + 1)} & {*range(b.life.first, b.life.last + 1)}:
            low, high = sorted((a, b), key=lambda block: offsets[block.root])
            assert offsets[low.root] + low.nbytes <= offsets[high.root]


@given(block_lists())
def test_blocks_that_live_together_do_not_overlap(blocks: list[Block]) -> None:
    refuse_overlaps(blocks, *assign_offsets(blocks))


@given(block_lists(least=1, step=64), st.randoms())
def test_they_do_not_overlap_in_any_order(blocks: list[Block], shuffler: random.Random) -> None:
    shuffler.shuffle(blocks)
    in_order = pack_in_order(blocks, most_work=10**9)
    assert in_order is not None
    for packing in (in_order, pack_by_birth(blocks)):
        refuse_overlaps(blocks, packing.offsets, packing.nbytes)


@given(block_lists())
def test_the_peak_is_the_largest_sum_of_live_bytes(blocks: list[Block]) -> None:
    sums = [sum(b.nbytes for b in blocks if b.life.first <= at <= b.life.last) for at in range(15)]
    aligned = [sum((b.nbytes + 63) // 64 * 64 for b in blocks if b.life.first <= at <= b.life.last) for at in range(15)]
    assert (live_peak(blocks), aligned_peak(blocks)) == (max(sums), max(aligned))
    assert assign_offsets(blocks)[1] >= max(aligned)


def test_odd_sizes_are_rounded_up() -> None:
    blocks = [Block(root, size, Lifetime(0, 9)) for root, size in enumerate((1, 65, 0, 64))]
    assert assign_offsets(blocks)[1] == 64 + 128 + 64


def test_the_tightest_gap_wins() -> None:
    blocks = [
        Block(0, 1024, Lifetime(0, 1)),
        Block(1, 512, Lifetime(0, 9)),
        Block(2, 256, Lifetime(0, 1)),
        Block(3, 250, Lifetime(0, 9)),
        Block(4, 200, Lifetime(5, 9)),
    ]
    offsets, total = assign_offsets(blocks)
    assert offsets[4] == offsets[2] == 1536
    assert (total, live_peak(blocks)) == (2048, 2042)


@pytest.mark.parametrize(
    "rows",
    [
        [(128, 3, 5), (128, 0, 3), (192, 4, 5)],  # only largest first; by birth the 192 finds a hole of 128 below it
        [(64, 0, 3), (192, 4, 5), (192, 0, 2), (64, 3, 6)],  # only by birth
        [(128, 0, 2), (64, 2, 5), (192, 3, 5), (192, 1, 1)],  # only by bytes × calls
        [(192, 0, 1), (128, 3, 3), (128, 2, 3), (128, 1, 3)],  # only longest alive first
        [(256, 4, 8), (128, 1, 3), (256, 2, 2), (128, 3, 6)],  # only if of equal blocks the longest alive goes first
        [(128, 1, 1), (64, 3, 6), (64, 0, 3), (128, 4, 5), (192, 1, 4)],  # none at its first try
    ],
)
def test_an_order_that_reaches_the_bound_is_found(rows: list[Row]) -> None:
    blocks = blocks_of(rows)
    assert assign_offsets(blocks)[1] == live_peak(blocks)


@pytest.mark.parametrize("most_work", [0, 200])
def test_a_search_without_work_left_gives_nothing(most_work: int) -> None:
    assert pack_in_order(blocks_of([(64, 0, 9)] * 20), most_work) is None


@pytest.mark.parametrize("kind", ["nested", "random"])
def test_large_plans_come_near_the_bound(kind: str) -> None:
    """Nested lives are those of a training step: each activation waits for its gradient."""
    generator, count = random.Random(0), 1500
    sizes = generator.choices((64, 256, 1024, 4096, 6400), k=count)
    spans = {
        "nested": [(at, 2 * count - at) for at in range(count)],
        "random": [(at, at + int(generator.expovariate(0.2))) for at in range(count)],
    }[kind]
    blocks = blocks_of([(size, *span) for size, span in zip(sizes, spans, strict=True)])
    offsets, total = assign_offsets(blocks)
    refuse_overlaps_by_call(blocks, offsets)
    assert total <= 1.03 * live_peak(blocks)


def refuse_overlaps_by_call(blocks: Sequence[Block], offsets: Mapping[int, int]) -> None:
    """As `refuse_overlaps`, for many blocks: looks only at those that lie next to each other in a call."""
    ends = defaultdict(set)
    for block in blocks:
        ends[block.life.last + 1].add(block.root)
    alive: dict[int, tuple[int, int]] = {}
    for block in sorted(blocks, key=lambda block: block.life.first):
        for call in [call for call in ends if call <= block.life.first]:
            for root in ends.pop(call):
                alive.pop(root, None)
        mine = offsets[block.root], offsets[block.root] + block.nbytes
        assert not any(start < mine[1] and mine[0] < end for start, end in alive.values())
        alive[block.root] = mine
