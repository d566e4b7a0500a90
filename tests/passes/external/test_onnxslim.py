"""onnxslim as a step: its fusions are inner passes, and what it ignores in silence is refused."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import pytest

from passes import PolicyError, Status
from passes.context import PassContext
from passes.external.onnxslim import OnnxSlim
from tests.support.onnx_models import attention, biased_attention, detached, matrix, merged_attention, model_of
from tests.support.pass_runs import broken, ops, optimized, row, valid

CONV_BN = """
g (float[1, 2, 6, 6] x) => (float[1, 3, 4, 4] y) {
    c = Conv (x, w)
    n = BatchNormalization (c, scale, bias, mean, var)
    y = Relu (n)
}
"""


def conv_bn() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    vectors = {name: random.uniform(0.5, 1.5, 3).astype(np.float32) for name in ("scale", "bias", "mean", "var")}
    return model_of(CONV_BN, w=random.standard_normal((3, 2, 3, 3)).astype(np.float32), **vectors)


@pytest.mark.parametrize("make", [attention, biased_attention])
def test_keeps_the_projections_at_two_nodes_at_most(make, context: PassContext) -> None:
    free = optimized(context, make(), recipe=["onnxslim"])
    kept = optimized(context, make(), recipe=["onnxslim"], keep=["qkv"])
    assert broken(free) == broken(kept) == [(True, None)], "it has no pass that merges Q, K and V"
    assert row(kept, "onnxslim").changed
    assert ops(kept).total() <= ops(free).total() + 2
    assert valid(kept)


def test_a_second_time_nothing_changes(context: PassContext) -> None:
    run = optimized(context, biased_attention(), recipe=["onnxslim", "onnxslim"])
    assert [row.changed for row in run.rows] == [True, False]


def test_a_pattern_that_is_skipped_does_not_run(context: PassContext) -> None:
    run = optimized(context, conv_bn(), recipe=["onnxslim"])
    assert ops(run) == {"Conv": 1, "Relu": 1}
    run = optimized(context, conv_bn(), recipe=["onnxslim"], skip=["FusionConvBN"])
    assert ops(run) == {"Conv": 1, "BatchNormalization": 1, "Relu": 1}
    assert row(run, "onnxslim").reason == "without FusionConvBN"
    run = optimized(context, conv_bn(), recipe=[{"onnxslim": {"skip_fusion_patterns": ["FusionConvBN"]}}])
    assert ops(run)["BatchNormalization"] == 1


def test_keep_batchnorm_leaves_the_rest_of_the_step(context: PassContext) -> None:
    text = CONV_BN.replace("y = Relu (n)", "i = Identity (n) y = Relu (i)")
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in conv_bn().graph.initializer}
    run = optimized(context, model_of(text, **weights), recipe=["onnxslim"], keep=["batchnorm"])
    assert [kept for kept, _ in broken(run, "batchnorm")] == [True]
    assert ops(run) == {"Conv": 1, "BatchNormalization": 1, "Relu": 1}


def test_an_input_that_nothing_reads_stays_an_input(context: PassContext) -> None:
    text = "g (float[2, 3] x, float[4] unread) => (float[2, 3] y) { a = Identity (x) y = Relu (a) }"
    run = optimized(context, model_of(text), recipe=["onnxslim"])
    assert row(run, "onnxslim").status is Status.RAN
    assert [value.name for value in run.model.proto.graph.input] == ["x", "unread"]
    assert ops(run) == {"Relu": 1}


def test_inner_passes_are_those_of_the_installed_release(context: PassContext) -> None:
    from onnxslim.core.pattern.registry import DEFAULT_FUSION_PATTERNS

    inner = OnnxSlim().inner(context)
    assert set(inner) > set(DEFAULT_FUSION_PATTERNS)
    assert {"constant_folding", "dead_node_elimination", "shape_inference"} < set(inner)
    assert "graph_fusion" not in inner, "it is all the patterns together"


@pytest.mark.parametrize(
    ("options", "less"),
    [
        ({"skip_fusion_patterns": ["FusionGemm"]}, {"FusionGemm"}),
        ({"skip_optimizations": ["weight_tying"]}, {"weight_tying"}),
        ({"no_shape_infer": True}, {"shape_inference"}),
    ],
)
def test_what_an_option_leaves_out_is_no_inner_pass(options: dict, less: set[str], context: PassContext) -> None:
    assert set(OnnxSlim().inner(context)) - set(OnnxSlim(options).inner(context)) == less


def test_without_any_inner_pass_it_changes_nothing(context: PassContext) -> None:
    step = OnnxSlim()
    before = detached(merged_attention())
    after = step.without(step.inner(context)).apply(before, context).model
    assert [node.op_type for node in after.proto.graph.node] == [node.op_type for node in before.proto.graph.node]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"skip_fusion_pattern": []}, r"onnxslim.slim has no option .*; did you mean 'skip_fusion_patterns'\?"),
        ({"skip_fusion_patterns": ["FusionGem"]}, r"knows no 'FusionGem'; did you mean 'FusionGemm'\?"),
        ({"skip_optimizations": ["weight_ting"]}, r"knows no 'weight_ting'; did you mean 'weight_tying'\?"),
        ({"skip_optimizations": "weight_tying"}, "skip_optimizations is 'weight_tying'; expected a list"),
        ({"save_as_external_data": True}, "has no option 'save_as_external_data'"),
    ],
)
def test_what_it_would_ignore_is_refused(options: dict, words: str, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=words):
        optimized(context, merged_attention(), recipe=[{"onnxslim": options}])


def test_without_the_extra_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, context: PassContext
) -> None:
    monkeypatch.setitem(sys.modules, "onnxslim", None)
    with pytest.raises(PolicyError, match=r"'onnxslim' needs onnxslim, an extra: pip install 'onnxline\[onnxslim\]'"):
        optimized(context, merged_attention(), recipe=["onnxslim"])


def test_a_weight_comes_back_bit_for_bit(context: PassContext) -> None:
    run = optimized(context, attention(), recipe=["onnxslim"])
    arrays = {tensor.name: run.model.array(tensor) for tensor in run.model.proto.graph.initializer}
    assert np.array_equal(arrays["wo"], matrix(32, 32, 3))
