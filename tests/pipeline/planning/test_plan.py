"""What the planner decides, as pictures of small graphs."""

from __future__ import annotations

import json

import pytest

from pipeline.errors import InternalError, UsageError
from pipeline.ir.builder import Builder
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ir.json import digest_graph
from pipeline.lowering import lower
from pipeline.ops import GraphBuilder, Layout
from pipeline.planning import ExecutionPlan, check_plan, make_plan, to_json
from pipeline.planning.arena import Lifetime, lifetimes

F32 = TensorSpec((16, 16), "float32")  # 1024 bytes
FLAT = TensorSpec((256,), "float32")


def plan_outputs(builder: Builder, *outputs: int) -> ExecutionPlan:
    graph = builder.build(outputs)
    plan = make_plan(graph, lower(graph))
    check_plan(plan)
    return plan


def names(plan: ExecutionPlan) -> dict[str, str]:
    return {plan.slots[out].name: plan.slots[source].name for out, source in plan.alias.items()}


class Chain:
    """A builder that names values by letters: `c.relu("y", "x")`."""

    def __init__(self) -> None:
        self.builder = GraphBuilder("chain")
        self.vids = {"x": self.builder.input("x", F32), "w": self.builder.param("w", F32)}

    def emit(self, kind: str, out: str, *ins: str, spec: TensorSpec = F32, **attrs) -> None:
        (self.vids[out],) = self.builder.emit(kind, [self.vids[name] for name in ins], [(out, spec)], attrs)

    def plan(self, *outputs: str) -> ExecutionPlan:
        return plan_outputs(self.builder, *(self.vids[name] for name in outputs))

    def graph(self, *outputs: str) -> Graph:
        return self.builder.build([self.vids[name] for name in outputs])


def test_lifetimes() -> None:
    c = Chain()
    c.emit("aten.relu.default", "a", "x")
    c.emit("aten.neg.default", "dead", "a")
    c.emit("aten.add.Tensor", "y", "a", "w")
    graph = c.graph("y")
    lives = {graph.values[vid].name: life for vid, life in lifetimes(graph, lower(graph)).items()}
    assert lives == {
        "x": Lifetime(-1, 0),
        "w": Lifetime(-1, 2),
        "a": Lifetime(0, 2),
        "dead": Lifetime(1, 1),
        "y": Lifetime(2, 3),
    }


def test_a_chain_runs_in_place_from_the_first_tmp_value() -> None:
    c = Chain()
    c.emit("aten.relu.default", "a", "x")  # x is the caller's: a gets storage of its own
    c.emit("aten.neg.default", "b", "a")
    c.emit("aten.add.Tensor", "y", "w", "b")  # the second operand
    plan = c.plan("y")
    assert names(plan) == {"b": "a", "y": "b"}
    assert plan.arena_bytes == plan.live_bytes == 1024


@pytest.mark.parametrize("later", ["a", "view"])
def test_no_write_over_a_value_that_is_read_later_also_through_a_view(later: str) -> None:
    c = Chain()
    c.emit("aten.tanh.default", "a", "x")
    c.emit("aten.clone.default", "view", "a")
    c.emit("aten.neg.default", "b", "a")
    c.emit("aten.sub.Tensor", "y", "b", later)
    assert names(c.plan("y")) == {"view": "a", "y": "b"}


def test_no_write_over_storage_that_the_same_call_reads_by_another_operand() -> None:
    c = Chain()
    c.emit("aten.tanh.default", "a", "x")
    c.emit("aten.clone.default", "view", "a")
    c.emit("aten.sub.Tensor", "y", "a", "view")
    assert names(c.plan("y")) == {"view": "a"}


def test_no_write_over_a_view_of_an_input_or_a_weight() -> None:
    c = Chain()
    c.emit("aten.reshape.default", "vx", "x", spec=FLAT, shape=(256,))
    c.emit("aten.neg.default", "a", "vx", spec=FLAT)
    c.emit("aten.clone.default", "vw", "w")
    c.emit("aten.neg.default", "b", "vw")
    assert names(c.plan("a", "b")) == {"vx": "x", "vw": "w"}


