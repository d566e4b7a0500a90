"""onnxruntime's graph optimizations as a step: names out of its log, and only what is at fault left out."""

from __future__ import annotations

from collections import Counter
from importlib import resources

import numpy as np
import pytest

from passes import PolicyError, Status
from passes.context import PassContext
from passes.external.onnxruntime_graph import LEVELS, RULES, OnnxRuntimeGraph
from passes.policy.policy import DESTROYS
from tests.passes.external.transformer_block import feeds, post_norm
from tests.support.onnx_models import attention, biased_attention, detached, merged_attention, model_of
from tests.support.pass_runs import broken, ops, optimized, row, valid

OLD = {"onnxruntime": {"disabled_optimizers": ["MatMulAddFusion"]}}
"""Otherwise Gemm is made of MatMul and Add before LayerNormalization, and so attention, is found."""


@pytest.mark.parametrize("make", [attention, biased_attention])
def test_keeps_the_projections_at_two_nodes_at_most(make, context: PassContext) -> None:
    free = optimized(context, make(), recipe=["onnxruntime"])
    kept = optimized(context, make(), recipe=["onnxruntime"], keep=["qkv"])
    assert broken(free) == broken(kept) == [(True, None)], "there is no LayerNormalization, so it sees no attention"
    assert row(kept, "onnxruntime").changed
    assert ops(kept).total() <= ops(free).total() + 2
    assert valid(kept)


def test_an_operator_that_the_opset_does_not_have_is_not_let_in(context: PassContext) -> None:
    """At opset 12 onnxruntime writes LayerNormalization, which ONNX has from 17 on, and then merges Q, K and V."""
    before = detached(post_norm(opset=12))
    merged = OnnxRuntimeGraph(disabled_optimizers=("MatMulAddFusion",)).apply(before, context).model
    assert "Attention" in [node.op_type for node in merged.proto.graph.node]
    run = optimized(context, post_norm(opset=12), recipe=[OLD], feeds=feeds())
    guilty = row(run, "onnxruntime/LayerNormFusionL2")
    assert guilty.status is Status.REVERTED
    assert "not valid ONNX" in guilty.reason or "qkv" in guilty.reason
    assert [kept for kept, _ in broken(run)] == [True]
    assert row(run, "onnxruntime").changed, "the rest of the step stands"
    assert valid(run)


def test_keep_costs_nothing_more_than_to_skip_it_by_name(context: PassContext) -> None:
    kept = optimized(context, post_norm(opset=17), recipe=[OLD], keep=["qkv"], feeds=feeds())
    by_name = optimized(
        context, post_norm(opset=17), recipe=[OLD], skip=["AttentionFusion"], watch=False, feeds=feeds()
    )
    assert [kept for kept, _ in broken(kept)] == [kept for kept, _ in broken(by_name)] == [True]
    assert ops(kept).total() <= ops(by_name).total() + 2


def test_inner_passes_grow_with_the_level(context: PassContext) -> None:
    names = {level: set(OnnxRuntimeGraph(level).inner(context)) for level in LEVELS}
    assert names["basic"] < names["extended"] < names["layout"] <= names["all"]
    assert {"ConstantFolding", "EliminateIdentity", "Level1_RuleBasedTransformer"} < names["basic"]
    assert "AttentionFusion" in names["extended"] - names["basic"]
    assert "NchwcTransformer" in names["layout"] - names["extended"], "what is for this machine has to be asked for"


def test_nothing_is_laid_out_for_this_machine_unasked(context: PassContext) -> None:
    text = "g (float[1, 2, 6, 6] x) => (float[1, 3, 4, 4] y) { c = Conv (x, w) y = Relu (c) }"
    weight = np.random.default_rng(0).standard_normal((3, 2, 3, 3)).astype(np.float32)
    run = optimized(context, model_of(text, w=weight), recipe=["onnxruntime"])
    assert [(node.domain, node.op_type) for node in run.model.proto.graph.node] == [("com.microsoft", "FusedConv")]


def test_what_runs_all_the_same_is_no_inner_pass(context: PassContext) -> None:
    assert "CastFloat16Transformer" not in OnnxRuntimeGraph("all").inner(context)


def test_without_any_inner_pass_it_changes_nothing(context: PassContext) -> None:
    step = OnnxRuntimeGraph()
    before = detached(attention())
    after = step.without(step.inner(context)).apply(before, context).model
    had, has = (Counter(node.op_type for node in model.proto.graph.node) for model in (before, after))
    assert has == had - Counter(Constant=had["Constant"]), "those it holds as initializers"
    assert [(opset.domain, opset.version) for opset in after.proto.opset_import] == [("", 20)]


