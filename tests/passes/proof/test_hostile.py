"""Hostile passes: what is wrong at one size, in one row or beyond one limit is reverted, or said to be open."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest

import passes
from passes import PassRun, Status
from passes.context import PassContext
from tests.support.onnx_models import matrix, model_of
from tests.support.paths import TESTS

PASSES = TESTS / "support" / "hostile_passes.py"


def run(model: onnx.ModelProto, context: PassContext, *steps: tuple[str, Mapping[str, Any]], **options: Any) -> PassRun:
    recipe = [{f"{PASSES}:{name}": dict(arguments)} for name, arguments in steps]
    return passes.optimize(model, recipe=recipe, context=context, **options)


def statuses(run_result: PassRun) -> list[tuple[str, Status]]:
    return [(row.name, row.status) for row in run_result.rows]


def gaps(run_result: PassRun) -> list[str]:
    """What is not covered, but for the sizes and numbers that no draw has."""
    return [gap for gap in run_result.coverage.not_covered if not gap.startswith(("sizes of open", "numbers outside"))]


def all_reverted(*steps: tuple[str, Mapping[str, Any]]) -> list[tuple[str, Status]]:
    return [(name, Status.REVERTED) for name, _ in steps]


NETWORK = """
g (float[batch, sequence, 4] x) => (float[batch, sequence, 4] y) {
    h = MatMul (x, w1)
    t = Tanh (h)
    y = MatMul (t, w2)
}
"""


def network(text: str = NETWORK) -> onnx.ModelProto:
    return model_of(text, w1=matrix(4, 4, 0), w2=matrix(4, 4, 1))


SIZES = (
    ("at_size", {"axis": 0, "size": 1}),
    ("at_size", {"axis": 0, "size": 8}),
    ("at_size", {"axis": 1, "size": 1}),
    ("at_size", {"axis": 1, "size": 8}),
    ("at_size", {"axis": 0, "size": 1, "value": "h", "node": 1}),
    ("at_size", {"axis": 0, "size": 3}),
    ("at_size", {"axis": 0, "size": 4}),
    ("at_size", {"axis": 0, "size": 7}),
    ("at_size", {"axis": 0, "size": 9}),
)


def test_what_is_wrong_at_a_size_that_is_drawn_is_reverted(context: PassContext) -> None:
    result = run(network(), context, *SIZES)
    assert statuses(result) == all_reverted(*SIZES)
    assert result.coverage.sizes == {"batch": (1, 2, 3, 4, 7, 8, 9), "sequence": (1, 2, 4, 7, 8, 13)}
    said = "sizes of open dims other than those drawn: batch 1, 2, 3, 4, 7, 8, 9; sequence 1, 2, 4, 7, 8, 13"
    assert said in result.coverage.not_covered


def test_a_size_that_is_not_drawn_is_not_in_the_coverage_and_can_be_asked_for(context: PassContext) -> None:
    step = ("at_size", {"size": 5})
    result = run(network(), context, step)
    assert result.rows[0].status is Status.RAN and 5 not in result.coverage.sizes["batch"]
    result = run(network(), context, step, sizes=[5])
    assert statuses(result) == all_reverted(step)
    assert result.coverage.sizes == {"batch": (2, 3, 5), "sequence": (2, 4, 5)}


POSITIONS = """
g (float[batch, sequence, 4] x) => (float[batch, sequence, 4] y) {
    shape = Shape <start = 1, end = 2> (x)
    p = Slice (positions, zero, shape, zero)
    h = Add (x, p)
    y = MatMul (h, w1)
}
"""


def test_a_size_that_the_model_does_not_bear_is_left_out_and_said(context: PassContext) -> None:
    """There are six positions, so a sequence of 8 is none; the batch is drawn as 8 all the same."""
    model = model_of(POSITIONS, w1=matrix(4, 4, 0), positions=matrix(6, 4, 1), zero=np.array([0]))
    steps = (("at_size", {"size": 8}), ("at_size", {"size": 1}), ("at_size", {"axis": 1, "size": 1}))
    result = run(model, context, *steps)
    assert statuses(result) == all_reverted(*steps)
    assert result.coverage.sizes == {"batch": (1, 2, 3, 4, 7, 8, 9), "sequence": (1, 2, 4)}
    [note] = [gap for gap in result.coverage.not_covered if "sequence=8" in gap]
    assert note.startswith("not drawn: sequence=8 (the model does not run on it: onnxruntime stopped")


def test_large_inputs_have_no_large_batches(context: PassContext) -> None:
    result = run(network(NETWORK.replace("sequence", "2000")), context, ("at_size", {"size": 2}))
    assert result.coverage.sizes == {"batch": (1, 2, 3, 8)}


def test_fixed_dims_have_no_further_draws(context: PassContext) -> None:
    result = run(network(NETWORK.replace("batch, sequence", "2, 3")), context, ("at_size", {"size": 2}))
    assert [row.status for row in result.rows] == [Status.REVERTED]
    assert result.coverage.draws == ("draw 0", "draw 1 (floats of ten times their range)")


LIMITS = """
g (float[2, 4] x) => (float[2, 4] clipped, float[2, 4] least, float[2, 4] most, float[2, 4] sigmoid, float[2, 4] swish,
                      float[2, 4] chosen) {
    h = MatMul (x, w1)
    clipped = Clip (h, low, high)
    least = Min (x, high)
    most = Max (low, x)
    six = Mul (x, half)
    sigmoid = HardSigmoid (six)
    swish = HardSwish (x)
    large = Greater (x, high)
    chosen = Where (large, high, x)
}
"""


def limits() -> onnx.ModelProto:
    bounds = {"low": np.float32(-4), "high": np.float32(4), "half": np.float32(0.5)}
    return model_of(LIMITS, w1=matrix(4, 4, 0), **{name: np.asarray(bound) for name, bound in bounds.items()})


def test_what_acts_beyond_the_usual_range_cannot_be_dropped(context: PassContext) -> None:
    steps = (
        ("drop", {"output": "clipped"}),
        ("drop", {"output": "least"}),
        ("drop", {"output": "sigmoid"}),
        ("drop", {"output": "swish"}),
        ("beyond", {"limit": 5.0}),
    )
    result = run(limits(), context, *steps)
    assert statuses(result) == all_reverted(*steps)
    seen = {limit.node: (limit.below, limit.above, limit.inside) for limit in result.coverage.limits}
    assert seen == {
        "clipped": (True, True, True),
        "least": (None, True, True),
        "most": (True, None, True),
        "sigmoid": (True, True, True),
        "swish": (True, True, True),
        "chosen": (True, True, False),
    }
    assert result.coverage.outliers == ("x",)


def test_a_limit_that_no_draw_reaches_is_said_to_be_open(context: PassContext) -> None:
    text = "g (float[2, 4] x) => (float[2, 4] y) { y = Clip (x, low, high) }"
    model = model_of(text, low=np.asarray(np.float32(-100)), high=np.asarray(np.float32(3)))
    result = run(model, context, ("drop", {"output": "y"}))
    assert result.rows[0].status is Status.REVERTED
    assert gaps(result) == ["Clip 'y': no value is below its lower limit"]


@pytest.mark.parametrize("op", ["Relu", "Abs", "LeakyRelu", "Elu", "Softplus"])
def test_an_op_that_changes_what_is_below_zero_alone_is_said_to_be_open(op: str, context: PassContext) -> None:
    text = f"g (float[2, 4] x) => (float[2, 4] y) {{ h = Add (x, far) r = {op} (h) y = Neg (r) }}"
    result = run(model_of(text, far=np.asarray(np.float32(20))), context, ("drop", {"output": "r"}))
    assert result.rows[0].status is Status.RAN
    assert gaps(result) == [f"{op} 'r': no value is below its lower limit"]


def test_what_every_value_goes_beyond_is_said_to_be_open(context: PassContext) -> None:
    text = "g (float[2, 4] x) => (float[2, 4] y) { h = Sub (x, far) r = Relu (h) y = Add (r, x) }"
    result = run(model_of(text, far=np.asarray(np.float32(20))), context)
    assert gaps(result) == ["Relu 'r': every value is beyond its limits"]


@pytest.mark.parametrize("asks", ["IsNaN (x)", "IsInf (x)", "Equal (x, seven)"])
def test_a_condition_that_never_holds_is_said_to_be_open(asks: str, context: PassContext) -> None:
    text = f"g (float[2, 4] x) => (float[2, 4] y) {{ c = {asks} r = Where (c, seven, x) y = Neg (r) }}"
    result = run(model_of(text, seven=np.asarray(np.float32(7))), context)
    assert gaps(result) == ["Where 'r': its condition is never true"]


def test_what_is_open_in_each_layer_is_said_once(context: PassContext) -> None:
    layers = " ".join(f"n{at} = IsNaN (x{at}) x{at + 1} = Where (n{at}, seven, x{at})" for at in range(5))
    text = f"g (float[2, 4] x) => (float[2, 4] y) {{ x0 = Neg (x) {layers} y = Neg (x5) }}"
    result = run(model_of(text, seven=np.asarray(np.float32(7))), context)
    assert gaps(result) == ["Where 'x1', 'x2', 'x3' and 2 more: its condition is never true"]


def test_a_condition_on_sizes_is_no_gap(context: PassContext) -> None:
    text = """
    g (float[N, 4] x) => (float[N, 4] y) {
        s = Shape (x) c = Equal (s, seven) t = Where (c, seven, s) y = Reshape (x, t)
    }
    """
    assert gaps(run(model_of(text, seven=np.asarray(7)), context)) == []


def test_pictures_of_bytes_are_drawn_over_their_whole_range(context: PassContext) -> None:
    text = "g (uint8[N, 3] x) => (float[N, 3] y) { f = Cast <to = 1> (x) y = Mul (f, part) }"
    step = ("beyond", {"value": "f", "limit": 200.0})
    result = run(model_of(text, part=np.asarray(np.float32(1 / 255))), context, step)
    assert statuses(result) == all_reverted(step)
    assert result.coverage.outliers == ("x",)


def test_outliers_that_the_model_does_not_bear_are_left_out(context: PassContext) -> None:
    result = run(
        model_of(
            "g (float[2, 4] x) => (float[2, 4] y) { a = Mul (x, big) y = Exp (a) }", big=np.asarray(np.float32(60))
        ),
        context,
        ("drop", {"output": "a"}),
    )
    assert result.rows[0].status is Status.REVERTED
    assert result.coverage.outliers == ()
    assert result.coverage.not_covered[0] == (
        "not drawn: floats of ten times their range (output 'y' is not finite there)"
    )


MASKED = """
g (float[2, 6] x, int64[2, 6] mask, bool[2, 6] also) => (float[2, 6] y) {
    m = Cast <to = 1> (mask)
    a = Mul (x, m)
    n = Cast <to = 1> (also)
    y = Mul (a, n)
}
"""


def test_masks_are_all_ones_and_all_zeros_too(context: PassContext) -> None:
    steps = (
        ("where_all", {"value": "mask", "are": 1}),
        ("where_all", {"value": "mask", "are": 0}),
        ("where_all", {"value": "also", "are": 1}),
        ("where_all", {"value": "also", "are": 0}),
        ("drop", {"output": "a"}),
    )
    result = run(model_of(MASKED), context, *steps)
    assert statuses(result) == all_reverted(*steps)
    assert result.coverage.masks == {"mask": ("mixed", "ones", "zeros"), "also": ("mixed", "ones", "zeros")}


def test_a_mask_that_leaves_nothing_is_left_out_where_the_model_gives_nan(context: PassContext) -> None:
    text = """
    g (float[2, 6] x, int64[2, 6] mask) => (float[2, 6] y) {
        m = Cast <to = 1> (mask)
        a = Mul (x, m)
        all = Constant <value_ints = [0, 1]> ()
        s = ReduceSum (m, all)
        t = Div (s, s)
        y = Mul (a, t)
    }
    """
    result = run(model_of(text), context, ("where_all", {"value": "mask", "are": 1}))
    assert statuses(result) == [("where_all", Status.REVERTED)]
    assert result.coverage.masks == {"mask": ("mixed", "ones")}
    assert gaps(result) == ["not drawn: masks of zeros (output 'y' holds NaN there)"]


BRANCHES = """
g (float[2, 4] x) => (float[2, 4] y) {
    least = ReduceMin <keepdims = 0> (x)
    low = Constant <value_float = -50.0> ()
    rare = Less (least, low)
    y = If (rare) <
        then_branch = rare_one () => (float[2, 4] a) { one = Constant <value_float = 1.0> () a = Add (x, one) },
        else_branch = usual () => (float[2, 4] b) { two = Constant <value_float = 2.0> () b = Add (x, two) }
    >
}
"""


def test_a_branch_that_no_draw_takes_is_said_to_be_open(context: PassContext) -> None:
    result = run(
        model_of(BRANCHES),
        context,
        ("other_body", {"attribute": "else_branch"}),
        ("other_body", {"attribute": "then_branch"}),
    )
    assert [row.status for row in result.rows] == [Status.REVERTED, Status.RAN]
    assert [(branch.then_taken, branch.else_taken) for branch in result.coverage.branches] == [(False, True)]
    assert gaps(result) == ["If 'y': no draw takes its then branch"]


LOOP = """
g (int64 turns, float[2] x) => (float[2] y) {
    yes = Constant <value = bool {1}> ()
    y = Loop (turns, yes, x) <
        body = step (int64 i, bool before, float[2] v) => (bool after, float[2] w) {
            after = Identity (before)
            c = Constant <value_float = 1.5> ()
            w = Add (v, c)
        }
    >
}
"""


def test_numbers_beyond_those_drawn_are_not_covered(context: PassContext) -> None:
    """No Where or comparison says that a pass acts at large numbers alone: Floor, Mod or Exp do so as well."""
    text = """g (float[2, 2] x, int64[2] k, int64[2, 2] attention_mask) => (float[2, 2] y) {
        f = Cast <to = 1> (k) m = Cast <to = 1> (attention_mask) a = Add (x, f) y = Mul (a, m)
    }"""
    [said] = [gap for gap in run(model_of(text), context).coverage.not_covered if gap.startswith("numbers outside")]
    assert re.fullmatch(r"numbers outside of those drawn: x -\d\.\d+ to \d\.\d+; k 0 to 999", said)


def test_the_turns_of_a_loop(context: PassContext) -> None:
    result = run(model_of(LOOP), context, ("other_body", {"op": "Loop", "attribute": "body"}))
    assert result.rows[0].status is Status.REVERTED
    [loop] = result.coverage.loops
    assert {0, 1, 4} <= set(loop.turns) <= set(range(8))
    assert gaps(result) == []


def test_a_small_term_inside_of_a_body_is_said_to_be_open(context: PassContext) -> None:
    text = LOOP.replace("w = Add (v, c)", "t = Tanh (v) s = Mul (t, c) w = Add (v, s)")
    result = run(model_of(text), context, ("other_body", {"op": "Loop", "attribute": "body"}))
    assert gaps(result) == ["not measured: 1 node inside of If, Loop, Scan and functions"]


DIVIDES = """
g (float[N, 2] x) => (float[N, 2] y) {
    size = Shape <start = 0, end = 1> (x)
    left = Sub (size, nine)
    part = Div (least, left)
    f = Cast <to = 1> (part)
    one = Div (f, f)
    y = Mul (x, one)
}
"""


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="where no signal says that it divides by zero"
)
def test_a_model_that_brings_the_process_down_at_a_further_size_is_proven_at_the_first_ones(
    context: PassContext,
) -> None:
    """The least whole number by -1 has no result, and onnxruntime ends with SIGFPE (1.31)."""
    model = model_of(DIVIDES, nine=np.array([9]), least=np.array([-(2**63)]))
    result = run(model, context, ("at_size", {"size": 2}))
    assert [row.status for row in result.rows] == [Status.REVERTED]
    assert result.coverage.sizes == {"N": (2,)}
    [note] = [gap for gap in result.coverage.not_covered if gap.startswith("not drawn")]
    assert note.startswith("not drawn: other sizes, outliers and masks of one number (on one of them the model")