def test_an_output_keeps_storage_of_its_own() -> None:
    c = Chain()
    c.emit("aten.clone.default", "of_input", "x")
    c.emit("aten.relu.default", "first", "x")
    c.emit("aten.clone.default", "second", "first")
    c.emit("aten.neg.default", "third", "first")
    assert names(c.plan("of_input", "first", "second", "third")) == {}


def test_an_output_may_be_a_view_of_a_tmp_value() -> None:
    c = Chain()
    c.emit("aten.relu.default", "a", "x")
    c.emit("aten.reshape.default", "y", "a", spec=FLAT, shape=(256,))
    assert names(c.plan("y")) == {"y": "a"}


def test_an_input_or_a_weight_may_leave_as_it_is() -> None:
    plan = Chain().plan("x", "w")
    assert (plan.calls, plan.offsets, plan.arena_bytes) == ((), {}, 0)


def test_another_shape_or_dtype_is_not_in_place() -> None:
    c = Chain()
    row = TensorSpec((1, 16), "float32")
    c.emit("aten.sum.dim_IntList", "row", "x", spec=row, dim=(0,), keepdim=True)
    c.emit("aten.add.Tensor", "y", "row", "w")
    c.emit("aten.tanh.default", "t", "y")
    c.emit("aten.lt.Tensor", "z", "t", "w", spec=TensorSpec((16, 16), "bool"))
    assert names(c.plan("z")) == {"t": "y"}


def test_storage_is_reused_when_its_value_is_dead() -> None:
    c = Chain()
    for last, out in zip(["x", "a", "b", "c"], ["a", "b", "c", "y"], strict=True):
        c.emit("aten.matmul.default", out, last, "w")
    plan = c.plan("y")
    assert plan.alias == {}
    assert plan.arena_bytes == plan.live_bytes == 2048
    assert sorted(plan.offsets.values()) == [0, 0, 1024, 1024]


def test_a_plan_needs_numbers_for_dims() -> None:
    builder = GraphBuilder("dynamic")
    x = builder.input("x", TensorSpec(("batch", 3), "float32"))
    graph = builder.build([x])
    with pytest.raises(UsageError, match=r"'dynamic': 1 value with named dims \(x\['batch', 3\]\).*by fix_dims"):
        make_plan(graph, ())


def test_calls_of_another_graph_are_refused() -> None:
    c = Chain()
    c.emit("aten.relu.default", "y", "x")
    with pytest.raises(InternalError, match="0 calls for 1 op of graph"):
        make_plan(c.graph("y"), ())


def test_the_feed_signature_has_the_inputs_and_then_weights_without_bytes() -> None:
    chains = [Chain(), Chain()]
    for c in chains:
        c.emit("aten.add.Tensor", "y", "x", "w")
    first, second = [c.plan("y").feed_signature for c in chains]
    assert [(entry.name, entry.spec) for entry in first] == [("x", F32), ("w", F32)]
    assert hash(first) == hash(second)


def test_a_weight_that_nobody_reads_is_not_fed() -> None:
    assert [entry.name for entry in Chain().plan("x").feed_signature] == ["x"]


def test_views_have_layouts_and_lie_in_the_storage_of_their_root() -> None:
    c = Chain()
    c.emit("aten.tanh.default", "a", "x")
    c.emit("aten.permute.default", "t", "a", dims=(1, 0))
    c.emit("aten.slice.Tensor", "s", "t", spec=TensorSpec((16, 4), "float32"), dim=1, start=8, end=16, step=2)
    c.emit("aten.reshape.default", "copied", "s", spec=TensorSpec((64,), "float32"), shape=(64,))
    c.emit("aten.neg.default", "y", "copied", spec=TensorSpec((64,), "float32"))
    plan = c.plan("y")
    assert names(plan) == {"t": "a", "s": "t", "y": "copied"}
    assert {plan.slots[vid].name: layout for vid, layout in plan.layouts.items()} == {
        "t": Layout((16, 16), (1, 16)),
        "s": Layout((16, 4), (1, 32), 128),
    }
    assert to_json(plan)["values"][c.vids["s"]]["layout"] == {"strides": [1, 32], "offset": 128}


