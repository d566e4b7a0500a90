"""onnxruntime's Python fusions as a step: its switches are inner passes, and it needs no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import onnx
import pytest

from passes import PolicyError, Status
from passes.context import PassContext
from passes.external.onnxruntime_graph import OnnxRuntimeFusions
from passes.policy.policy import DESTROYS
from tests.passes.external.transformer_block import feeds, post_norm
from tests.support.onnx_models import attention, biased_attention, detached, merged_attention, model_of
from tests.support.pass_runs import broken, ops, optimized, row, valid

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
