"""onnxscript's rules as a step: read from the installed release, chosen and left out by name."""

from __future__ import annotations

import numpy as np
import pytest

from passes import PolicyError, Status
from passes.context import PassContext
from passes.external import onnxscript_rules
from passes.external.onnxscript import OnnxScriptRewrites
from passes.policy.policy import DESTROYS
from tests.support.onnx_models import attention, biased_attention, merged_attention, model_of
from tests.support.pass_runs import broken, ops, optimized, row, valid

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
