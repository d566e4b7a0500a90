"""Graph → calls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.errors import InternalError, Unsupported
from pipeline.ir import InputRef, TensorSpec
from pipeline.lowering import lower, with_kernels
from pipeline.ops import GraphBuilder, Kind

F32 = TensorSpec((3,), "float32")


def test_one_call_per_op_with_what_the_planner_may_do() -> None:
    builder = GraphBuilder("chain")
    x = builder.input("x", F32)
    (y,) = builder.emit("aten.relu.default", [x], [("y", F32)])
    (z,) = builder.emit("aten.reshape.default", [y], [("z", TensorSpec((3, 1), "float32"))], {"shape": (3, 1)})
    (w,) = builder.emit("aten.matmul.default", [z, y], [("w", F32)])
    calls = lower(builder.build([w]))
    assert [(Kind(call.kind_id).name, call.in_vids, call.out_vids, dict(call.constraints)) for call in calls] == [
        ("Relu", (x,), (y,), {"inplace": (0,)}),
        ("Reshape", (y,), (z,), {"view": 0}),
        ("MatMul", (z, y), (w,), {}),
    ]


def test_an_op_may_ask_for_less_than_its_kernel_allows() -> None:
    builder = GraphBuilder("less")
    x = builder.input("x", F32)
    (y,) = builder.emit("aten.add.Tensor", [x, x], [("y", F32)], constraints={"inplace": (1,)})
    (z,) = builder.emit("aten.add.Tensor", [y, y], [("z", F32)], constraints={"inplace": ()})
    first, second = lower(builder.build([z]))
    assert first.constraints["inplace"] == (1,)
    assert second.constraints["inplace"] == ()


def test_an_operand_that_is_read_twice_is_not_changed_in_place() -> None:
    """By its name it would be one input, if a front end lists each input once."""
    i64, kind = TensorSpec((3,), "int64"), "aten.index_copy.default"
    builder = GraphBuilder("changed")
    x, at = builder.input("x", i64), builder.input("at", i64)
    twice, once = (
        builder.emit(kind, [x, at], [(name, i64)], {"self": InputRef(0), "dim": 0, "index": InputRef(1)})
        for name in ("twice", "once")
    )
    graph = builder.build([*twice, *once])
    sources = (InputRef(0), InputRef(1))
    ops = [
        replace(op, attrs={**op.attrs, "source": at}, kernel=None) for op, at in zip(graph.ops, sources, strict=True)
    ]
    calls = lower(with_kernels(replace(graph, ops=tuple(ops))))
    assert [dict(call.constraints) for call in calls] == [{}, {"inplace": (0,)}]


def test_an_op_may_not_ask_for_more() -> None:
    builder = GraphBuilder("more")
    x = builder.input("x", F32)
    (y,) = builder.emit("aten.softmax.int", [x], [("y", F32)], {"dim": 0}, constraints={"inplace": (0,)}, name="attn")
    with pytest.raises(
        InternalError, match=r"aten.softmax.int 'attn': it asks for inplace=\(0,\); its kernel allows \(\)"
    ):
        lower(builder.build([y]))


def test_a_single_missing_kind_is_one() -> None:
    builder = GraphBuilder("exotic")
    (y,) = builder.emit("STFT", [builder.input("x", F32)], [("y", F32)])
    with pytest.raises(Unsupported, match=r"'exotic': 1 of 1 op has no kernel \(1 kind\):\n  1 STFT: → y\n"):
        lower(builder.build([y]))


def test_all_missing_kinds_are_one_message() -> None:
    builder = GraphBuilder("exotic")
    x = builder.input("x", F32)
    for at in range(4):
        (x,) = builder.emit("STFT", [x], [(f"s{at}", F32)], name=f"stft_{at}", origin=f"encoder.{at}")
    (x,) = builder.emit("StringSplit", [x], [("noise", F32)])
    (x,) = builder.emit("aten.relu.default", [x], [("y", F32)])
    with pytest.raises(Unsupported) as caught:
        lower(builder.build([x]))
    assert str(caught.value).splitlines() == [
        "graph 'exotic': 5 of 6 ops have no kernel (2 kinds):",
        "  4 STFT: stft_0 (in encoder.0), stft_1 (in encoder.1), stft_2 (in encoder.2), and 1 more",
        "  1 StringSplit: → noise",
        "Run this model by onnxruntime instead (`runtime: {backends: [onnxruntime]}`), or add a row for the kind to "
        "its family in pipeline/ops and pipeline/runtime/kernels.",
    ]
