"""plan.bin: the same bytes after a round trip; a byte that is changed, missing or too many is refused."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SourceError
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.lowering import lower, with_kernels
from pipeline.lowering.memory_order import in_traced_order
from pipeline.ops import GraphBuilder
from pipeline.planning import (
    ExecutionPlan,
    PlanFile,
    StoredBytes,
    decode_plans,
    encode_plans,
    from_json,
    make_plan,
    to_json,
)
from pipeline.planning.check import violations
from pipeline.runtime.devices import alignment_of
from tests.support.planning_graphs import graphs, plan_graph
from tests.support.torch_programs import SmallDecoder, graph_of

TEXTS = st.text(max_size=8)
SIZES = st.integers(0, 2**64 - 1)
STORED = st.builds(StoredBytes, st.binary(max_size=9), TEXTS, SIZES, SIZES, st.integers(0, 2**32 - 1))


@pytest.fixture(scope="module")
def decoder() -> bytes:
    """A plan with a state, a body, traced strides and calls of torch operators."""
    graph = graph_of(SmallDecoder(), SmallDecoder.example())
    plan = plan_graph(with_kernels(in_traced_order(graph)))
    assert plan.updates and plan.bodies
    return encode_plans(PlanFile({"main": plan}, {"b_cache": StoredBytes(file="w.bin", offset=64, nbytes=96)}))


def signed(data: bytes) -> bytes:
    """`data` with its own size and checksum, as someone writes it who means to."""
    sized = data[:16] + struct.pack("<Q", len(data)) + data[24:]
    return sized[:12] + struct.pack("<I", zlib.crc32(sized[16:])) + sized[16:]


@given(st.dictionaries(TEXTS, graphs(most_ops=8).map(plan_graph), max_size=3), st.dictionaries(TEXTS, STORED))
def test_round_trip(entries: dict[str, ExecutionPlan], weights: dict[str, StoredBytes]) -> None:
    content = PlanFile(entries, weights)
    data = encode_plans(content)
    assert decode_plans(data) == content
    assert encode_plans(decode_plans(data)) == data


@given(graphs(most_ops=8))
def test_the_alignment_of_the_device_is_in_the_header_and_in_every_offset(graph: Graph) -> None:
    plan = make_plan(graph, lower(graph), 256)
    assert violations(plan) == []
    assert not any(offset % 256 for offset in (*plan.offsets.values(), plan.arena_bytes))
    data = encode_plans(PlanFile({"main": plan}))
    assert struct.unpack_from("<I", data, 28) == (256,)
    assert decode_plans(data).entries == {"main": plan}
    assert from_json(to_json(plan)) == plan and to_json(plan)["alignment"] == 256
    with pytest.raises(ValueError, match=r"the plans have the alignments \[64, 256\]; one plan.bin has one"):
        encode_plans(PlanFile({"main": plan, "other": plan_graph(graph)}))


def test_another_alignment_than_that_of_the_offsets_is_refused(decoder: bytes) -> None:
    for alignment, said in ((3, "the alignment is 3; expected a power of two"), (2**12, "4096-byte boundary")):
        changed = decoder[:28] + struct.pack("<I", alignment) + decoder[32:]
        with pytest.raises(SourceError, match=said):
            decode_plans(signed(changed))


def test_a_graph_for_a_device_is_planned_with_the_alignment_of_that_device() -> None:
    for device, alignment in (("cpu", 64), ("cuda:0", 256), ("mps", 64)):
        builder = GraphBuilder("g")
        builder.input("x", TensorSpec((2,), "float32", "cpu"))
        builder.input("y", TensorSpec((2,), "float32", device))
        assert alignment_of(builder.build([0])) == alignment


def test_round_trip_of_torch(decoder: bytes) -> None:
    assert encode_plans(decode_plans(decoder)) == decoder
    assert signed(decoder) == decoder


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_file_is_refused(decoder: bytes, seed: int) -> None:
    """Any bit, any cut, any tail."""
    draw = random.Random(seed)
    for _ in range(50):
        changed = bytearray(decoder)
        changed[draw.randrange(len(decoder))] ^= 1 << draw.randrange(8)
        at = draw.randrange(len(decoder))
        for data in (bytes(changed), decoder[:at], decoder + b"\0", decoder[:at] + decoder[at + 1 :]):
            with pytest.raises(SourceError, match=r"plan\.bin: "):
                decode_plans(data)


@pytest.mark.parametrize("seed", range(20))
def test_hostile_files_are_refused_in_one_sentence_or_are_other_plans(decoder: bytes, seed: int) -> None:
    """Someone changes bytes and signs the file anew: what is read then is written again as these very bytes."""
    draw = random.Random(seed)
    for _ in range(50):
        changed = bytearray(decoder)
        at = draw.randrange(24, len(decoder))
        changed[at] = draw.choice([0, 1, 255, draw.randrange(256)])
        if draw.random() < 0.3:
            del changed[at : at + draw.randrange(1, 9)]
        data = signed(bytes(changed))
        try:
            content = decode_plans(data)
        except SourceError as error:
            assert str(error).startswith("plan.bin: ")
            continue
        assert encode_plans(content) == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin as a plan does"),
        (b"PK" * 40, "does not begin as a plan does"),
        (b"ONNXLPLN" + b"\1" + bytes(70), "found version 1, expected 3; make the plan again"),
    ],
)
def test_strangers_are_named(data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        decode_plans(data)


def test_a_plan_that_loses_numbers_is_refused(decoder: bytes) -> None:
    content = decode_plans(decoder)
    plan = replace(content.entries["main"], offsets=dict.fromkeys(content.entries["main"].offsets, 0))
    with pytest.raises(SourceError, match="the plan breaks a rule: "):
        decode_plans(encode_plans(PlanFile({"main": plan})))
