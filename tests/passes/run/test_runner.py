"""The loop, on an attention block that real optimizers merge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import passes
from passes import PolicyError, Status
from passes.context import PassContext
from passes.errors import StepFailed
from passes.model.analysis import AnalyzedModel
from passes.model.canonical import CanonicalGraph
from passes.optimize import draw_feeds
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.proof.types import Measurement
from passes.run.result import PassRow, PassRun
from passes.run.runner import run_passes
from passes.step import CompositeStep, PassResult, Step
from passes.weights.detached import DetachedModel
from passes.worker.client import Worker
from tests.support.onnx_models import attention, biased_attention, detached, matrix, merged_attention, model_of


def ops(run: PassRun) -> Counter[str]:
    return Counter(node.op_type for node in run.model.proto.graph.node)


def row(run: PassRun, name: str) -> passes.PassRow:
    return next(row for row in run.rows if row.name == name)


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


@pytest.mark.parametrize("recipe", [["fuse_qkv"], ["onnxsim"], ["default", "onnxsim"]], ids=str)
def test_keep_pins_so_that_nothing_is_merged(recipe: list[str], context: PassContext) -> None:
    run = passes.optimize(attention(), recipe=recipe, keep=["qkv"], context=context)
    (verdict,) = run.structures
    assert (verdict.kept, verdict.broken_by) == (True, None)
    assert run.power.margin > 1
    assert not run.reverted
    kept = {name: matrix(32, 32, seed) for seed, name in enumerate(("wq", "wk", "wv", "wo"))}
    arrays = [run.model.array(tensor) for tensor in run.model.proto.graph.initializer if len(tensor.dims) == 2]
    for array in kept.values():
        assert any(np.array_equal(array, other) or np.array_equal(array.T, other) for other in arrays)


@pytest.mark.parametrize("make", [attention, biased_attention])
def test_keep_is_cheap(make, context: PassContext) -> None:
    """At most two nodes more than when only the passes that merge are skipped by name."""
    kept = passes.optimize(make(), recipe=["onnxsim"], keep=["qkv"], context=context)
    by_name = passes.optimize(
        make(), recipe=["onnxsim"], skip=["fuse_qkv", "fuse_attention"], watch=False, context=context
    )
    assert by_name.structures[0].kept
    assert ops(kept).total() <= ops(by_name).total() + 2


@pytest.mark.parametrize(
    ("recipe", "merging"), [("onnxsim", ["fuse_qkv", "fuse_attention"]), ("onnxslim", ["FusionGemmMul"])]
)
def test_keep_costs_no_gemm_between_reshapes(recipe: str, merging: list[str], context: PassContext) -> None:
    """Of rank 3, a product and its bias become a Gemm between two reshapes, which the reshapes around it take in. A pin
    in front of those would keep it from that; and behind them onnxsim would merge."""
    if recipe == "onnxslim":
        pytest.importorskip("onnxslim")
    kept = passes.optimize(biased_attention(), recipe=[recipe], keep=["qkv"], context=context)
    by_name = passes.optimize(biased_attention(), recipe=[recipe], skip=merging, watch=False, context=context)
    assert (kept.structures[0].kept, by_name.structures[0].kept) == (True, True)
    assert not kept.reverted
    assert ops(kept)["Gemm"] >= 3
    assert ops(kept) == ops(by_name)


def test_skip_alone_watches_and_reverts_whoever_merges_under_another_name(context: PassContext) -> None:
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


def test_fuse_qkv_on_a_shared_graph_input_aborts_and_costs_one_step(context: PassContext) -> None:
    text = """
    g (float[2, 8, 32] x) => (float[2, 8, 32] q, float[2, 8, 32] k, float[2, 8, 32] v) {
        q0 = MatMul (x, wq)
        k0 = MatMul (x, wk)
        v0 = MatMul (x, wv)
        q = Relu (q0)
        k = Relu (k0)
        v = Relu (v0)
    }
    """
    model = model_of(text, **{name: matrix(32, 32, seed) for seed, name in enumerate(("wq", "wk", "wv"))})
    run = passes.optimize(model, recipe=["fuse_qkv", "nop"], context=context)
    assert row(run, "fuse_qkv").status in (Status.FAILED, Status.CRASHED)
    assert row(run, "fuse_qkv").reason
    assert row(run, "nop").status is Status.RAN
    assert ops(run)["MatMul"] == 3


@dataclass(frozen=True)
class Harmful(CompositeStep):
    """A composite step that loses a weight, as long as its inner pass `bad` runs."""

    left_out: tuple[str, ...] = ()
    weight: str = "wo"
    name: str = field(default="harmful", init=False)
    source: str = field(default="tests", init=False)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = onnx.ModelProto()
        proto.CopyFrom(model.proto)
        proto.graph.node[0].doc_string = "seen"
        if "bad" not in self.left_out:
            for tensor in proto.graph.initializer:
                if tensor.name == self.weight:
                    tensor.CopyFrom(numpy_helper.from_array(np.zeros((32, 32), np.float32), self.weight))
        if "good" not in self.left_out:
            proto.graph.node.append(onnx.helper.make_node("Neg", ["x"], ["dead"]))
        return PassResult(model.with_proto(proto))

    def check(self, context: PassContext) -> None:
        """Takes no options."""

    def inner(self, context: PassContext) -> tuple[str, ...]:
        return ("good", "bad")

    def without(self, names: Sequence[str]) -> Harmful:
        return replace(self, left_out=(*self.left_out, *names))


def run_step(step: Step, context: PassContext) -> PassRun:
    model = detached(attention())
    prover = NumericProver.of_itself([draw_feeds(model, 0)], context)
    return run_passes(model, [step], Policy(), prover, context)


def test_a_step_with_wrong_numbers_is_narrowed_and_the_rest_of_it_stands(context: PassContext) -> None:
    run = run_step(Harmful(), context)
    assert [(row.name, row.status) for row in run.rows] == [
        ("harmful/bad", Status.REVERTED),
        ("harmful", Status.RAN),
    ]
    assert "max abs error" in run.rows[0].reason
    assert run.rows[0].errors["y"].max_abs > 0.01
    assert ops(run)["Neg"] == 1


@dataclass(frozen=True)
class TwiceHarmful(Harmful):
    """Two inner passes do the same harm: each alone is enough, so both have to go."""

    name: str = field(default="twice", init=False)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        left_out = () if {"bad", "worse"} - set(self.left_out) else ("bad",)
        return Harmful(left_out).apply(model, context)

    def inner(self, context: PassContext) -> tuple[str, ...]:
        return ("worse", "good", "bad")


def test_two_inner_passes_that_do_the_same_harm_are_both_taken_out(context: PassContext) -> None:
    run = run_step(TwiceHarmful(), context)
    assert {(row.name, row.status) for row in run.rows} == {
        ("twice/worse", Status.REVERTED),
        ("twice/bad", Status.REVERTED),
        ("twice", Status.RAN),
    }


TWO_ATTENTIONS = """
g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
    q0 = MatMul (x, wq) k0 = MatMul (x, wk) v0 = MatMul (x, wv)
    t0 = Transpose <perm = [0, 2, 1]> (k0) s0 = MatMul (q0, t0) p0 = Softmax (s0) h = MatMul (p0, v0)
    q1 = MatMul (h, uq) k1 = MatMul (h, uk) v1 = MatMul (h, uv)
    t1 = Transpose <perm = [0, 2, 1]> (k1) s1 = MatMul (q1, t1) p1 = Softmax (s1) y = MatMul (p1, v1)
}
"""


@dataclass(frozen=True)
class EachHarmful(Harmful):
    """Each of two inner passes breaks an attention of its own."""

    name: str = field(default="each", init=False)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        weights = {"second": "uk", "first": "wk"}
        for inner in (inner for inner in weights if inner not in self.left_out):
            model = Harmful(weight=weights[inner], left_out=("good",)).apply(model, context).model
        return PassResult(model)

    def inner(self, context: PassContext) -> tuple[str, ...]:
        return ("second", "first")


def test_each_inner_pass_is_named_for_what_it_broke(context: PassContext) -> None:
    names = ("wq", "wk", "wv", "uq", "uk", "uv")
    model = detached(model_of(TWO_ATTENTIONS, **{name: matrix(32, 32, at) for at, name in enumerate(names)}))
    prover = NumericProver.of_itself([draw_feeds(model, 0)], context)
    run = run_passes(model, [EachHarmful()], Policy((), ("qkv",), True), prover, context)
    assert [(verdict.kept, verdict.broken_by) for verdict in run.structures] == [
        (True, "each/first"),
        (True, "each/second"),
    ]


@pytest.mark.parametrize("shared", ["wq", "all"])
def test_tied_projections_are_kept_too(shared: str, context: PassContext) -> None:
    model = attention()
    arrays = {tensor.name: tensor for tensor in model.graph.initializer}
    for name in ("wk", "wv") if shared == "all" else ("wk",):
        arrays[name].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(arrays["wq"]), name))
    for policy in ({"skip": ["fuse_qkv"]}, {"keep": ["qkv"]}):
        run = passes.optimize(model, recipe=["default", "onnxsim"], **policy, context=context)
        assert [verdict.kept for verdict in run.structures] == [True], policy


def test_a_time_limit_costs_a_step_and_not_the_run() -> None:
    run = passes.optimize(attention(), recipe=["onnxsim", "infer_shapes"], timeout_s=0.005)
    assert row(run, "onnxsim").status is Status.TIMED_OUT
    assert run.rows[-1].status is Status.RAN


def test_metadata_is_carried_and_authors_are_named(context: PassContext) -> None:
    model = attention()
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'block', 'call']")
    run = passes.optimize(model, recipe=["fuse_qkv", "eliminate_deadend"], context=context)
    metadata = {node.op_type: {e.key: e.value for e in node.metadata_props} for node in run.model.proto.graph.node}
    assert metadata["Softmax"] == {"pkg.torch.onnx.name_scopes": "['', 'block', 'call']"}
    assert metadata["Split"]["onnxline.pass"] == "fuse_qkv"


def test_a_pass_that_does_nothing_has_not_changed_the_model(context: PassContext) -> None:
    run = passes.optimize(attention(), recipe=["nop", "eliminate_identity"], context=context)
    assert [(row.status, row.changed) for row in run.rows] == [(Status.RAN, False)] * 2


def test_unchanged_outputs_are_the_reference_for_every_change(context: PassContext) -> None:
    run = passes.optimize(
        attention(), recipe=["fold_constants", "infer_shapes", "onnxscript", "default"], context=context
    )
    assert all(row.status is Status.RAN for row in run.rows), [row for row in run.rows if row.reason]
    assert all(errors.ok for row in run.rows for errors in row.errors.values())


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


@dataclass(frozen=True)
class TooNew(Step):
    """Writes an operator that the model's opset does not have; onnxruntime runs it all the same."""

    name: str = field(default="too_new", init=False)
    source: str = field(default="tests", init=False)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = onnx.ModelProto()
        proto.CopyFrom(model.proto)
        proto.graph.node.append(onnx.helper.make_node("NoSuchOperator", ["x"], ["dead"]))
        return PassResult(model.with_proto(proto))


