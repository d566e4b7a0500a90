"""onnxruntime's graph optimizations as a step: names out of its log, and only what is at fault left out."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import resources

import numpy as np
import onnx
import pytest

from passes import PolicyError, Status
from passes.context import PassContext
from passes.external.onnxruntime_graph import LEVELS, RULES, OnnxRuntimeFusions, OnnxRuntimeGraph
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


# onnxruntime's Python fusions as a step: its switches are inner passes, and it needs no torch.

STEP = "onnxruntime_fusions"


@pytest.mark.parametrize("make", [attention, biased_attention])
def test_a_plain_block_has_nothing_that_it_knows(make, context: PassContext) -> None:
    for keep in ([], ["qkv"]):
        run = optimized(context, make(), recipe=[STEP], keep=keep)
        assert broken(run) == [(True, None)]
        assert row(run, STEP).status is Status.RAN


@pytest.mark.parametrize("opset", [17])
def test_without_a_policy_it_merges_and_is_named(opset: int, context: PassContext) -> None:
    run = optimized(context, post_norm(opset), recipe=[STEP], feeds=feeds())
    assert broken(run) == [(False, f"{STEP}/enable_attention")]
    assert (ops(run)["Attention"], ops(run)["MatMul"]) == (1, 1)


@pytest.mark.parametrize("opset", [17])
def test_keep_takes_only_the_attention_fusion_out(opset: int, context: PassContext) -> None:
    kept = optimized(context, post_norm(opset), recipe=[STEP], keep=["qkv"], feeds=feeds())
    assert broken(kept) == [(True, f"{STEP}/enable_attention")]
    assert row(kept, f"{STEP}/enable_attention").status is Status.REVERTED
    assert row(kept, STEP).reason == "without enable_attention"
    assert ops(kept)["SkipLayerNormalization"] == 1, "the rest of the step stands"
    by_name = optimized(context, post_norm(opset), recipe=[STEP], skip=["enable_attention"], watch=False, feeds=feeds())
    assert broken(by_name) == [(True, None)]
    assert ops(kept).total() <= ops(by_name).total() + 2


def test_multi_head_attention_leaves_the_projections_apart(context: PassContext) -> None:
    run = optimized(
        context, post_norm(), recipe=[{STEP: {"use_multi_head_attention": True}}], keep=["qkv"], feeds=feeds()
    )
    assert broken(run) == [(True, None)]
    assert (ops(run)["MultiHeadAttention"], ops(run)["MatMul"]) == (1, 4)
    assert valid(run)


def test_what_onnxruntime_has_alone_is_declared(context: PassContext) -> None:
    run = optimized(context, post_norm(), recipe=[STEP], keep=["qkv"], feeds=feeds())
    assert ("com.microsoft", 1) in [(opset.domain, opset.version) for opset in run.model.proto.opset_import]
    assert valid(run)


@pytest.mark.parametrize(
    ("options", "more", "less"),
    [
        ({}, {"enable_attention", "enable_gelu"}, {"enable_gelu_approximation"}),
        ({"enable_gelu": False, "enable_gelu_approximation": True}, {"enable_gelu_approximation"}, {"enable_gelu"}),
        ({"model_type": "unet"}, {"enable_packed_qkv"}, set()),
        ({"model_type": "clip"}, {"enable_packed_kv"}, {"enable_embed_layer_norm"}),
    ],
)
def test_inner_passes_are_the_switches_that_are_on(
    options: dict, more: set[str], less: set[str], context: PassContext
) -> None:
    inner = set(OnnxRuntimeFusions.from_options(options).inner(context))
    assert more <= inner
    assert not less & inner
    assert all(name.startswith("enable_") for name in inner)


def test_every_switch_in_the_table_is_one(context: PassContext) -> None:
    named = {name for name in DESTROYS if name.startswith("enable_")}
    on = OnnxRuntimeFusions("unet", flags={"enable_gelu_approximation": True, "enable_gemm_fast_gelu": True})
    assert named <= set(on.inner(context))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_type": "brt"}, r"no model_type 'brt'; did you mean 'bert'\?"),
        ({"enable_gelo": True}, r"no option 'enable_gelo'; did you mean 'enable_gelu'\?"),
        ({"enable_packed_qkv": True}, r"\(model_type bert\) has no option 'enable_packed_qkv'"),
        ({"enable_gelu": 1}, "enable_gelu is 1; expected true or false"),
        ({"attention_mask_format": "NoMsk"}, r"has no 'NoMsk'; did you mean 'NoMask'\?"),
        ({"num_heads": 2}, "num_heads is 2 and hidden_size 0; expected both"),
        ({"num_heads": 3, "hidden_size": 32}, "with hidden_size a multiple of num_heads"),
        ({"hidden_size": "32"}, "hidden_size is '32'; expected an integer"),
        ({"opt_level": 3}, r"opt_level is 3; expected one of \(0, 1, 2, 99\)"),
    ],
)
def test_what_the_release_does_not_take_is_refused(options: dict, words: str, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=words):
        optimized(context, merged_attention(), recipe=[{STEP: options}])


def test_without_torch_an_opt_level_is_refused(monkeypatch: pytest.MonkeyPatch, context: PassContext) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PolicyError, match=r"opt_level 1 needs torch, an extra: pip install 'onnxline\[torch\]'"):
        optimized(context, merged_attention(), recipe=[{STEP: {"opt_level": 1}}])


def test_an_opt_level_runs_onnxruntime_before(context: PassContext) -> None:
    run = optimized(context, post_norm(), recipe=[{STEP: {"opt_level": 1}}], keep=["qkv"], feeds=feeds())
    assert [kept for kept, _ in broken(run)] == [True]
    assert ops(run)["SkipLayerNormalization"] == 1


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from passes.external.onnxruntime_graph import fuse
fuse(sys.argv[1], sys.argv[2], {"model_type": "bert", "num_heads": 0, "hidden_size": 0, "opt_level": 0, "flags": {}})
"""


def test_it_needs_no_torch(tmp_path) -> None:
    source, target = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(post_norm(), source)
    command: Sequence[str] = [sys.executable, "-c", WITHOUT_TORCH, str(source), str(target)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert "Attention" in [node.op_type for node in onnx.load(target).graph.node]


def test_an_input_that_only_a_branch_reads_stays_an_input(context: PassContext) -> None:
    text = """
    g (bool c, float[2, 3] x, float[2, 3] z) => (float[2, 3] y) {
        one = Identity (z)
        y = If (c) <
            then_branch = t () => (float[2, 3] a) { a = Add (x, one) },
            else_branch = e () => (float[2, 3] b) { b = Relu (one) }
        >
    }
    """
    run = optimized(context, model_of(text), recipe=[STEP])
    assert row(run, STEP).status is Status.RAN
    assert [value.name for value in run.model.proto.graph.input] == ["c", "x", "z"]


def test_without_any_switch_it_fuses_nothing(context: PassContext) -> None:
    step = OnnxRuntimeFusions()
    before = detached(post_norm())
    after = step.without(step.inner(context)).apply(before, context).model
    assert [node.op_type for node in after.proto.graph.node] == [node.op_type for node in before.proto.graph.node]