def test_every_rule_is_known_to_the_installed_release() -> None:
    """The names are ours to know, since no release tells them; a native library holds them as text."""
    [library] = [path for path in (resources.files("onnxruntime") / "capi").iterdir() if "pybind11_state" in path.name]
    code = library.read_bytes()
    assert [rule for rules in RULES.values() for rule in rules if f"{rule}\0".encode() not in code] == []


RULE_PICTURES = {
    "EliminateIdentity": ("i = Identity (x) y = Relu (i)", "Identity"),
    "EliminateDropout": ("i = Dropout (x) y = Relu (i)", "Dropout"),
    "NoopElimination": ("a = Relu (x) i = Add (a, zero) y = Relu (i)", "Add"),
    "FuseReluClip": ("i = Relu (x) y = Clip (i, zero, one)", "Relu"),
    "CastElimination": ("i = Cast <to = 1> (x) y = Relu (i)", "Cast"),
    "DivMulFusion": ("i = Div (one, x) y = Mul (x, i)", "Mul"),
}


@pytest.mark.parametrize("rule", RULE_PICTURES)
def test_a_rule_can_be_left_out(rule: str, context: PassContext) -> None:
    body, op = RULE_PICTURES[rule]
    model = model_of(f"g (float[2, 3] x) => (float[2, 3] y) {{ {body} }}", zero=np.float32(0), one=np.float32(1))
    assert ops(optimized(context, model, recipe=["onnxruntime"]))[op] == 0
    assert ops(optimized(context, model, recipe=["onnxruntime"], skip=[f"onnxruntime/{rule}"]))[op] == 1


def test_weights_go_through_a_file_bit_for_bit(context: PassContext) -> None:
    before = detached(merged_attention())
    after = OnnxRuntimeGraph("basic").apply(before, context).model
    [actual] = [tensor for tensor in after.proto.graph.initializer if tensor.name == "w"]
    [had] = [tensor for tensor in before.proto.graph.initializer if tensor.name == "w"]
    assert after.digest(actual) == before.digest(had)


def test_only_the_domains_in_use_are_declared(context: PassContext) -> None:
    run = optimized(context, attention(), recipe=["onnxruntime"])
    assert ops(run)["FusedMatMul"] == 1
    assert {opset.domain for opset in run.model.proto.opset_import} == {"", "com.microsoft"}


def test_a_domain_inside_of_a_branch_counts(context: PassContext) -> None:
    text = """
    g (bool c, float[2, 3] x, float[2, 3] z) => (float[2, 3] y) {
        y = If (c) <
            then_branch = t () => (float[2, 3] a) {
                turned = Transpose <perm = [1, 0]> (z)
                p = MatMul (x, turned)
                a = MatMul (p, z)
            },
            else_branch = e () => (float[2, 3] b) { b = Relu (x) }
        >
    }
    """
    run = optimized(context, model_of(text), recipe=["onnxruntime"])
    assert row(run, "onnxruntime").changed
    assert "com.microsoft" in {opset.domain for opset in run.model.proto.opset_import}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"level": "extendd"}, r"no optimization level 'extendd'; did you mean 'extended'\?"),
        ({"level": 2}, "no optimization level 2; it has: basic, extended, layout, all"),
        ({"disabled_optimizers": ["AttentionFusin"]}, r"did you mean 'AttentionFusion'\?"),
        ({"disabled_optimizers": "AttentionFusion"}, "expected a list of names"),
        ({"level": "basic", "disabled_optimizers": ["AttentionFusion"]}, "at level basic has no 'AttentionFusion'"),
        ({"lvel": "basic"}, r"no option 'lvel'; did you mean 'level'\?"),
        ({"left_out": []}, "no option 'left_out'; it has: level, disabled_optimizers"),
    ],
)
def test_what_it_would_ignore_is_refused(options: dict, words: str, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=words):
        optimized(context, merged_attention(), recipe=[{"onnxruntime": options}])


def test_suspects_are_inner_passes(context: PassContext) -> None:
    """A name in the table that no release has would never be found at fault."""
    ours = [name for name in DESTROYS if name.endswith(("Fusion", "FusionL1", "FusionL2", "Elimination"))]
    known = set(OnnxRuntimeGraph("all").inner(context))
    assert ours
    assert [name for name in ours if name not in known] == []


def test_the_result_is_onnx(context: PassContext) -> None:
    run = optimized(context, post_norm(opset=17), recipe=["onnxruntime"], keep=["qkv"], feeds=feeds())
    assert valid(run)
    assert any(node.domain == "com.microsoft" for node in run.model.proto.graph.node)