def test_a_step_that_makes_an_invalid_model_is_reverted(context: PassContext) -> None:
    (row,) = run_step(TooNew(), context).rows
    assert row.status is Status.REVERTED
    assert row.reason.startswith("makes a model that is not valid ONNX: No Op registered for NoSuchOperator")


@dataclass(frozen=True, slots=True)
class Without(Step):
    """Read what an Identity reads in its place."""

    value: str
    source: str = field(default="tests", init=False)

    @property
    def name(self) -> str:
        return f"without_{self.value}"

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = onnx.ModelProto()
        proto.CopyFrom(model.proto)
        node = next(node for node in proto.graph.node if self.value in node.output)
        for reader in proto.graph.node:
            reader.input[:] = [node.input[0] if name == self.value else name for name in reader.input]
        proto.graph.node.remove(node)
        return PassResult(model.with_proto(proto))


class Suspicious(NumericProver):
    """Finds fault, as a whole, with a model in which nothing makes `b`."""

    def run(self, model: DetachedModel, reading: CanonicalGraph | None = None, *, hold: bool = True) -> Measurement:
        if not any("b" in node.output for node in model.proto.graph.node):
            raise StepFailed("there is no b")
        return super().run(model, reading, hold=hold)


def test_if_the_final_model_is_wrong_the_first_guilty_step_is_found(context: PassContext) -> None:
    text = "g (float[2] x) => (float[2] y) { a = Identity (x) b = Identity (a) c = Identity (b) y = Neg (c) }"
    model = detached(model_of(text))
    prover = Suspicious.of_itself([draw_feeds(model, 0)], context)
    shown: dict[int, tuple[PassRow, int, int]] = {}

    def note(place: int, row: PassRow, before: AnalyzedModel, after: AnalyzedModel) -> None:
        shown[place] = (row, before.size[0], after.size[0])

    run = run_passes(model, [Without("a"), Without("b"), Without("c")], Policy(), prover, context, changed=note)
    assert [(row.name, row.status, row.reason) for row in run.rows] == [
        ("without_a", Status.RAN, ""),
        ("without_b", Status.REVERTED, "run as a whole: there is no b"),
        ("without_c", Status.RAN, ""),
    ]
    assert [node.output[0] for node in run.model.proto.graph.node] == ["b", "y"]
    judged = {place: (row.status, before, after) for place, (row, before, after) in shown.items()}
    assert judged == {0: (Status.RAN, 4, 3), 1: (Status.REVERTED, 3, 2), 2: (Status.RAN, 3, 2)}, "as it was judged last"


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


def test_a_skipped_pass_is_not_tried_at_all(monkeypatch: pytest.MonkeyPatch, context: PassContext) -> None:
    """It may be skipped because it never ends, or brings its process down."""
    asked: list[str] = []
    post = Worker.post

    def noted(worker: Worker, function: Callable[..., Any], /, **arguments: Any) -> int:
        asked.extend(arguments.get("names", ()))
        return post(worker, function, **arguments)

    monkeypatch.setattr(Worker, "post", noted)
    passes.optimize(attention(), recipe=["default"], skip=["fuse_qkv"], context=context)
    assert "eliminate_deadend" in asked
    assert "fuse_qkv" not in asked
