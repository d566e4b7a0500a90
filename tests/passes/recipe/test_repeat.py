"""Fixed points are spelled out in the recipe, and every turn has its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest

import passes
from passes import PolicyError
from passes.context import PassContext
from passes.optimize import draw_feeds
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.recipe.recipe import steps_of
from passes.run.runner import run_passes
from passes.step import PassResult, Repeat, Step
from passes.weights.detached import DetachedModel
from tests.support.onnx_models import detached, model_of

CHAIN = """
g (float[2, 8] x) => (float[2, 8] y) {
    a = Transpose <perm = [1, 0]> (x)
    b = Transpose <perm = [1, 0]> (a)
    c = Add (b, zero)
    d = Transpose <perm = [1, 0]> (c)
    e = Transpose <perm = [1, 0]> (d)
    y = Relu (e)
}
"""
STEPS = ["fuse_consecutive_transposes", "eliminate_nop_transpose", "eliminate_nop_with_unit", "eliminate_deadend"]


def run(recipe: list, context: PassContext) -> passes.PassRun:
    return passes.optimize(model_of(CHAIN, zero=np.zeros(8, np.float32)), recipe=recipe, context=context)


def ops(of: passes.PassRun) -> list[str]:
    return [node.op_type for node in of.model.proto.graph.node]


def test_turns_go_on_until_one_changes_nothing(context: PassContext) -> None:
    result = run([{"sequence": {"steps": STEPS, "repeat": "until-stable"}}], context)
    assert ops(result) == ["Relu"]
    turns = max(row.turn for row in result.rows)
    assert turns > 1
    assert len(result.rows) == turns * len(STEPS)
    assert not any(row.changed for row in result.rows if row.turn == turns)
    assert all(any(row.changed for row in result.rows if row.turn == turn) for turn in range(1, turns))


def test_a_step_alone_may_repeat(context: PassContext) -> None:
    result = run([{"fuse_consecutive_transposes": {"repeat": "until-stable"}}], context)
    assert [row.turn for row in result.rows] == list(range(1, len(result.rows) + 1))
    assert not result.rows[-1].changed
    assert result.rows[-1].reason == ""


def test_without_repeat_every_step_runs_once(context: PassContext) -> None:
    assert [row.turn for row in run(STEPS, context).rows] == [1] * len(STEPS)


def test_default_may_repeat_too() -> None:
    (item,) = steps_of([{"default": {"repeat": "until-stable"}}])
    assert isinstance(item, Repeat)
    assert len(item.steps) == len(steps_of(["default"]))


def test_a_row_tells_which_ops_are_more_or_fewer(context: PassContext) -> None:
    unlinked, removed = run(["eliminate_nop_with_unit", "eliminate_deadend"], context).rows
    assert (unlinked.changed, unlinked.diff) == (True, {}), "it leaves the dead Add where it is"
    assert (removed.changed, removed.diff) == (True, {"Add": -1})


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"nop": {"repeat": "twice"}}, "nop: repeat is 'twice'; expected 'until-stable'"),
        ({"sequence": {"repeat": "until-stable"}}, r"sequence: found \{\}, expected steps: a list"),
        ({"sequence": {"steps": []}}, "expected steps: a list"),
        ({"sequence": {"steps": ["nop"], "turns": 3}}, "expected steps: a list"),
        (
            {"sequence": {"steps": [{"nop": {"repeat": "until-stable"}}], "repeat": "until-stable"}},
            "sequence: found a repeat inside of a repeat",
        ),
    ],
)
def test_a_repeat_that_cannot_be_understood_is_a_mistake(item: dict, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        steps_of([item])


@dataclass(frozen=True)
class Toggle(Step):
    """Puts a dead node into the model, and takes it out again."""

    name: str = field(default="toggle", init=False)
    source: str = field(default="tests", init=False)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = onnx.ModelProto()
        proto.CopyFrom(model.proto)
        if proto.graph.node[-1].output[0] == "dead":
            del proto.graph.node[-1]
        else:
            proto.graph.node.append(onnx.helper.make_node("Neg", ["x"], ["dead"]))
        return PassResult(model.with_proto(proto))


def test_a_sequence_that_never_settles_ends(context: PassContext) -> None:
    model = detached(model_of(CHAIN, zero=np.zeros(8, np.float32)))
    prover = NumericProver.of_itself([draw_feeds(model, 0)], context)
    result = run_passes(model, [Repeat((Toggle(),), limit=4)], Policy(), prover, context)
    turns = [(row.turn, row.diff) for row in result.rows]
    assert turns == [(1, {"Neg": 1}), (2, {"Neg": -1}), (3, {"Neg": 1}), (4, {"Neg": -1})]
    assert [row.reason for row in result.rows] == ["", "", "", "not stable after 4 turns"]
