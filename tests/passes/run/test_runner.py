"""The loop over steps: what is taken, narrowed, reverted, and found guilty at the end."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import passes
from passes import PassRow, PassRun, Status
from passes.context import PassContext
from passes.errors import StepFailed
from passes.graph.index import replace_entries
from passes.model.analysis import AnalyzedModel
from passes.optimize import draw_feeds
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.proof.prover import Measurement
from passes.run.runner import run_passes
from passes.step import CompositeStep, PassResult, Step
from passes.weights.detached import DetachedModel
from tests.support.onnx_models import attention, biased_attention, detached, matrix, model_of
from tests.support.pass_runs import models_left_by, ops, row


def test_a_pass_that_does_nothing_has_not_changed_the_model(context: PassContext) -> None:
    run = passes.optimize(attention(), recipe=["nop", "eliminate_identity"], context=context)
    assert [(row.status, row.changed) for row in run.rows] == [(Status.RAN, False)] * 2


def test_unchanged_outputs_are_the_reference_for_every_change(context: PassContext) -> None:
    run = passes.optimize(
        attention(), recipe=["fold_constants", "infer_shapes", "onnxscript", "default"], context=context
    )
    assert all(row.status is Status.RAN for row in run.rows), [row for row in run.rows if row.reason]
    assert all(errors.ok for row in run.rows for errors in row.errors.values())


def test_threads_that_share_a_context_take_turns(context: PassContext) -> None:
    with ThreadPoolExecutor() as pool:
        run = partial(passes.optimize, recipe=["default", "onnxsim"], keep=["qkv"], context=context)
        runs = [*pool.map(run, [attention(), biased_attention()] * 2)]
    assert [ops(run) for run in runs[:2]] == [ops(run) for run in runs[2:]]
    assert all(kept.kept for run in runs for kept in run.structures)


@pytest.mark.parametrize("recipe", ["default", "onnxsim", "split-qkv"])
def test_a_run_leaves_no_model_to_the_collector(recipe: str, context: PassContext) -> None:
    run = partial(passes.optimize, biased_attention(), recipe=[recipe], keep=["qkv?"], context=context)
    assert models_left_by(run) == 0


def test_metadata_is_carried_and_authors_are_named(context: PassContext) -> None:
    model = attention()
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'block', 'call']")
    run = passes.optimize(model, recipe=["fuse_qkv", "eliminate_deadend"], context=context)
    metadata = {node.op_type: {e.key: e.value for e in node.metadata_props} for node in run.model.proto.graph.node}
    assert metadata["Softmax"] == {"pkg.torch.onnx.name_scopes": "['', 'block', 'call']"}
    assert metadata["Split"]["onnxline.pass"] == "fuse_qkv"


ENDLESS = """
import time

def endless(model):
    time.sleep(600)
"""


def test_a_time_limit_costs_a_step_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    recipe = [f"{tmp_path / 'endless.py'}:endless", "infer_shapes"]
    run = passes.optimize(attention(), recipe=recipe, timeout_s=3)
    assert [row.status for row in run.rows] == [Status.TIMED_OUT, Status.RAN]
    assert "ran past 3 s and was stopped (timeout_s)" in run.rows[0].reason


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


@dataclass(frozen=True)
class Merging(Harmful):
    """Its inner pass, which is known to merge Q, K and V, merges the products with `pa` and `pb` only."""

    merges_siblings: ClassVar[bool] = True
    name: str = field(default="merging", init=False)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = model.copy_proto()
        pair = [node for node in proto.graph.node if set(node.input) & {"pa", "pb"}]
        if "fuse_qkv" in self.left_out or len(pair) < 2:
            return PassResult(model, changed=False)
        both = np.concatenate([model.array(model.index.initializers[name]) for name in ("pa", "pb")], 1)
        proto.graph.initializer.append(numpy_helper.from_array(both, "pab"))
        joined = onnx.helper.make_node("MatMul", [pair[0].input[0], "pab"], ["joined"])
        halves = onnx.helper.make_node("Split", ["joined"], [node.output[0] for node in pair], axis=-1, num_outputs=2)
        at = list(proto.graph.node).index(pair[0])
        kept = [node for node in proto.graph.node if node not in pair]
        replace_entries(proto.graph.node, [*kept[:at], joined, halves, *kept[at:]])
        return PassResult(model.with_proto(proto))

    def inner(self, context: PassContext) -> tuple[str, ...]:
        return ("fuse_qkv",)


def test_products_that_nobody_keeps_are_merged_next_to_what_is_kept(context: PassContext) -> None:
    """Pins are wide at once, and merging passes left out, only where these passes have nothing else to merge."""
    model = biased_attention(32)
    model.opset_import[0].version = 20
    graph, (result,) = model.graph, model.graph.output
    for name, seed in (("pa", 7), ("pb", 8)):
        graph.initializer.append(numpy_helper.from_array(matrix(32, 32, seed), name))
        graph.node.append(onnx.helper.make_node("MatMul", [result.name, name], [f"of_{name}"]))
    graph.node.append(onnx.helper.make_node("Add", ["of_pa", "of_pb"], ["sum"]))
    result.name = "sum"
    before = detached(model)
    prover = NumericProver.of_itself([draw_feeds(before, 0)], context)
    run = run_passes(before, [Merging()], Policy(keep=("qkv",)), prover, context)
    assert run.structures[0].kept
    assert ops(run)["Split"] == 1


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

    def run(self, model: AnalyzedModel, *, hold: bool = True) -> Measurement:
        if not any("b" in node.output for node in model.model.proto.graph.node):
            raise StepFailed("there is no b")
        return super().run(model, hold=hold)


def test_if_the_final_model_is_wrong_the_first_guilty_step_is_found(context: PassContext) -> None:
    text = "g (float[2] x) => (float[2] y) { a = Identity (x) b = Identity (a) c = Identity (b) y = Neg (c) }"
    model = detached(model_of(text))
    prover = Suspicious.of_itself([draw_feeds(model, 0)], context)
    shown: dict[int, tuple[PassRow, int, int]] = {}

    def note(place: int, row: PassRow, before: AnalyzedModel, after: AnalyzedModel) -> None:
        shown[place] = (row, before.size[0], after.size[0])

    run = run_passes(model, [Without("a"), Without("b"), Without("c")], Policy(), prover, context, on_change=note)
    assert [(row.name, row.status, row.reason) for row in run.rows] == [
        ("without_a", Status.RAN, ""),
        ("without_b", Status.REVERTED, "run as a whole: there is no b"),
        ("without_c", Status.RAN, ""),
    ]
    assert [node.output[0] for node in run.model.proto.graph.node] == ["b", "y"]
    judged = {place: (row.status, before, after) for place, (row, before, after) in shown.items()}
    assert judged == {0: (Status.RAN, 4, 3), 1: (Status.REVERTED, 3, 2), 2: (Status.RAN, 3, 2)}, "as it was judged last"
