"""plan.bin: the same bytes after a round trip; a byte that is changed, missing or too many is refused."""

from __future__ import annotations

import copy
import json
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
    no_power = "the alignment is {}; expected a power of two".format
    for alignment, said in ((0, no_power(0)), (3, no_power(3)), (2**12, "4096-byte boundary")):
        changed = decoder[:28] + struct.pack("<I", alignment) + decoder[32:]
        with pytest.raises(SourceError, match=said):
            decode_plans(signed(changed))


def test_a_body_has_the_alignment_of_its_plan(decoder: bytes) -> None:
    data = to_json(decode_plans(decoder).entries["main"])
    (call,) = (call for call in data["calls"] if "bodies" in call)
    call["bodies"][0]["alignment"] = 128
    with pytest.raises(SourceError, match=r"a body of call \d+ has the alignment 128; expected that of its plan, 64"):
        from_json(data)


def test_a_feed_on_another_device_than_its_slots_is_not_written(decoder: bytes) -> None:
    plan = decode_plans(decoder).entries["main"]
    first, *rest = plan.feed_signature
    feed = (replace(first, spec=replace(first.spec, device="cuda:0")), *rest)
    with pytest.raises(ValueError, match="the feed signature is not that of the slots"):
        encode_plans(PlanFile({"main": replace(plan, feed_signature=feed)}))


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


# plan.json: what is written is read back as the same plan, and nothing else is read.

STRANGE = (None, True, -1, 0, 2**80, 1.5, "", "aten.add.Tensor", [], [0], {}, {"a": 1})


def write(graph: Graph) -> Any:
    return json.loads(json.dumps(to_json(make_plan(graph, lower(graph))), allow_nan=False))


@given(graphs())
def test_round_trip_as_json(graph: Graph) -> None:
    plan = make_plan(graph, lower(graph))
    data = write(graph)
    assert from_json(data) == plan
    assert to_json(from_json(data)) == data


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree: what holds it, and its key there."""
    for key in range(len(data)) if isinstance(data, list) else [*data]:
        yield data, key
        if isinstance(data[key], list | dict):
            yield from places(data[key])


@given(graphs(most_ops=6), st.randoms(use_true_random=False))
def test_what_is_read_is_what_is_written(graph: Graph, draw: random.Random) -> None:
    """A tree with one place changed is refused in one sentence, or is another plan, written out just so."""
    data = write(graph)
    changed = copy.deepcopy(data)
    holder, key = draw.choice([*places(changed)])
    match draw.choice(["replace", "drop", "add"]):
        case "drop":
            del holder[key]
        case "add" if isinstance(holder, dict):
            holder["new"] = draw.choice(STRANGE)
        case _:
            holder[key] = draw.choice(STRANGE)
    try:
        plan = from_json(changed)
    except SourceError as error:
        assert str(error).startswith("plan JSON: ")
        return
    assert json.dumps(to_json(plan)) == json.dumps(changed)


@pytest.mark.parametrize("data", [None, 3, [], {}, {"format_version": True}, {"format_version": 1}, "plan"])
def test_other_versions_are_refused(data: Any) -> None:
    with pytest.raises(SourceError, match=r"plan JSON: found format_version .*, expected 3; make the plan again"):
        from_json(data)


def with_call(**change: Any) -> Any:
    """The plan of `y = Neg(x)` with something else in its call."""
    builder = GraphBuilder("small")
    x = builder.input("x", TensorSpec((2,), "float32"))
    data = write(builder.build(builder.emit("aten.neg.default", [x], [("y", TensorSpec((2,), "float32"))])))
    data["calls"][0] |= change
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "aten.sub.Tensor"}, "calls.0.kind is 'aten.sub.Tensor'; expected 'Neg'"),
        ({"kind_id": 99}, "call 0: no kernel has the kind_id 99"),
        ({"attr_schema": "neg/2:"}, "Neg has the attr schema 'neg/2:'; expected 'neg/1:order=i[]'"),
        ({"attr_blob": "00"}, "attr blob of 1 bytes does not fit 'neg/1:order=i[]'"),
        ({"in_vids": [7]}, "vid 7 has no slot"),
        ({"in_vids": [0.0]}, "calls[0].in_vids[0]: found 0.0, expected an integer"),
        ({"stream": 3}, "calls.0 has other keys than a plan: stream"),
        ({"attrs": {"alpha": 1.0}}, "calls.0.attrs has other keys than a plan: alpha"),
    ],
)
def test_strangers_in_json_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError) as caught:
        from_json(with_call(**change))
    assert message in str(caught.value)


def test_deep_nesting_is_refused() -> None:
    small = with_call()
    data = small
    for _ in range(5000):
        data = small | {"calls": [{**small["calls"][0], "bodies": [data]}]}
    with pytest.raises(SourceError, match="nested too deep"):
        from_json(data)
