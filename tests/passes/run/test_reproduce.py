"""A step that brings its worker down leaves a small model behind, on which it still does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import onnx

import passes
from passes import Status
from passes.context import PassContext
from passes.optimize import draw_feeds
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.run.reproduce import smallest
from passes.run.runner import run_passes
from passes.step import PassResult, Step
from passes.weights.detached import DetachedModel
from tests.support import worker_faults as faults
from tests.support.onnx_models import attention, detached, matrix, model_of, op_types


@dataclass(frozen=True)
class DiesOfSoftmax(Step):
    """Brings the worker down as soon as a model has a Softmax, as native code may."""

    name: str = field(default="dies", init=False)
    source: str = field(default="tests", init=False)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        if any(node.op_type == "Softmax" for node in model.proto.graph.node):
            context.worker.call(faults.die)
        return PassResult(model, changed=False)


def test_a_crash_leaves_the_smallest_model_on_which_it_comes_again(tmp_path: Path, context: PassContext) -> None:
    model = detached(attention())
    prover = NumericProver.of_itself([draw_feeds(model, 0)], context)
    run = run_passes(model, [DiesOfSoftmax()], Policy(), prover, context, reproducers=tmp_path)
    (row,) = run.rows
    assert (row.status, row.reproducer) == (Status.CRASHED, "dies.onnx")
    assert "SIGABRT" in row.reason
    saved = onnx.load(tmp_path / row.reproducer)
    onnx.checker.check_model(saved)
    assert op_types(saved) == ["Softmax"]
    assert len(run.model.proto.graph.node) == len(attention().graph.node), "the model is the one from before"


def test_a_real_crash_of_onnxoptimizer(tmp_path: Path, context: PassContext) -> None:
    """fuse_qkv aborts with an assertion when Q, K and V read a graph input; what else is in the model is left out."""
    text = """
    g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
        q = MatMul (x, wq)
        k = MatMul (x, wk)
        v = MatMul (x, wv)
        a = Relu (q)
        b = Add (a, k)
        c = Add (b, v)
        d = Neg (c)
        e = Abs (d)
        y = Sigmoid (e)
    }
    """
    model = model_of(text, **{name: matrix(32, 32, seed) for seed, name in enumerate(("wq", "wk", "wv"))})
    run = passes.optimize(model, recipe=["fuse_qkv"], reproducers=tmp_path, context=context)
    (row,) = run.rows
    if row.status is Status.CRASHED:
        assert op_types(onnx.load(tmp_path / row.reproducer)) == ["MatMul", "MatMul", "MatMul"]
    else:  # a release that raises has said in words what it does not take
        assert row.status is Status.FAILED and row.reason


def test_nothing_is_written_when_nothing_breaks_down(tmp_path: Path, context: PassContext) -> None:
    passes.optimize(attention(), recipe=["default"], reproducers=tmp_path / "none", context=context)
    assert not (tmp_path / "none").exists()


def test_what_two_places_cause_together_keeps_both() -> None:
    text = "g (float[4] x) => (float[4] y) { a = Relu (x) b = Neg (a) c = Abs (b) d = Exp (c) y = Sigmoid (d) }"
    part = smallest(detached(model_of(text)), lambda part: {"Neg", "Sigmoid"} <= set(op_types(part.proto)))
    assert op_types(part.proto) == ["Neg", "Sigmoid"]
    assert [info.name for info in part.proto.graph.input] == ["a", "d"]
    assert [info.name for info in part.proto.graph.output] == ["b", "y"]
    onnx.checker.check_model(part.proto)
