"""A memory map over several regions: values are where a call needs them, and every change of place is a move."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeline.errors import UsageError
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.planning import (
    ExecutionPlan,
    MemoryMap,
    MemoryRegion,
    PlanFile,
    Residence,
    decode_plans,
    encode_plans,
    from_json,
    map_memory,
    parse_regions,
    to_json,
)
from pipeline.planning.check import violations
from tests.support.planning_graphs import graphs, plan_graph

SRAM, DRAM = MemoryRegion("sram", 256), MemoryRegion("dram")


def memory_of(plan: ExecutionPlan) -> MemoryMap:
    assert plan.memory is not None
    return plan.memory


def saved_for_later() -> Graph:
    """`a` is made first and read last; the row of values between needs all of a region of 256 bytes."""
    builder = GraphBuilder("saved")
    small = TensorSpec((32,), "float32")
    x = builder.input("x", small)
    (a,) = builder.emit("aten.relu.default", [x], [("a", small)])
    (b,) = builder.emit("aten.neg.default", [x], [("b", small)])
    (c,) = builder.emit("aten.softmax.int", [b], [("c", small)], {"dim": 0})
    (d,) = builder.emit("aten.softmax.int", [c], [("d", small)], {"dim": 0})
    return builder.build(builder.emit("aten.add.Tensor", [a, d], [("y", small)]))


def test_what_is_needed_last_is_spilled_and_filled_again() -> None:
    plan = map_memory(plan_graph(saved_for_later()), [SRAM, DRAM])
    assert violations(plan) == []
    memory, names = memory_of(plan), [slot.name for slot in plan.slots]
    held = [(names[one.root], memory.regions[one.region].name, one.first, one.last) for one in memory.residences]
    assert held == [
        ("a", "sram", 0, 0),
        ("a", "dram", 1, 3),
        ("a", "sram", 4, 5),
        ("b", "sram", 1, 2),
        ("c", "sram", 2, 3),
        ("d", "sram", 3, 4),
    ]
    assert [(move.before, names[move.root]) for move in memory.moves()] == [(1, "a"), (4, "a")]


@given(graphs(), st.sampled_from([0, 64, 128, 192, 320, 4096]), st.sampled_from([None, 256]))
def test_every_map_passes(graph: Graph, fast: int, middle: int | None) -> None:
    regions = [MemoryRegion("fast", fast), *([MemoryRegion("middle", middle)] if middle else []), DRAM]
    plan = map_memory(plan_graph(graph), regions)
    assert violations(plan) == []
    if fast == 4096:
        assert {one.region for one in memory_of(plan).residences} <= {0}
        assert memory_of(plan).moves() == ()
    assert from_json(to_json(plan)) == plan
    assert decode_plans(encode_plans(PlanFile({"main": plan}))).entries["main"] == plan


@given(graphs(), st.data())
def test_a_pin_holds(graph: Graph, data: st.DataObject) -> None:
    plan = plan_graph(graph)
    full = [vid for vid in plan.offsets if plan.slots[vid].spec.nbytes]
    assume(full)
    pinned = data.draw(st.sampled_from(full))
    region = data.draw(st.sampled_from(["sram", "dram"]))
    assume(region == "dram" or plan.slots[pinned].spec.nbytes <= 1024)
    mapped = map_memory(plan, [replace(SRAM, nbytes=1024), DRAM], {plan.slots[pinned].name: region})
    assert violations(mapped) == []
    held = [one for one in memory_of(mapped).residences if one.root == pinned]
    assert [one.region for one in held] == [["sram", "dram"].index(region)]


@given(graphs(least_ops=3), st.randoms(use_true_random=False))
def test_no_tampering_with_a_map_is_silent(graph: Graph, draw: random.Random) -> None:
    """A residence that is moved, cut, dropped or doubled breaks a rule, or is another map that holds everything."""
    plan = map_memory(plan_graph(graph), [replace(SRAM, nbytes=192), DRAM])
    memory = memory_of(plan)
    assume(memory.residences)
    at = draw.randrange(len(memory.residences))
    one = memory.residences[at]
    change = draw.choice(["root", "region", "offset", "first", "last", "drop", "double"])
    if change in ("drop", "double"):
        residences = [*memory.residences[:at], *[one] * (2 * (change == "double")), *memory.residences[at + 1 :]]
    else:
        changed = replace(one, **{change: getattr(one, change) + draw.choice([-64, -1, 1, 64])})
        residences = [*memory.residences[:at], changed, *memory.residences[at + 1 :]]
    tampered = replace(plan, memory=replace(memory, residences=tuple(residences)))
    if not violations(tampered):
        assert simulate(tampered)


def simulate(plan: ExecutionPlan) -> bool:
    """Whether all values survive a run in the regions, byte by byte: a third opinion, slow and simple."""
    memory, cells = memory_of(plan), dict[tuple[int, int], int]()

    def fill(one: Residence) -> None:
        cells.update({(one.region, one.offset + byte): one.root for byte in range(plan.slots[one.root].spec.nbytes)})

    def holds(one: Residence) -> bool:
        size = plan.slots[one.root].spec.nbytes
        return all(cells.get((one.region, one.offset + byte)) == one.root for byte in range(size))

    began = set[int]()
    for at in range(len(plan.calls) + 1):
        moves = [move for move in memory.moves() if move.before == at]
        if not all(holds(move.source) for move in moves):
            return False
        for move in moves:
            fill(move.target)
        if not all(holds(move.source) for move in moves):
            return False
        for one in memory.residences:
            if one.first == at and one.root not in began:
                began.add(one.root)
                fill(one)
        if not all(holds(one) for one in memory.residences if one.first <= at <= one.last):
            return False
    return True


@pytest.mark.parametrize(
    ("text", "regions"),
    [
        ("dram", [MemoryRegion("dram")]),
        ("sram:2MiB,dram", [MemoryRegion("sram", 2**21), MemoryRegion("dram")]),
        (
            "tcm:512B, sram:1KiB, dram:1GiB",
            [MemoryRegion("tcm", 512), MemoryRegion("sram", 1024), MemoryRegion("dram", 2**30)],
        ),
    ],
)
def test_regions_are_read(text: str, regions: list[MemoryRegion]) -> None:
    assert list(parse_regions(text)) == regions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found '', expected NAME:SIZE"),
        ("sram:2MB", "found 'sram:2MB', expected NAME:SIZE"),
        ("sram:0B,dram", "found 'sram:0B', expected"),
        ("sram:1KiB,sram", "found the name 'sram' twice, expected another name for each"),
        ("sram,dram", "'sram' has no size; only the last region"),
        ("sram:8589934592GiB,dram", "'sram' has 9223372036854775808 bytes, expected a number below"),
        (f"sram:{'9' * 5000}B,dram", "found 'sram:9+B', expected NAME:SIZE"),
        ("2MiB,dram", "found the name '2MiB', expected one that begins with a letter"),
        ("s\nram:2MiB,dram", r"found the name 's\\nram', expected one that begins with a letter"),
        ("a=b:2MiB,dram", "found the name 'a=b', expected one .* that has no '='"),
    ],
)
def test_other_regions_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_regions(text)


@pytest.mark.parametrize(
    ("regions", "pins", "message"),
    [
        ([SRAM, DRAM], {"z": "sram"}, "the plan has no value 'z'"),
        ([SRAM, DRAM], {"a": "sran"}, "'a' is pinned to 'sran'; expected one of sram, dram"),
        ([SRAM, DRAM], {"x": "sram"}, "'x' is not in the arena"),
        ([MemoryRegion("sram", 64), DRAM], {"a": "sram"}, "they take 128 B of 'sram', which has 64 B; expected fewer"),
        ([SRAM], {}, r"'sram' has 256 B, which does not hold 1 value of the plan \(c\); expected a last region"),
        ([], {}, r"found \[\], expected one MemoryRegion or more"),
        ("sram:2MiB,dram", {}, "found 'sram:2MiB,dram', expected one MemoryRegion or more"),
        ([MemoryRegion("sram", 64), DRAM, MemoryRegion("sram")], {}, "found the name 'sram' twice"),
        ([MemoryRegion("sram", -64), DRAM], {}, "'sram' has -64 bytes, expected a number below"),
        ([MemoryRegion("sram", 2**64 - 1), DRAM], {}, "'sram' has 18446744073709551615 bytes, expected"),
        ([DRAM, SRAM], {}, "'dram' has no size; only the last region"),
    ],
)
def test_what_does_not_fit_is_named(regions: list[MemoryRegion], pins: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        map_memory(plan_graph(saved_for_later()), regions, pins)


def test_a_region_of_no_whole_multiple_of_64_bytes_is_used_to_its_last_byte() -> None:
    builder = GraphBuilder("odd")
    odd = TensorSpec((25,), "float32")
    graph = builder.build(builder.emit("aten.relu.default", [builder.input("x", odd)], [("y", odd)]))
    plan = map_memory(plan_graph(graph), [MemoryRegion("sram", 100), DRAM], {"y": "sram"})
    assert memory_of(plan).residences == (Residence(1, 0, 0, 0, 1),)
    assert memory_of(map_memory(plan_graph(graph), [MemoryRegion("all", 100)])).residences == (
        Residence(1, 0, 0, 0, 1),
    )
    with pytest.raises(UsageError, match="'all' has 99 B, which does not hold 1 value"):
        map_memory(plan_graph(graph), [MemoryRegion("all", 99)])


def test_a_pin_of_a_name_that_two_values_have_is_refused() -> None:
    plan = plan_graph(saved_for_later())
    slots = [replace(slot, name="c") if slot.name == "d" else slot for slot in plan.slots]
    with pytest.raises(UsageError, match="2 values are called 'c'; pin a value that has its own name"):
        map_memory(replace(plan, slots=tuple(slots)), [SRAM, DRAM], {"c": "dram"})


@pytest.mark.parametrize(
    ("regions", "violation"),
    [
        ([MemoryRegion("sram"), DRAM], "region 'sram' has no size; only the last one may be without a bound"),
        ([replace(SRAM, nbytes=2**63), DRAM], "region 'sram' has 9223372036854775808 bytes"),
        ([SRAM, replace(DRAM, name="sram")], "the regions are called ['sram', 'sram']; expected names, each once"),
    ],
)
def test_the_checker_refuses_regions_that_no_machine_has(regions: list[MemoryRegion], violation: str) -> None:
    plan = map_memory(plan_graph(saved_for_later()), [SRAM, DRAM])
    assert violations(replace(plan, memory=replace(memory_of(plan), regions=tuple(regions)))) == [violation]


def test_the_checker_names_values_that_share_bytes() -> None:
    plan = map_memory(plan_graph(saved_for_later()), [replace(SRAM, nbytes=4096), DRAM])
    residences = tuple(replace(one, offset=64) if one.root == 2 else one for one in memory_of(plan).residences)
    found = violations(replace(plan, memory=replace(memory_of(plan), residences=residences)))
    assert found == ["'a' (vid 1) and 'b' (vid 2) share bytes of region 0 at call 1"]
