"""A node is taken out of the middle where the types still fit."""

from __future__ import annotations

import numpy as np
import onnx
import onnxoptimizer
from hypothesis import given
from hypothesis import strategies as st

from passes.run.narrow import minimal_culprits, primary_culprit
from passes.run.reproduce import bypass_nodes, smallest
from passes.run.tracked import pin, unpin
from passes.structures import STRUCTURES
from passes.weights.detached import DetachedModel
from tests.support.onnx_models import attention, detached, matrix, model_of, op_types

CHAIN = "g (float[2, 3] x) => (float[3, 2] y) { a = Relu (x) b = Transpose <perm = [1, 0]> (a) y = Neg (b) }"


def test_who_read_what_a_node_makes_reads_what_it_read() -> None:
    shorter = [candidate.proto for candidate in bypass_nodes(detached(model_of(CHAIN)))]
    assert [op_types(result) for result in shorter] == [["Transpose", "Neg"], ["Relu", "Neg"], ["Neg"]]
    assert [list(result.graph.node[0].input) for result in shorter] == [["x"]] * 3
    shapes = [[dim.dim_value for dim in result.graph.output[0].type.tensor_type.shape.dim] for result in shorter]
    assert shapes == [[3, 2], [2, 3], [2, 3]], "the output has the type that it now has"
    for result in shorter:
        onnx.checker.check_model(result, full_check=True)


def test_what_does_not_fit_is_not_taken_out() -> None:
    text = "g (float[2, 3] x) => (float[3, 4] y) { b = Transpose <perm = [1, 0]> (x) y = MatMul (b, w) }"
    assert list(bypass_nodes(detached(model_of(text, w=matrix(2, 4, 0))))) == []


def test_two_in_a_row_go_together() -> None:
    """Neither Reshape can go alone, since then the product does not fit."""
    text = """
    g (float[2, 6] x) => (float[2, 6] y) {
        h = Relu (x)
        a = Reshape (h, threes)
        b = Reshape (a, back)
        y = MatMul (b, w)
    }
    """
    shapes = {"threes": np.array([2, 2, 3], np.int64), "back": np.array([2, 6], np.int64)}
    shorter = [candidate.proto for candidate in bypass_nodes(detached(model_of(text, w=matrix(6, 6, 0), **shapes)))]
    assert ["Relu", "MatMul"] in [op_types(result) for result in shorter]
    assert ["Relu", "Reshape", "Reshape", "MatMul"] not in [op_types(result) for result in shorter]


def test_what_is_left_is_as_small_as_what_is_asked_allows() -> None:
    """Relu has to be read by Neg: the nodes between them go, and those around."""
    text = (
        "g (float[4] x) => (float[4] y) { a = Abs (x) b = Relu (a) c = Ceil (b) d = Floor (c) e = Neg (d) y = Sin (e) }"
    )
    model = detached(model_of(text))

    def is_read(candidate: DetachedModel) -> bool:
        ops_by_value = {name: node.op_type for node in candidate.proto.graph.node for name in node.output}
        return any(
            node.op_type == "Sin" and ops_by_value.get(node.input[0]) == "Relu" for node in candidate.proto.graph.node
        )

    assert not is_read(model)
    whole = smallest(model, lambda candidate: {"Relu", "Sin"} <= set(op_types(candidate.proto)))
    assert op_types(whole.proto) == ["Relu", "Sin"] and not is_read(whole), "apart from each other"

    def is_behind(candidate: DetachedModel) -> bool:
        by_name = {name: node for node in candidate.proto.graph.node for name in node.output}
        node = next((node for node in candidate.proto.graph.node if node.op_type == "Sin"), None)
        while node is not None and node.op_type != "Relu":
            node = by_name.get(node.input[0])
        return node is not None

    chain = smallest(model, is_behind)
    assert op_types(chain.proto) == ["Relu", "Ceil", "Floor", "Neg", "Sin"]
    short = smallest(model, is_behind, shorten=True)
    assert op_types(short.proto) == ["Relu", "Sin"] and is_read(short)


# Narrowing finds a smallest guilty set, in few runs.

NAMES = [f"p{i}" for i in range(40)]


