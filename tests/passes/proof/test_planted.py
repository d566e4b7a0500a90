"""A wrong rewrite is found wherever it is planted, also with a sound one, and after steps that a part has proven."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
import pytest

import passes
from passes import Status
from passes.context import PassContext
from passes.graph.index import copy_of
from tests.support.onnx_models import matrix, model_of
from tests.support.paths import TESTS

PASSES: Final = TESTS / "support" / "hostile_passes.py"

NETWORK = """
g (float[batch, 4] x, bool c, int64[1] turns) => (float[batch, 4] y, float[batch, 4] aside) {
    first = MatMul (x, w)
    i = Identity (first)
    branch = If (c) <
        then_branch = t () => (float[batch, 4] up) { up = Relu (i) },
        else_branch = e () => (float[batch, 4] down) { down = Neg (i) }
    >
    looped = Loop (turns, c, branch) <
        body = l (int64 at, bool on, float[batch, 4] s) => (bool on_out, float[batch, 4] s_out) {
            on_out = Identity (on)
            s_out = Add (s, s)
        }
    >
    j = Identity (looped)
    half = Cast <to = 10> (j)
    product = Add (half, half)
    middle = Cast <to = 1> (product)
    shape = Shape (middle)
    flat = Reshape (middle, one)
    same = Reshape (flat, shape)
    aside = Neg (same)
    y = Tanh (same)
}
"""

PLACES: Final = (
    ("first", "FLOAT"),
    ("up", "FLOAT"),
    ("down", "FLOAT"),
    ("s_out", "FLOAT"),
    ("product", "FLOAT16"),
    ("flat", "FLOAT"),
    ("aside", "FLOAT"),
    ("y", "FLOAT"),
)
"""Values at the first node, in either branch, in a body, of another dtype, and at the last node of each output."""


def network() -> onnx.ModelProto:
    return model_of(NETWORK, w=matrix(4, 4, 0) / np.float32(4), one=np.array([-1], np.int64))


def test_a_wrong_rewrite_is_found_at_each_place(context: PassContext) -> None:
    """The proof of a step never hides the fault of the next one: half of the wrong steps follow a sound one."""
    wrong = [{f"{PASSES}:nudge": {"value": value, "dtype": dtype}} for value, dtype in PLACES]
    both = [{f"{PASSES}:nudge": {"value": value, "dtype": dtype, "tidies": True}} for value, dtype in PLACES]
    recipe = [*wrong, *both, f"{PASSES}:drop_identities", "fold_constants", *wrong]
    feeds = [
        {"x": matrix(rows, 4, rows), "c": np.array(condition), "turns": np.array([2], np.int64)}
        for rows, condition in ((2, True), (3, False))
    ]
    run = passes.optimize(network(), recipe, feeds=feeds, context=context)

    count = len(PLACES)
    assert [row.status for row in run.rows[: 2 * count]] == [Status.REVERTED] * 2 * count
    assert run.rows[2 * count].status is Status.RAN and run.rows[2 * count].changed
    assert [row.status for row in run.rows[-count:]] == [Status.REVERTED] * count


@pytest.mark.parametrize("value", ["first", "down", "y"])
def test_the_last_step_is_judged_as_the_others(value: str, context: PassContext) -> None:
    before = network()
    run = passes.optimize(copy_of(before), [{f"{PASSES}:nudge": {"value": value}}], context=context)
    assert [row.status for row in run.rows] == [Status.REVERTED]
    assert "differs: " in run.rows[0].reason
    assert len(run.model.proto.graph.node) == len(before.graph.node)
