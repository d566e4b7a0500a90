"""onnxscript's optimizer as a step: its stages are inner passes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxscript import optimizer

from benchmarks.growth import layers
from passes import PolicyError, Status
from passes.context import PassContext
from passes.external import onnxscript_rules
from passes.external.onnxscript import OnnxScriptOptimizer, OnnxScriptRewrites, optimize
from passes.policy.policy import DESTROYS
from passes.weights.mapped import find_file_range
from passes.weights.sharing import detached_copy
from tests.support.onnx_models import attention, biased_attention, detached, matrix, merged_attention, model_of
from tests.support.pass_runs import broken, ops, optimized, row, valid

PICTURE = """
g (float[2, 3] x) => (float[2, 3] y) {
    two = Add (one, one)
    a = Mul (x, two)
    b = Mul (x, two)
    c = Add (a, b)
    d = Add (c, zero)
    y = Relu (d)
}
"""
"""Something for each stage: 1 + 1 is folded, a and b are the same, + 0 is dropped by a rule."""


def picture() -> onnx.ModelProto:
    return model_of(PICTURE, one=np.float32(1), zero=np.float32(0))


def test_all_stages_run(context: PassContext) -> None:
    run = optimized(context, picture(), recipe=["onnxscript", "onnxscript"])
    assert ops(run) == {"Mul": 1, "Add": 1, "Relu": 1}
    assert [row.changed for row in run.rows] == [True, False]


@pytest.mark.parametrize(
    ("stage", "left"),
    [
        ("constant_folding", {"Mul": 1, "Add": 2, "Relu": 1, "Identity": 1}),
        ("common_subexpression_elimination", {"Mul": 2, "Add": 1, "Relu": 1}),
        ("rewrite_rules", {"Mul": 1, "Add": 2, "Relu": 1}),
    ],
)
def test_a_stage_can_be_left_out(stage: str, left: dict[str, int], context: PassContext) -> None:
    run = optimized(context, picture(), recipe=["onnxscript"], skip=[f"onnxscript/{stage}"])
    assert ops(run) == left
    assert row(run, "onnxscript").reason == f"without {stage}"
    assert ops(optimized(context, picture(), recipe=["onnxscript"])) == {"Mul": 1, "Add": 1, "Relu": 1}, "and is back"


FUNCTION = """
<ir_version: 9, opset_import: ["": 20, "mine": 1]>
g (float[2, 3] x) => (float[2, 3] y) { y = mine.twice (x) }
<domain: "mine", opset_import: ["": 20]>
twice (a) => (b) { b = Add (a, a) }
"""


@pytest.mark.parametrize("how", ["skip", "option"])
def test_functions_are_inlined_unless_that_is_left_out(how: str, context: PassContext) -> None:
    assert ops(optimized(context, onnx.parser.parse_model(FUNCTION), recipe=["onnxscript"])) == {"Add": 1}
    recipe = ["onnxscript"] if how == "skip" else [{"onnxscript": {"inline": False}}]
    skip = ["onnxscript/inline"] if how == "skip" else []
    assert ops(optimized(context, onnx.parser.parse_model(FUNCTION), recipe=recipe, skip=skip)) == {"twice": 1}


@pytest.mark.parametrize("make", [attention, biased_attention])
def test_keeps_the_projections_at_two_nodes_at_most(make, context: PassContext) -> None:
    free = optimized(context, make(), recipe=["onnxscript"])
    kept = optimized(context, make(), recipe=["onnxscript"], keep=["qkv"])
    assert broken(free) == broken(kept) == [(True, None)]
    assert ops(kept).total() <= ops(free).total() + 2
    assert valid(kept)


def tied() -> onnx.ModelProto:
    """Q and K have one matrix, so their products are computed twice."""
    model = biased_attention()
    for node in model.graph.node:
        node.input[:] = ["wq" if name == "wk" else name for name in node.input]
    return model


def test_what_merges_tied_projections_is_left_out_alone(context: PassContext) -> None:
    stage = "onnxscript/common_subexpression_elimination"
    free = optimized(context, tied(), recipe=["onnxscript"])
    assert broken(free) == [(False, stage)]
    watched = optimized(context, tied(), recipe=["onnxscript"], skip=["fuse_qkv"])
    assert broken(watched) == [(True, stage)]
    assert row(watched, stage).status is Status.REVERTED
    kept = optimized(context, tied(), recipe=["onnxscript"], keep=["qkv"])
    assert [verdict for verdict, _ in broken(kept)] == [True]
    assert ops(kept).total() <= ops(watched).total() + 2


@pytest.mark.parametrize(
    ("options", "less"), [({"inline": False}, {"inline"}), ({"onnx_shape_inference": False}, {"shape_inference"})]
)
def test_what_an_option_leaves_out_is_no_inner_pass(options: dict, less: set[str], context: PassContext) -> None:
    assert set(OnnxScriptOptimizer().inner(context)) - set(OnnxScriptOptimizer(options).inner(context)) == less


def test_without_any_stage_nothing_is_computed(context: PassContext) -> None:
    step = OnnxScriptOptimizer()
    before = detached(picture())
    after = step.without(step.inner(context)).apply(before, context).model
    assert [node.op_type for node in after.proto.graph.node] == [node.op_type for node in before.proto.graph.node]


def test_an_option_that_it_does_not_have_is_refused(context: PassContext) -> None:
    with pytest.raises(PolicyError, match=r"has no option 'num_iteration'; did you mean 'num_iterations'\?"):
        optimized(context, merged_attention(), recipe=[{"onnxscript": {"num_iteration": 1}}])


def test_weights_stay_in_their_files_and_large_new_ones_come_in_one(context: PassContext) -> None:
    model = model_of(
        """g (float[2, 512] x) => (float[2, 512] y) {
            turned = Transpose <perm = [1, 0]> (a)
            h = MatMul (x, turned)
            y = MatMul (h, b)
        }""",
        a=matrix(512, 512, 0),
        b=matrix(512, 512, 1),
    )
    before = detached_copy(model, context.spill)
    after = OnnxScriptOptimizer().apply(before, context).model
    weights = {tensor.name: after.weight(tensor) for tensor in after.proto.graph.initializer}
    kept = weights.pop("b")
    assert any(kept is weight for weight in before.weights.values()), "nobody has copied it"
    [folded] = weights.values()
    assert folded is not None and find_file_range(folded.data) is not None
    np.testing.assert_array_equal(folded.array(), matrix(512, 512, 0).T)


def test_rules_are_not_tried_with_the_whole_graph_at_each_node() -> None:
    """The library's own result, in calls that grow with the nodes and not with their square."""
    by_library, by_us = ir.from_proto(layers(2)), ir.from_proto(layers(2))
    optimizer.optimize(by_library)
    small = _lookups(lambda: optimize(by_us, {"left_out": []}))
    assert ir.to_proto(by_us) == ir.to_proto(by_library)
    large = ir.from_proto(layers(8))
    assert _lookups(lambda: optimize(large, {"left_out": []})) < 1.2 * 4 * small