@given(st.sets(st.sampled_from(NAMES), min_size=1, max_size=4), st.sets(st.sampled_from(NAMES), max_size=4))
def test_finds_exactly_the_guilty(guilty: set[str], suspects: set[str]) -> None:
    runs: list[tuple[str, ...]] = []

    def is_good(names: tuple[str, ...]) -> bool:
        runs.append(names)
        return guilty <= set(names)

    assert set(minimal_culprits(NAMES, sorted(suspects), is_good) or ()) == guilty
    assert len(runs) <= 2 * len(suspects) * 3 + 4 + 4 * len(guilty) * 7


def test_a_suspect_that_is_guilty_costs_one_run() -> None:
    runs = []
    assert minimal_culprits(NAMES, ["p3"], lambda names: runs.append(names) or "p3" in names) == ("p3",)
    assert runs == [("p3",)]


def test_a_step_that_is_wrong_by_itself_has_no_guilty_part() -> None:
    assert minimal_culprits(NAMES, ["p1"], lambda names: False) is None


def test_a_suspect_that_this_release_lacks_is_not_asked() -> None:
    asked: list[tuple[str, ...]] = []
    assert minimal_culprits(["a", "b"], ["gone"], lambda names: asked.append(names) or "b" in names) == ("b",)
    assert ("gone",) not in asked


def test_of_several_culprits_the_one_that_made_the_change_is_named() -> None:
    """Without the others the result is the same, so they did nothing."""
    assert primary_culprit(("a", "b", "c"), lambda left_out: "b" not in left_out) == "b"
    assert primary_culprit(("a", "b"), lambda left_out: False) == "a", "they need each other"
    assert primary_culprit(("a",), lambda left_out: True) == "a", "there is no other to leave out"


# Pins: visible across a pass, and gone without a trace.


def test_a_pin_holds_a_value_against_a_fusion() -> None:
    model = detached(attention())
    (instance,) = STRUCTURES["qkv"].find(model).instances
    pinned = pin(model, [site.tight for site in instance.pins])
    assert [output.name for output in pinned.proto.graph.output] == ["y", "q", "k", "v"]
    assert [output.name for output in model.proto.graph.output] == ["y"], "the model itself is left as it is"

    merged = onnxoptimizer.optimize(model.proto, ["fuse_qkv"])
    held = unpin(model.with_proto(onnxoptimizer.optimize(pinned.proto, ["fuse_qkv"])), ["y"])

    assert sum(node.op_type == "Split" for node in merged.graph.node) == 1
    assert sum(node.op_type == "Split" for node in held.proto.graph.node) == 0
    assert [output.name for output in held.proto.graph.output] == ["y"]


def test_a_pin_of_a_value_that_is_gone_is_left_out() -> None:
    model = detached(model_of("g (float[2] x) => (float[2] y) { y = Neg (x) }"))
    gone = onnx.helper.make_tensor_value_info("gone", 1, [2])
    assert [output.name for output in pin(model, [gone]).proto.graph.output] == ["y"]


def test_what_lived_for_a_pin_goes_with_it_and_other_dead_code_stays() -> None:
    text = "g (float[2] x) => (float[2] y) { y = Neg (x) a = Abs (x) held = Relu (a) dead = Tanh (x) }"
    model = detached(model_of(text))
    held = onnx.helper.make_tensor_value_info("held", 1, [2])
    after = unpin(pin(model, [held]), ["y"])
    assert [node.output[0] for node in after.proto.graph.node] == ["y", "dead"]


TYPED = """
g (float[2] x) => (float[2] y) <float[2] held, float[2] other> {
    held = Neg (x)
    other = Abs (held)
    y = Relu (other)
}
"""


def test_a_pinned_value_has_one_type() -> None:
    """With one among the inner values too, a model comes out of a pass other than it went in."""
    pinned = pin(detached(model_of(TYPED)), [onnx.helper.make_tensor_value_info("held", 1, [2])])
    assert [info.name for info in pinned.proto.graph.value_info] == ["other"]
    after = unpin(pinned, ["y"])
    assert sorted(info.name for info in after.proto.graph.value_info) == ["held", "other"]
