"""Keep, skip and watch: which structures a run holds, what that costs, and who is named where one breaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

import passes
from passes import PolicyError, Status
from passes.context import PassContext
from passes.run.result import author_of_loss
from passes.worker.client import Worker
from tests.support.onnx_models import attention, biased_attention, matrix, merged_attention, model_of
from tests.support.pass_runs import ops, row

Runs = Callable[..., passes.PassRun]


@pytest.fixture(scope="module")
def keeping(context: PassContext) -> Runs:
    """A run of a model by its function that keeps Q, K and V; several tests read the same."""
    return cache(lambda make, *recipe: passes.optimize(make(), recipe=recipe, keep=["qkv"], context=context))


@pytest.fixture(scope="module")
def skipping(context: PassContext) -> Runs:
    """A run of one step, whose inner passes that merge are left out by their names."""
    return cache(
        lambda make, step, *skip: passes.optimize(make(), recipe=[step], skip=skip, watch=False, context=context)
    )


def test_without_a_policy_onnxoptimizer_merges_and_is_named(context: PassContext) -> None:
    run = passes.optimize(attention(), recipe=["fuse_qkv"], context=context)
    (verdict,) = run.structures
    assert (verdict.kept, verdict.broken_by) == (False, "fuse_qkv")
    assert ops(run)["Split"] == 1


def test_without_a_policy_the_guilty_inner_pass_of_onnxsim_is_named(context: PassContext) -> None:
    run = passes.optimize(attention(), recipe=["onnxsim"], context=context)
    (verdict,) = run.structures
    assert not verdict.kept
    assert verdict.broken_by in ("onnxsim/fuse_qkv", "onnxsim/fuse_attention")
    assert row(run, "onnxsim").status is Status.RAN


def test_a_lost_structure_names_the_step_that_is_left_in_place(context: PassContext) -> None:
    wrong = {"tests.support.hostile_passes:change_row": {"table": "wq"}}
    run = passes.optimize(attention(), recipe=[wrong, "fuse_qkv"], context=context)
    assert [row.status for row in run.rows] == [Status.REVERTED, Status.RAN]
    (verdict,) = run.structures
    assert (verdict.kept, verdict.broken_by) == (False, run.rows[0].name), "the first, also where it was reverted"
    assert author_of_loss(verdict, run.rows) == "fuse_qkv"
    assert "lost to fuse_qkv" in repr(run)
    kept = passes.optimize(attention(), recipe=[wrong], context=context).structures[0]
    assert kept.kept and kept.broken_by == run.rows[0].name


@pytest.mark.parametrize("recipe", [["fuse_qkv"], ["onnxsim"], ["default", "onnxsim"]], ids=str)
def test_keep_pins_so_that_nothing_is_merged(recipe: list[str], keeping: Runs) -> None:
    run = keeping(attention, *recipe)
    (verdict,) = run.structures
    assert (verdict.kept, verdict.broken_by) == (True, None)
    assert run.power.margin > 1
    assert not run.reverted
    kept = {name: matrix(32, 32, seed) for seed, name in enumerate(("wq", "wk", "wv", "wo"))}
    arrays = [run.model.array(tensor) for tensor in run.model.proto.graph.initializer if len(tensor.dims) == 2]
    for array in kept.values():
        assert any(np.array_equal(array, other) or np.array_equal(array.T, other) for other in arrays)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (["nop"], None),
        (["fuse_qkv"], "fuse_qkv: would have lost qkv attention 0, which is kept"),
        (["onnxsim"], "onnxsim: its fuse_attention would have lost qkv attention 0, which is kept"),
        (["fuse_qkv", "onnxsim"], "fuse_qkv: would have lost qkv attention 0, which is kept"),
    ],
    ids=str,
)
def test_the_first_pass_that_would_have_lost_what_is_kept_is_named(
    recipe: list[str], said: str | None, keeping: Runs
) -> None:
    run = keeping(biased_attention, *recipe)
    assert [remark for remark in run.remarks if "kept" in remark] == ([said] if said else [])


def test_a_pass_that_is_skipped_would_have_lost_nothing(context: PassContext) -> None:
    skip = ["fuse_qkv", "fuse_attention"]
    run = passes.optimize(biased_attention(), recipe=["onnxsim"], keep=["qkv"], skip=skip, context=context)
    assert not any("which is kept" in remark for remark in run.remarks)


@pytest.mark.parametrize("make", [attention, biased_attention])
def test_keep_is_cheap(make, keeping: Runs, skipping: Runs) -> None:
    """At most two nodes more than when only the passes that merge are skipped by name."""
    kept, by_name = keeping(make, "onnxsim"), skipping(make, "onnxsim", "fuse_qkv", "fuse_attention")
    assert by_name.structures[0].kept
    assert ops(kept).total() <= ops(by_name).total() + 2


@pytest.mark.parametrize(
    ("recipe", "merging"), [("onnxsim", ["fuse_qkv", "fuse_attention"]), ("onnxslim", ["FusionGemmMul"])]
)
def test_keep_costs_no_gemm_between_reshapes(recipe: str, merging: list[str], keeping: Runs, skipping: Runs) -> None:
    """Of rank 3, a product and its bias become a Gemm between two reshapes, which the reshapes around it take in. A pin
    in front of those would keep it from that; and after them onnxsim would merge."""
    if recipe == "onnxslim":
        pytest.importorskip("onnxslim")
    kept, by_name = keeping(biased_attention, recipe), skipping(biased_attention, recipe, *merging)
    assert (kept.structures[0].kept, by_name.structures[0].kept) == (True, True)
    assert not kept.reverted
    assert ops(kept)["Gemm"] >= 3
    assert ops(kept) == ops(by_name)


def test_keep_is_cheap_beside_a_fourth_reader_of_the_input(context: PassContext) -> None:
    """As in a parallel block: with rank 2 inputs, product and bias may become a Gemm, and pins must not cost that."""
    text = """
    g (float[8, 32] x) => (float[8, 32] y) {
        h = Relu (x)
        q0 = MatMul (h, wq)
        q = Add (q0, bq)
        k0 = MatMul (h, wk)
        k = Add (k0, bk)
        v0 = MatMul (h, wv)
        v = Add (v0, bv)
        m0 = MatMul (h, wm)
        m = Add (m0, bm)
        kt = Transpose <perm = [1, 0]> (k)
        s = MatMul (q, kt)
        p = Softmax <axis = -1> (s)
        c = MatMul (p, v)
        y = Add (c, m)
    }
    """
    weights = {f"w{role}": matrix(32, 32, seed) for seed, role in enumerate("qkvm")}
    biases = {f"b{role}": matrix(1, 32, 9 + seed).ravel() for seed, role in enumerate("qkvm")}
    model = model_of(text, **weights, **biases)
    by_name = {"onnxsim": ["fuse_qkv", "fuse_attention"], "default": ["fuse_qkv"]}
    for recipe, skip in by_name.items():
        kept = passes.optimize(model, recipe=[recipe], keep=["qkv"], context=context)
        free = passes.optimize(model, recipe=[recipe], skip=skip, watch=False, context=context)
        assert (kept.structures[0].kept, free.structures[0].kept) == (True, True)
        assert ops(kept) == ops(free)


RESHAPED = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y)
<int64[2] flat = {16, 32}, int64[3] back = {2, 8, 32}, int64[4] heads = {2, 8, 4, 8}> {
    f = Reshape (x, flat)
    h = Relu (f)
    q0 = MatMul (h, wq) q1 = Reshape (q0, back) q2 = Add (q1, bq) q3 = Reshape (q2, heads)
    k0 = MatMul (h, wk) k1 = Reshape (k0, back) k2 = Add (k1, bk) k3 = Reshape (k2, heads)
    v0 = MatMul (h, wv) v1 = Reshape (v0, back) v2 = Add (v1, bv) v3 = Reshape (v2, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q3)
    k = Transpose <perm = [0, 2, 3, 1]> (k3)
    v = Transpose <perm = [0, 2, 1, 3]> (v3)
    s = MatMul (q, k)
    p = Softmax <axis = -1> (s)
    c = MatMul (p, v)
    ct = Transpose <perm = [0, 2, 1, 3]> (c)
    y = Reshape (ct, back)
}
"""