def _lookups(work: Callable[[], object]) -> int:
    """How often `work` asks a node for its operator."""
    counted = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal counted
        counted += event == "call" and frame.f_code.co_name == "op_identifier"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counted


WEIGHT_NORM = """
g (float[1, 16, 8] x) => (float[1, 20, 6] y) {
    norm = ReduceL2 <keepdims = 1> (v, axes)
    unit = Div (v, norm)
    w = Mul (unit, size)
    y = Conv (x, w)
}
"""


def test_floats_are_folded_to_the_bits_that_onnxruntime_computes(context: PassContext) -> None:
    """numpy sums the norms in another order: some of these weights would differ in their last bit."""
    weights = {"v": matrix(20, 48, 0).reshape(20, 16, 3), "size": matrix(20, 1, 1).reshape(20, 1, 1)}
    model = model_of(WEIGHT_NORM, **weights, axes=np.array([1, 2]))
    by_onnxscript, by_ours = (optimized(context, model, recipe=[name]) for name in ("onnxscript", "fold_constants"))
    folded = [run.model.array(run.model.proto.graph.initializer[0]) for run in (by_onnxscript, by_ours)]
    assert ops(by_onnxscript) == ops(by_ours) == {"Conv": 1}
    assert np.array_equal(*folded)


# onnxscript's rules as a step: read from the installed release, chosen and left out by name.

STEP = "onnxscript_rewrites"
FUSIONS = {STEP: {"rules": ["ort_fusions"]}}

NOTHING_TO_DO = "g (float[2, 3] x) => (float[2, 3] y) { a = Add (x, zero) b = Mul (one, a) y = Relu (b) }"


def nothing_to_do():
    return model_of(NOTHING_TO_DO, zero=np.float32(0), one=np.float32(1))


def test_the_default_rules_run(context: PassContext) -> None:
    run = optimized(context, nothing_to_do(), recipe=[STEP, STEP])
    assert (ops(run)["Add"], ops(run)["Mul"], ops(run)["Relu"]) == (0, 0, 1)
    assert [row.changed for row in run.rows] == [True, False]


def test_a_rule_that_is_skipped_does_not_run_in_either_order_of_its_operands(context: PassContext) -> None:
    run = optimized(context, nothing_to_do(), recipe=[STEP], skip=["mul_by_1_rule"])
    assert (ops(run)["Add"], ops(run)["Mul"]) == (0, 1)
    assert row(run, STEP).reason == "without mul_by_1_rule"


def test_a_rule_can_be_chosen_alone(context: PassContext) -> None:
    run = optimized(context, nothing_to_do(), recipe=[{STEP: {"rules": ["mul_by_1_rule"]}}])
    assert (ops(run)["Add"], ops(run)["Mul"]) == (1, 1), "it wants the constant after"
    run = optimized(context, nothing_to_do(), recipe=[{STEP: {"rules": ["add_0_rule"]}}])
    assert (ops(run)["Add"], ops(run)["Mul"]) == (0, 1)


