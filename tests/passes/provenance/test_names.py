"""Names are an API: a map from old to new over a run, inputs and outputs that stay, and names pinned for two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import pytest

import passes
from passes.context import PassContext
from passes.provenance.annotations import NameMap, map_names
from passes.recipe.recipe import RecipeItem
from tests.support.onnx_models import model_of, square
from tests.support.onnx_text import lines_of, merged_model

MERGED = """g (float[2, 8, 32] x) => (float[2, 4, 8, 8] y)
    <float[32, 96] attn.c_attn.weight, float[96] attn.c_attn.bias> {
    product = MatMul (x, attn.c_attn.weight)
    sum = Add (product, attn.c_attn.bias)
    qw, kw, vw = Split <axis = 2> (sum, #[32, 32, 32])
    qh = Reshape (qw, #[2, 8, 4, 8])
    q = Transpose <perm = [0, 2, 1, 3]> (qh)
    kh = Reshape (kw, #[2, 8, 4, 8])
    k = Transpose <perm = [0, 2, 3, 1]> (kh)
    vh = Reshape (vw, #[2, 8, 4, 8])
    v = Transpose <perm = [0, 2, 1, 3]> (vh)
    s = MatMul (q, k)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}"""


def named(model: onnx.ModelProto) -> onnx.ModelProto:
    for node in model.graph.node:
        node.name = f"/{node.output[0]}"
    return model


def optimize(model: onnx.ModelProto, recipe: Sequence[RecipeItem], context: PassContext) -> onnx.ModelProto:
    run = passes.optimize(model, recipe, context=context)
    assert all(row.status.value == "ran" for row in run.rows)
    assert any(row.changed for row in run.rows)
    return run.to_proto()


def test_a_split_weight_has_three_names_and_its_nodes_those_of_what_took_their_place(context: PassContext) -> None:
    model = named(merged_model(MERGED))
    names = map_names(model, optimize(model, ["split-qkv"], context))
    together = ("/product.q", "/sum.q", "/product.k", "/sum.k", "/product.v", "/sum.v")
    assert names == NameMap(
        nodes={"/product": together, "/sum": together, "/qw": together},
        values={"product": (), "sum": ()},
        weights={
            "attn.c_attn.weight": ("attn.c_attn.q.weight", "attn.c_attn.k.weight", "attn.c_attn.v.weight"),
            "attn.c_attn.bias": ("attn.c_attn.q.bias", "attn.c_attn.k.bias", "attn.c_attn.v.bias"),
        },
    )


def test_a_folded_node_goes_and_what_takes_its_value_keeps_the_name(context: PassContext) -> None:
    text = """g (float[4, 32] x) => (float[4, 32] y) {
        turned = Transpose <perm = [1, 0]> (w)
        a = MatMul (x, turned)
        same = Identity (a)
        y = MatMul (same, v)
    }"""
    model = named(model_of(text, **square("w", "v")))
    names = map_names(model, optimize(model, ["fold_constants", "eliminate_identity"], context))
    assert names.nodes == {"/turned": (), "/same": ()}
    assert names.values == {"turned": (), "same": ()}
    assert names.weights == {"w": ("w_transposed",)}


def test_a_model_that_stays_has_an_empty_map() -> None:
    model = merged_model(MERGED)
    assert map_names(model, model) == NameMap()


def test_a_value_that_a_library_renames_is_found_by_its_node() -> None:
    model = named(model_of("g (float[4] x) => (float[4] y) { a = Relu (x) b = Tanh (a) y = Exp (b) }"))
    after = onnx.ModelProto()
    after.CopyFrom(model)
    after.graph.node[0].output[0] = after.graph.node[1].input[0] = "a_renamed"
    assert map_names(model, after) == NameMap(values={"a": ("a_renamed",)})


@pytest.mark.parametrize("name", ["rename_input_output"])
def test_a_library_that_renames_inputs_is_refused(name: str, context: PassContext) -> None:
    model = model_of("g (float[4] first) => (float[4] last) { a = Relu (first) last = Tanh (a) }")
    run = passes.optimize(model, [name], context=context)
    [row] = run.rows
    assert row.status.value == "failed"
    assert row.reason.startswith("changes the model's inputs from ['first'] to [")
    graph = run.to_proto().graph
    assert ([info.name for info in graph.input], [info.name for info in graph.output]) == (["first"], ["last"])


PACKED = """g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[32, 96] w, float[96] b, float[32] scale> {
    n = LayerNormalization <axis = -1> (x, scale)
    y = com.microsoft.Attention <num_heads = 4> (n, w, b)
}"""

PINNED: Mapping[str, tuple[str, Sequence[RecipeItem], str]] = {
    "merged attention, split": (
        MERGED,
        ["split-qkv", "fold_constants"],
        """
        /product.q: product.q
        /sum.q: qw
        /product.k: product.k
        /sum.k: kw
        /product.v: product.v
        /sum.v: vw
        /qh: qh
        /q: q
        /kh: kh
        /k: k
        /vh: vh
        /v: v
        /s: s
        /p: p
        /y: y
        n__2_8_4_8__1
        n__2_8_4_8__2
        n__2_8_4_8__3
        attn.c_attn.q.weight
        attn.c_attn.q.bias
        attn.c_attn.k.weight
        attn.c_attn.k.bias
        attn.c_attn.v.weight
        attn.c_attn.v.bias""",
    ),
    "a packed operator after a norm, taken apart and smoothed": (
        PACKED,
        ["split-qkv", "decompose-attention", "smooth-quant"],
        """
        /n: n
        /y.matmul.q: y.qkv_product.q
        /y.add.q: y.q
        /y.matmul.k: y.qkv_product.k
        /y.add.k: y.k
        /y.matmul.v: y.qkv_product.v
        /y.add.v: y.v
        /y/query_split: /y/query_split
        /y/query: /y/query
        /y/value_split: /y/value_split
        /y/value: /y/value
        /y/key_split: /y/key_split
        /y/key_transposed: /y/key_transposed
        /y/scores: /y/scores
        /y/scaled: /y/scaled
        /y/probabilities: /y/probabilities
        /y/mixed: /y/mixed
        /y/merged: /y/merged
        /y/output: y
        b.q
        b.k
        b.v
        /y/query_shape
        /y/scale
        /y/output_shape
        scale
        w.q_folded
        w.k_folded
        w.v_folded""",
    ),
}


@pytest.mark.parametrize("case", PINNED)
def test_names_are_those_of_earlier_releases(case: str, context: PassContext) -> None:
    """Whoever has encodings or rules by name relies on them: a change here is a breaking change."""
    text, recipe, expected = PINNED[case]
    graph = optimize(named(merged_model(text)), recipe, context).graph
    lines = [f"{node.name}: {', '.join(node.output)}" for node in graph.node]
    lines += [tensor.name for tensor in graph.initializer]
    assert lines == lines_of(expected)