def test_keep_costs_no_reshape_between_product_and_heads(context: PassContext) -> None:
    weights = {f"w{role}": matrix(32, 32, seed) for seed, role in enumerate("qkv")}
    biases = {f"b{role}": matrix(1, 32, 9 + seed).ravel() for seed, role in enumerate("qkv")}
    model = model_of(RESHAPED, **weights, **biases)
    kept = passes.optimize(model, recipe=["merge-layout"], keep=["qkv"], context=context)
    free = passes.optimize(model, recipe=["merge-layout"], context=context)
    assert kept.structures[0].kept
    assert ops(kept) == ops(free)
    assert len(kept.model.proto.graph.node) == len(model.graph.node) - 3 - 3  # a Reshape and an Add for each role


@pytest.mark.parametrize("shared", ["wq", "all"])
def test_tied_projections_are_kept_too(shared: str, context: PassContext) -> None:
    model = attention()
    arrays = {tensor.name: tensor for tensor in model.graph.initializer}
    for name in ("wk", "wv") if shared == "all" else ("wk",):
        arrays[name].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(arrays["wq"]), name))
    for policy in ({"skip": ["fuse_qkv"]}, {"keep": ["qkv"]}):
        run = passes.optimize(model, recipe=["default", "onnxsim"], **policy, context=context)
        assert [verdict.kept for verdict in run.structures] == [True], policy