@pytest.mark.parametrize("make", [attention, biased_attention])
def test_the_default_rules_leave_attention_alone(make, context: PassContext) -> None:
    for keep in ([], ["qkv"]):
        run = optimized(context, make(), recipe=[STEP], keep=keep)
        assert broken(run) == [(True, None)]


def test_without_a_policy_the_fusions_merge_and_are_named(context: PassContext) -> None:
    run = optimized(context, biased_attention(), recipe=[FUSIONS])
    assert broken(run) == [(False, f"{STEP}/fuse_attention")]
    assert ops(run) == {"Relu": 1, "Attention": 1, "MatMul": 1}


@pytest.mark.parametrize("make", [attention, biased_attention])
def test_keep_costs_two_nodes_at_most(make, context: PassContext) -> None:
    kept = optimized(context, make(), recipe=[FUSIONS], keep=["qkv"])
    by_name = optimized(context, make(), recipe=[FUSIONS], skip=["fuse_attention"], watch=False)
    assert [verdict for verdict, _ in broken(kept)] == [verdict for verdict, _ in broken(by_name)] == [True]
    assert ops(kept)["MultiHeadAttention"] == 1
    assert ops(kept).total() <= ops(by_name).total() + 2
    assert valid(kept)


def test_skip_of_what_merges_watches(context: PassContext) -> None:
    run = optimized(context, biased_attention(), recipe=[FUSIONS], skip=["fuse_qkv"])
    assert broken(run) == [(True, f"{STEP}/fuse_attention")]
    assert row(run, f"{STEP}/fuse_attention").status is Status.REVERTED
    assert row(run, STEP).changed


def test_inner_passes_have_names_and_depend_on_the_sets(context: PassContext) -> None:
    default = OnnxScriptRewrites().inner(context)
    assert {"mul_by_1_rule", "fuse_batchnorm_into_conv_rule", "cast_cast_rule"} < set(default)
    assert not [name for name in default if name.startswith("rule_")], "each has a name"
    fusions = OnnxScriptRewrites(("ort_fusions",)).inner(context)
    assert {"fuse_attention", "fuse_sdpa", "FusedMatMulDiv1"} < set(fusions)
    assert set(OnnxScriptRewrites(("default", "ort_fusions")).inner(context)) == {*default, *fusions}
    assert "fuse_rms_normalization" in OnnxScriptRewrites(("onnx_fusions",)).inner(context)


def test_every_name_in_the_table_is_an_inner_pass(context: PassContext) -> None:
    inner = set(OnnxScriptRewrites(("default", "ort_fusions", "onnx_fusions")).inner(context))
    assert {name for name in DESTROYS if name.endswith("_rule")} <= inner
    assert {"fuse_sdpa", "fuse_mha1", "fuse_qkv_gqa", "fuse_skip_layer_normalization", "fuse_erfgelu"} <= inner


def test_what_was_left_out_is_back_afterwards() -> None:
    """A fusion is left out by its name in the library, which the next call needs again."""
    for entry, parts in onnxscript_rules.fusion_sets().items():
        before = [getattr(holder, name) for holder, name in parts.values()]
        with onnxscript_rules.fusions_without(entry, frozenset(parts)):
            assert [getattr(holder, name) for holder, name in parts.values()] != before
        assert [getattr(holder, name) for holder, name in parts.values()] == before


RMS = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    s = Pow (x, two)
    m = ReduceMean <keepdims = 1, noop_with_empty_axes = 0> (s, last)
    e = Add (m, tiny)
    r = Sqrt (e)
    i = Reciprocal (r)
    n = Mul (x, i)
    y = Mul (n, w)
}
"""


def test_onnx_fusions_are_for_opset_23(context: PassContext) -> None:
    weights = {"two": np.float32(2), "tiny": np.float32(1e-5), "last": np.array([-1])}
    model = model_of(RMS, w=np.linspace(0.5, 1.5, 32, dtype=np.float32), **weights)
    recipe = [{STEP: {"rules": ["onnx_fusions"]}}]
    assert not row(optimized(context, model, recipe=recipe), STEP).changed
    model.opset_import[0].version = 23
    assert ops(optimized(context, model, recipe=recipe)) == {"RMSNormalization": 1}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (["defalt"], r"no rule or set 'defalt'; did you mean 'default'\?"),
        (["add_0_rul"], r"did you mean 'add_0_rule'\?"),
        ("default", "rules is 'default'; expected a list of names"),
        (None, "rules is None; expected a list of names"),
    ],
)
def test_what_the_release_does_not_have_is_refused(rules, words: str, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=words):
        optimized(context, merged_attention(), recipe=[{STEP: {"rules": rules}}])
