"""What is known of a node stays known when a pass drops it: a picture of each case."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto

from passes.provenance import AUTHOR_KEY, CHANGED_KEY, COUNT_KEY, REPLACED_KEY, annotations_of, module_path_of
from tests.support.annotated_models import (
    CLASSES_KEY,
    SCOPES_KEY,
    annotate_modules,
    authors,
    carry_annotations,
    every_node,
    modules,
    node_of,
)
from tests.support.onnx_models import matrix, model_of

CHAIN = """
g (float[2, 4] x) => (float[2, 4] y) {
    [first] a = Relu (x)
    [second] b = Tanh (a)
    [third] y = Relu (b)
}
"""


def test_what_a_pass_drops_comes_back() -> None:
    before = annotate_modules(model_of(CHAIN), first="encoder", second="encoder", third="head")
    before.graph.node[1].doc_string = "as in the paper"
    before.metadata_props.add(key="author", value="somebody")
    before.graph.quantization_annotation.add(tensor_name="a")
    after = model_of("g (float[2, 4] x) => (float[2, 4] y) { a = Relu (x) q7 = Tanh (a) y = Relu (q7) }")
    result = carry_annotations(before, after)
    assert modules(result) == {"first": "encoder", "second": "encoder", "third": "head"}
    assert authors(result) == {"first": "", "second": "", "third": ""}
    assert result.graph.node[1].doc_string == "as in the paper"
    assert not result.graph.node[0].HasField("doc_string"), "there was none"
    assert [entry.key for entry in result.metadata_props] == ["author"]
    assert [annotation.tensor_name for annotation in result.graph.quantization_annotation] == ["a"]


LINEAR = """
g (float[2, 8] x) => (float[2, 8] y) {
    [relu] a = Relu (x)
    [product] p = MatMul (a, w)
    [sum] s = Add (p, b)
    [tanh] y = Tanh (s)
}
"""
FUSED = "g (float[2, 8] x) => (float[2, 8] y) { a = Relu (x) fresh = Gemm (a, w, b) y = Tanh (fresh) }"
WEIGHTS = {"w": matrix(8, 8, 0), "b": matrix(2, 8, 1)}


def linear(**paths: str) -> ModelProto:
    known = {"relu": "act", "product": "block.linear", "sum": "block.linear", "tanh": "block.gate"}
    return annotate_modules(model_of(LINEAR, **WEIGHTS), **{**known, **paths})


def test_a_made_node_names_its_pass_and_what_it_stands_for() -> None:
    result = carry_annotations(linear(), model_of(FUSED, **WEIGHTS), "fuse_linear")
    gemm = result.graph.node[1]
    marks = annotations_of(gemm)
    assert (marks.author, marks.replaced, marks.count) == ("fuse_linear", ("product", "sum"), 2)
    place = module_path_of(gemm)
    assert place is not None
    assert place.paths == ("", "block", "block.linear")
    assert place.classes == ("Net", "Block", "Linear")
    assert place.frames == ('File "net.py", line 3, in forward\n    self.top(x)',), "the frames that both share"
    assert authors(result) == {"relu": "", "": "fuse_linear", "tanh": ""}


def test_the_module_of_a_made_node_holds_all_that_it_stands_for() -> None:
    result = carry_annotations(linear(sum="block.bias"), model_of(FUSED, **WEIGHTS))
    assert modules(result)[""] == "block"


def test_a_merged_projection_belongs_to_the_attention() -> None:
    before = annotate_modules(
        model_of(
            """
            g (float[2, 8] x) => (float[2, 8] y) {
                [h] h = Relu (x)
                [q] q = MatMul (h, wq)
                [k] k = MatMul (h, wk)
                [v] v = MatMul (h, wv)
                [mix] m = Sum (q, k, v)
                [out] y = MatMul (m, wo)
            }
            """,
            **{name: matrix(8, 8, seed) for seed, name in enumerate(("wq", "wk", "wv", "wo"))},
        ),
        **{"h": "norm", "q": "attn.q", "k": "attn.k", "v": "attn.v", "mix": "attn", "out": "attn.out"},
    )
    after = model_of(
        """
        g (float[2, 8] x) => (float[2, 8] y) {
            h = Relu (x)
            qkv = MatMul (h, wqkv)
            q1, k1, v1 = Split <axis = -1, num_outputs = 3> (qkv)
            m = Sum (q1, k1, v1)
            y = MatMul (m, wo)
        }
        """,
        wqkv=np.concatenate([matrix(8, 8, seed) for seed in range(3)], axis=1),
        wo=matrix(8, 8, 3),
    )
    result = carry_annotations(before, after, "fuse_qkv")
    product, split = result.graph.node[1:3]
    assert [annotations_of(node).replaced for node in (product, split)] == [("q", "k", "v")] * 2
    assert [module_path_of(node).paths[-1] for node in (product, split)] == ["attn", "attn"]  # type: ignore[union-attr]
    assert modules(result)["out"] == "attn.out"


def test_a_node_between_others_belongs_to_the_module_of_its_neighbours() -> None:
    after = model_of(
        """
        g (float[2, 8] x) => (float[2, 8] y) {
            a = Relu (x) p = MatMul (a, w) s = Add (p, b)
            half = Cast <to = 10> (s)
            full = Cast <to = 1> (half)
            y = Tanh (full)
        }
        """,
        **WEIGHTS,
    )
    result = carry_annotations(linear(), after, "insert_casts")
    casts = [node for node in result.graph.node if node.op_type == "Cast"]
    assert [annotations_of(node) for node in casts] == [passes_marks("insert_casts")] * 2
    assert [module_path_of(node).paths[-1] for node in casts] == ["block", "block"]  # type: ignore[union-attr]
    assert modules(result)["tanh"] == "block.gate"


def passes_marks(author: str) -> Any:
    node = NodeProto()
    node.metadata_props.add(key=AUTHOR_KEY, value=author)
    return annotations_of(node)


def test_what_a_tool_copied_counts_more_than_neighbours() -> None:
    after = model_of("g (float[2, 4] x) => (float[2, 4] y) { a = Relu (x) b = Tanh (a) [n] c = Abs (b) y = Relu (c) }")
    before = annotate_modules(model_of(CHAIN), first="encoder", second="encoder", third="encoder")
    assert modules(carry_annotations(before, after))["n"] == "encoder"
    assert modules(carry_annotations(before, annotate_modules(after, n="encoder.deep")))["n"] == "encoder.deep"


def test_with_nothing_known_around_it_a_new_node_belongs_to_the_model() -> None:
    before = annotate_modules(model_of(CHAIN), first="encoder")
    after = model_of("g (float[2, 4] x) => (float[2, 4] y) { a = Relu (x) y = Softsign (a) }")
    before.graph.node[0].output[0], before.graph.node[1].input[0] = "z", "x"
    after.graph.node[0].output[0], after.graph.node[1].input[0] = "z", "x"
    place = module_path_of(carry_annotations(before, after).graph.node[1])
    assert place is not None
    assert (place.paths, place.classes) == (("",), ("Net",))


FUNCTION = """
<ir_version: 9, opset_import: ["": 20, "own": 1]>
g (float[2, 4] x) => (float[2, 4] y) { [call] y = own.twice (x) }
<domain: "own", opset_import: ["": 20]>
twice (x) => (y) { [inner] a = Tanh (x) y = Add (a, a) }
"""


def test_nodes_of_local_functions_are_carried_too() -> None:
    before, after = (
        onnx.parser.parse_model(FUNCTION),
        onnx.parser.parse_model(FUNCTION.replace("Add (a, a)", "Neg (a)")),
    )
    before.functions[0].node[0].metadata_props.add(key=SCOPES_KEY, value="['', 'deep', 'tanh']")
    after.functions[0].node[0].name = ""
    inner, last = carry_annotations(before, after).functions[0].node
    assert (inner.name, module_path_of(inner).paths[-1]) == ("inner", "deep")  # type: ignore[union-attr]
    assert annotations_of(last).author == "some_pass"


def test_without_torch_metadata_authors_are_known_and_modules_are_not() -> None:
    result = carry_annotations(model_of(LINEAR, **WEIGHTS), model_of(FUSED, **WEIGHTS), "fuse_linear")
    assert authors(result)[""] == "fuse_linear"
    assert {entry.key for node in result.graph.node for entry in node.metadata_props} == {AUTHOR_KEY, REPLACED_KEY}


def test_an_author_stays_until_another_pass_replaces_the_node() -> None:
    first = carry_annotations(linear(), model_of(FUSED, **WEIGHTS), "fuse_linear")
    stripped = onnx.ModelProto()
    stripped.CopyFrom(first)
    for node in stripped.graph.node:
        del node.metadata_props[:]
    second = carry_annotations(first, stripped, "nop")
    assert [list(node.metadata_props) for node in second.graph.node] == [
        list(node.metadata_props) for node in first.graph.node
    ]
    apart = model_of(
        "g (float[2, 8] x) => (float[2, 8] y) { a = Relu (x) f = FusedGemm (a, w, b) y = Identity (f) }", **WEIGHTS
    )
    third = carry_annotations(second, apart, "fuse_tanh")
    marks = annotations_of(third.graph.node[1])
    assert (marks.author, marks.replaced) == ("fuse_tanh", ("product", "sum", "tanh")), "named by the source's nodes"


def test_of_many_replaced_nodes_the_first_are_named() -> None:
    steps = "".join(f"[n{i}] v{i + 1} = {'Relu' if i % 2 else 'Tanh'} (v{i}) " for i in range(12))
    before = annotate_modules(
        model_of(f"g (float[4] v0) => (float[4] v12) {{ {steps} }}"), **{f"n{i}": "body" for i in range(12)}
    )
    result = carry_annotations(before, model_of("g (float[4] v0) => (float[4] v12) { v12 = Selu (v0) }"))
    (node,) = result.graph.node
    known = {entry.key: entry.value for entry in node.metadata_props}
    assert json.loads(known[REPLACED_KEY]) == [f"n{i}" for i in range(8)]
    assert known[COUNT_KEY] == "12"
    assert annotations_of(node).count == 12


def test_a_pass_that_changes_a_node_in_place_is_written_on_it() -> None:
    text = "g (float[2, 3, 4] x) => (float[4, 3, 2] y) {{ [turn] y = Transpose <perm = {0}> (x) [end] z = Relu (y) }}"
    before = annotate_modules(model_of(text.format("[2, 1, 0]")), turn="head", end="head")
    after = model_of(text.format("[0, 1, 2]"))
    result = carry_annotations(before, after, "turn_back")
    turn, end = result.graph.node
    assert (annotations_of(turn).author, annotations_of(turn).changed_by) == ("", ("turn_back",))
    assert modules(result)["turn"] == "head"
    assert CHANGED_KEY not in {entry.key for entry in end.metadata_props}
    again = carry_annotations(result, model_of(text.format("[1, 0, 2]")), "turn_again")
    assert annotations_of(again.graph.node[0]).changed_by == ("turn_back", "turn_again")


def test_an_input_that_a_pass_adds_is_a_change_of_the_node() -> None:
    text = "g (float[2] x) => (float[2] y) {{ [clip] a = Clip ({0}) [end] y = Neg (a) }}"
    bounds = {"low": np.float32(0), "high": np.float32(6)}
    before = annotate_modules(model_of(text.format("x, low"), **bounds), clip="head", end="head")
    clip, end = carry_annotations(before, model_of(text.format("x, low, high"), **bounds), "close").graph.node
    assert (annotations_of(clip).changed_by, annotations_of(end).changed_by) == (("close",), ())


def test_a_name_that_a_tool_gave_to_another_node_goes_back() -> None:
    before = annotate_modules(model_of(CHAIN), first="encoder", second="encoder", third="head")
    after = model_of(
        """
        g (float[2, 4] x) => (float[2, 4] y) {
            [third] a = Relu (x)
            [second] n = Neg (a)
            [Tanh_0] m = Neg (n)
            [first] b = Tanh (m)
            [new] y = Relu (b)
        }
        """
    )
    result = carry_annotations(before, after, "negate_twice")
    assert [node.name for node in result.graph.node] == ["first", "second_2", "Tanh_0", "second", "third"]
    assert [annotations_of(node).author for node in result.graph.node] == ["", "negate_twice", "negate_twice", "", ""]
    assert modules(result)["third"] == "head"


def test_nodes_without_names_stay_without() -> None:
    before = model_of("g (float[4] x) => (float[4] y) { a = Relu (x) y = Tanh (a) }")
    result = carry_annotations(
        before, model_of("g (float[4] x) => (float[4] y) { [Relu_0] b = Relu (x) y = Tanh (b) }")
    )
    assert [node.name for node in result.graph.node] == ["Relu_0", ""]


BRANCHES = """
g (bool[1] c, float[2, 4] x) => (float[2, 4] y) {
    [gate] h = Relu (x)
    [if] y = If (c) <
        then_branch = t () => (float[2, 4] r) { [up] r = Exp (h) },
        else_branch = e () => (float[2, 4] r) { [mid] s = Tanh (h) [down] r = Neg (s) }
    >
}
"""


def test_nodes_inside_of_branches_are_carried_too() -> None:
    before = annotate_modules(
        model_of(BRANCHES), **{"gate": "gate", "if": "", "up": "up", "mid": "down.mid", "down": "down"}
    )
    after = model_of(BRANCHES.replace("[mid] s = Tanh (h) [down] r = Neg (s)", "s = Softsign (h) [x] r = Neg (s)"))
    for node in every_node(after.graph):
        node.name = ""
    result = carry_annotations(before, after, "soften")
    assert modules(result) == {"gate": "gate", "if": "", "up": "up", "": "down.mid", "down": "down"}
    assert annotations_of(node_of(result, "")).replaced == ("mid",)


def test_a_branch_that_takes_the_place_of_its_if() -> None:
    before = annotate_modules(
        model_of(BRANCHES), **{"gate": "gate", "if": "", "up": "up", "mid": "down.mid", "down": "down"}
    )
    after = model_of("g (bool[1] c, float[2, 4] x) => (float[2, 4] y) { h = Relu (x) s = Tanh (h) y = Neg (s) }")
    result = carry_annotations(before, after)
    assert modules(result) == {"gate": "gate", "mid": "down.mid", "down": "down"}
    assert set(authors(result).values()) == {""}


def test_metadata_of_somebody_else_does_no_harm() -> None:
    before = linear()
    for node, text in zip(before.graph.node, ["no list", "[", "{}", "7"], strict=True):
        for key in (SCOPES_KEY, CLASSES_KEY, REPLACED_KEY, CHANGED_KEY, COUNT_KEY, AUTHOR_KEY):
            node.metadata_props.add(key=key, value=text)
        del node.metadata_props[:3]
    result = carry_annotations(before, model_of(FUSED, **WEIGHTS), "fuse_linear")
    assert authors(result)[""] == "fuse_linear"
    assert annotations_of(result.graph.node[1]).replaced == ()
