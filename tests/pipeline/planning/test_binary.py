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
from pipeline.ir.graph import Graph
from pipeline.lowering import lower, with_kernels
from pipeline.lowering.lower import in_traced_order
from pipeline.planning import ExecutionPlan, PlanFile, StoredBytes, decode_plans, encode_plans, make_plan
from tests.support.planning_graphs import graphs
from tests.support.torch_programs import SmallDecoder, graph_of

TEXTS = st.text(max_size=8)
SIZES = st.integers(0, 2**64 - 1)
STORED = st.builds(StoredBytes, st.binary(max_size=9), TEXTS, SIZES, SIZES, st.integers(0, 2**32 - 1))


def plan_graph(graph: Graph) -> ExecutionPlan:
    return make_plan(graph, lower(graph))


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