INNER = """
g (bool c, float[4, 4] x) => (float[4, 4] y) {
    d = Neg (x)
    e = If (c) <
        then_branch = t () => (float[4, 4] r) { q = Identity (d) r = Add (q, w) },
        else_branch = f () => (float[4, 4] s) { s = Relu (d) }
    >
    y = Add (e, w)
}
"""


def test_a_kept_weight_may_be_read_in_a_branch_too(context: PassContext) -> None:
    run = passes.optimize(model_of(INNER, w=matrix(4, 4, 0)), recipe=["default"], keep=["op:Add"], context=context)
    assert all(verdict.kept for verdict in run.structures)
    assert run.power.margin > 1


def test_skip_alone_watches_and_reverts_a_merge_under_another_name(context: PassContext) -> None:
    run = passes.optimize(biased_attention(), recipe=["default", "onnxsim"], skip=["fuse_qkv"], context=context)
    (verdict,) = run.structures
    assert verdict.kept
    assert verdict.broken_by == "onnxsim/fuse_attention"
    assert row(run, "fuse_qkv").status is Status.SKIPPED
    assert row(run, "fuse_qkv").reason == "skip: fuse_qkv"
    assert row(run, "onnxsim/fuse_attention").status is Status.REVERTED
    assert row(run, "onnxsim").changed, "the rest of the step stands"


def test_watch_can_be_opted_out_of(context: PassContext) -> None:
    run = passes.optimize(biased_attention(), recipe=["onnxsim"], skip=["fuse_qkv"], watch=False, context=context)
    assert [verdict.kept for verdict in run.structures] == [False]


@pytest.mark.parametrize("entry", ["fusions", "fuse_q*"])
def test_skip_takes_groups_and_globs(entry: str, context: PassContext) -> None:
    run = passes.optimize(attention(), recipe=["fuse_qkv"], skip=[entry], context=context)
    assert row(run, "fuse_qkv").reason == f"skip: {entry} names fuse_qkv"


def test_a_skipped_pass_is_not_tried_at_all(monkeypatch: pytest.MonkeyPatch, context: PassContext) -> None:
    """It may be skipped because it never ends, or brings its process down."""
    asked: list[str] = []
    post = Worker.post

    def noted(worker: Worker, function: Callable[..., Any], /, **arguments: Any) -> int:
        asked.extend(arguments.get("names", ()))
        return post(worker, function, **arguments)

    monkeypatch.setattr(Worker, "post", noted)
    passes.optimize(attention(), recipe=["default"], skip=["fuse_qkv"], context=context)
    assert "eliminate_common_subexpression" in asked
    assert "fuse_qkv" not in asked


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recipe": ["fuse_qvk"]}, r"no pass named 'fuse_qvk'; did you mean 'fuse_qkv'\?"),
        ({"skip": ["fuse_qvk"]}, r"skip: no pass named 'fuse_qvk'; did you mean 'fuse_qkv'\?"),
        ({"skip": ["FUSIONS"]}, r"skip: no pass named 'FUSIONS'; did you mean 'fusions'\?"),
        ({"skip": ["fuse_atention"], "recipe": ["onnxsim"]}, r"did you mean 'fuse_attention'\?"),
        ({"keep": ["qkw"]}, r"keep: no structure named 'qkw'; did you mean 'qkv'\?"),
        ({"recipe": [{"onnxsim": {"skip_fuse_b": True}}]}, r"no option 'skip_fuse_b'; did you mean 'skip_fuse_bn'\?"),
        ({"recipe": [{"onnxsim": {"skipped_optimizers": ["fuse_qvk"]}}]}, "onnxsim has no pass named 'fuse_qvk'"),
        (
            {"recipe": [{"onnxsim": {"extra_optimizers": ["quantise_fp16"]}}]},
            r"onnxsim has no pass named 'quantise_fp16'; did you mean 'quantize_fp16'\?",
        ),
        *(
            ({"recipe": [{"onnxsim": {option: value}}]}, f"onnxsim: {option} is .* expected a list")
            for option in ("skipped_optimizers", "extra_optimizers")
            for value in (None, 5, "fuse_qkv", [5])
        ),
        ({"recipe": [{"default": {"x": 1}}]}, "pass 'default' takes no options, found x"),
        ({"recipe": [{"fold_constants": {"limit": 1}}]}, "pass 'fold_constants' does not take these options"),
    ],
)
def test_a_wrong_name_is_a_mistake_that_names_the_nearest(settings: dict, words: str, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=words):
        passes.optimize(attention(), **{"recipe": ["nop"], **settings}, context=context)


def test_a_keep_that_matches_nothing_says_what_is_there(context: PassContext) -> None:
    with pytest.raises(PolicyError, match=r"keep: qkv matches nothing .* are one matrix in the source already: w"):
        passes.optimize(merged_attention(), recipe=["nop"], keep=["qkv"], context=context)


def test_an_optional_keep_may_match_nothing(context: PassContext) -> None:
    assert passes.optimize(merged_attention(), recipe=["nop"], keep=["qkv?"], context=context).structures == ()