def test_all_pieces_of_a_split_are_views_or_none_is() -> None:
    half = TensorSpec((8, 16), "float32")

    def split(*outputs: str) -> dict[str, str]:
        c = Chain()
        c.emit("aten.tanh.default", "a", "x")
        pieces = c.builder.emit(
            "aten.split_with_sizes.default",
            [c.vids["a"]],
            [("p", half), ("q", half)],
            {"split_sizes": (8, 8), "dim": 0},
        )
        c.vids |= dict(zip("pq", pieces, strict=True))
        c.emit("aten.neg.default", "n", "q", spec=half)
        return names(c.plan("n", *outputs))

    assert split("p") == {"p": "a", "q": "a"}  # p leaves with its whole class, so n gets storage of its own
    assert split("p", "q") == {}  # two outputs would share storage


def test_the_last_piece_of_a_split_is_written_over() -> None:
    half = TensorSpec((8, 16), "float32")
    c = Chain()
    c.emit("aten.tanh.default", "a", "x")
    p, q = c.builder.emit(
        "aten.split_with_sizes.default", [c.vids["a"]], [("p", half), ("q", half)], {"split_sizes": (8, 8), "dim": 0}
    )
    c.vids |= {"p": p, "q": q}
    c.emit("aten.neg.default", "m", "p", spec=half)  # q is still to be read
    c.emit("aten.neg.default", "n", "q", spec=half)
    c.emit("aten.sub.Tensor", "y", "m", "n", spec=half)
    plan = c.plan("y")
    assert names(plan) == {"p": "a", "q": "a", "n": "q", "y": "m"}
    assert plan.layout(c.vids["n"]) == Layout((8, 16), (16, 1), 128)


def test_what_is_expanded_or_transposed_is_not_written_over() -> None:
    c = Chain()
    row = TensorSpec((1, 16), "float32")
    c.emit("aten.sum.dim_IntList", "row", "x", spec=row, dim=(0,), keepdim=True)
    c.emit("aten.expand.default", "wide", "row", size=(16, 16))
    c.emit("aten.neg.default", "a", "wide")
    c.emit("aten.permute.default", "t", "a", dims=(1, 0))
    c.emit("aten.neg.default", "y", "t")
    plan = c.plan("y")
    assert names(plan) == {"wide": "row", "t": "a"}
    assert plan.arena_bytes == 2048


def test_json() -> None:
    c = Chain()
    c.emit("aten.clamp.default", "y", "x", min=float("-inf"), max=1.0)
    document = json.loads(json.dumps(to_json(c.plan("y")), allow_nan=False))
    assert document.pop("graph_digest") == digest_graph(c.graph("y"))
    assert document.pop("values")[2] == {
        "vid": 2,
        "name": "y",
        "role": "output",
        "shape": [16, 16],
        "dtype": "float32",
        "device": "cpu",
        "strides": None,
        "alias_of": None,
        "offset": 0,
        "layout": None,
    }
    f32 = {"shape": [16, 16], "dtype": "float32", "device": "cpu"}
    assert document == {
        "format_version": 3,
        "graph": "chain",
        "inputs": [0],
        "outputs": [2],
        "feed_signature": [{"name": "x", **f32}],
        "feed": [0],
        "arena_bytes": 1024,
        "live_bytes": 1024,
        "calls": [
            {
                "op": 0,
                "kind": "Clamp",
                "kind_id": 1870,
                "attr_schema": "clamp/1:has_min=?,min=n,has_max=?,max=n,order=i[]",
                "attr_blob": "0166000000000000f0ff0166000000000000f03f00000000",
                "attrs": {"has_min": True, "min": "-inf", "has_max": True, "max": 1.0, "order": []},
                "in_vids": [0],
                "out_vids": [2],
                "constraints": {"inplace": {"ints": [0]}},
            }
        ],
    }
