"""What inputs are drawn as: by name, dtype, range and example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import passes
from passes import Status
from passes.context import PassContext
from passes.errors import StepFailed
from passes.optimize import plan_draws
from passes.proof.draw_choice import Feeds, choose_draws
from passes.proof.draws import Draw, DrawnInput, DrawPlan, Trait
from passes.proof.numbers import compare
from tests.passes.proof.test_hostile import gaps, run
from tests.support.onnx_models import detached, matrix, model_of

MIXED = frozenset({Trait.ROWS, Trait.WIDE, Trait.EXACT})
LEAST = float(np.finfo(np.float32).min)


def drawn(name: str, shape: tuple[int, ...], dtype: str, *traits: Trait, seed: int = 1, **options: Any) -> np.ndarray:
    default = (-1.0, 1.0) if "float" in dtype else (0.0, 2.0)
    low, high = options.pop("range", default)
    known = DrawnInput(name, shape, dtype, low, high, name, is_assumed=(low, high) == default, **options)
    plan = DrawPlan((known,), ()).with_rows({})
    return plan.feeds(Draw(seed, {}, frozenset(traits)))[name]


@pytest.mark.parametrize("traits", [(), (Trait.OUTLIERS, Trait.EXACT)])
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "options", "values"),
    [
        ("attention_mask", (4, 16), "int64", {}, {0, 1}),
        ("attention_mask", (4, 16), "bool", {}, {0, 1}),
        ("mask", (4, 16), "float32", {}, {0, 1}),
        ("attention_mask", (2, 1, 8, 8), "float16", {}, {0, -30000}),
        ("causal_mask", (2, 1, 8, 12), "float32", {"range": (LEAST, 0.0)}, {0, LEAST}),
    ],
)
def test_masks_have_two_numbers_in_every_draw(
    name: str, shape: tuple[int, ...], dtype: str, options: dict[str, Any], values: set[float], traits: tuple[Trait]
) -> None:
    array = drawn(name, shape, dtype, *traits, **options)
    assert set(np.unique(array).tolist()) == values and array.dtype == dtype


def test_no_row_of_a_mask_hides_everything_from_a_window_of_two() -> None:
    mask = drawn("attention_mask", (64, 9), "int64")
    assert mask[:, 0].all() and (mask[:, 1:] | mask[:, :-1]).all() and not mask[:, -2].all()
    assert not drawn("key_padding_mask", (64, 9), "bool")[:, 0].any(), "here True hides"
    causal = drawn("attention_mask", (1, 1, 6, 9), "float32")[0, 0]
    assert (causal.diagonal(3) == 0).all() and (causal[np.triu_indices(6, 4, 9)] < 0).all()


@pytest.mark.parametrize("name", ["timestep", "t", "anything"])
@pytest.mark.parametrize("shape", [(), (1,), (5,)])
def test_whole_numbers_reach_the_ends_and_the_middle_of_a_thousand(name: str, shape: tuple[int, ...]) -> None:
    reached = {int(n) for seed in range(3) for n in drawn(name, shape, "int64", Trait.WIDE, seed=seed).flat}
    assert {0, 500, 999} <= reached and max(reached) < 1000


def test_steps_and_noise_levels_in_floats() -> None:
    steps = drawn("timestep", (6,), "float32", Trait.WIDE, Trait.OUTLIERS)
    assert {0.0, 500.0, 999.0} <= set(steps.tolist()) and (steps == steps.round()).all()
    assert 2 < drawn("sigma", (50,), "float32", Trait.WIDE, Trait.OUTLIERS).max() < 80


def test_exact_zeros_leave_the_extremes() -> None:
    plain, zeros = (drawn("x", (100,), "float32", *traits) for traits in ((), (Trait.EXACT,)))
    assert 0 < (zeros == 0).sum() < 20 and not (plain == 0).any()
    assert (zeros.min(), zeros.max()) == (plain.min(), plain.max())


def test_an_example_is_drawn_unless_a_trait_asks_for_other_numbers() -> None:
    grid = np.array([[1, 4, 6], [1, 2, 2]])
    options: dict[str, Any] = {"range": (1.0, 7.0), "example": grid}
    assert drawn("image_grid_thw", (2, 3), "int64", *MIXED, **options).tolist() == grid.tolist()
    assert drawn("image_grid_thw", (3, 3), "int64", *MIXED, **options).tolist() == [*grid.tolist(), grid[0].tolist()]
    steps = drawn("timestep", (3,), "int64", *MIXED, range=(5.0, 6.0), example=np.array([5]))
    assert set(steps.tolist()) == {0, 500, 999}


def test_traits_on_which_the_model_does_not_run_are_given_up_and_no_others() -> None:
    floats = DrawnInput("x", ("N", 64), "float32", -1.0, 1.0, "x", is_assumed=True)
    mask = DrawnInput("attention_mask", ("N", 8), "int64", 0.0, 2.0, "attention_mask", is_assumed=True)
    plan, said = DrawPlan((floats, mask), ({"N": 2},), second=({"N": 3},)).with_rows({}), list[str]()

    def run(feeds: Feeds) -> Feeds:
        if np.abs(feeds["x"]).max() > 2 or feeds["attention_mask"].all():
            raise StepFailed("it is not made for that")
        return {"y": feeds["x"]}

    second = next(draw for draw in choose_draws(plan, run, ["y"], said) if draw.draw.sizes["N"] == 3)
    assert second.draw.traits == {Trait.EXACT}
    assert [sentence.split(" (")[0] for sentence in said[:2]] == [
        "not drawn: floats of ten times their range",
        "not drawn: masks of ones",
    ]


HOSTILE = """
from onnx import TensorProto, helper


def zero_where_zero(model):
    last = model.graph.node[-1]
    last.output[0] = "right"
    model.graph.node.extend([
        helper.make_node("Constant", [], ["nought"], value_float=0.0),
        helper.make_node("Equal", ["x", "nought"], ["is_zero"]),
        helper.make_node("Constant", [], ["one"], value_float=1.0),
        helper.make_node("Where", ["is_zero", "one", "right"], ["y"]),
    ])
    return model


def clip_in_bodies(model):
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                first = attribute.g.node[0]
                first.output[0], result = "inner", first.output[0]
                attribute.g.node.append(helper.make_node("Clip", ["inner"], [result]))
    return model


def append(model, *, text):
    import numpy as np
    from onnx import numpy_helper, parser

    model.graph.node[-1].output[0] = "right"
    model.graph.node.extend(parser.parse_graph("g () => () {" + text + "}").node)
    values = {"nought": 0.0, "huge": -1e30, "table": [0.0] + [1.0] * 11}
    for name, value in values.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
    return model


def zero(model, *, name):
    import numpy as np
    from onnx import numpy_helper

    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(tuple(tensor.dims), np.float32), name))
    return model
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(HOSTILE)
    return str(tmp_path / "own.py")


def test_a_pass_that_is_wrong_at_exact_zeros_is_reverted(own: str, context: PassContext) -> None:
    model = model_of("g (float[2, 4] x) => (float[2, 4] y) { t = Tanh (x) y = Neg (t) }")
    [row] = passes.optimize(model, recipe=[f"{own}:zero_where_zero"], context=context).rows
    assert row.status is Status.REVERTED


DENOISER = """g (float[N, 4] x, int64[N] timestep) => (float[N, 4] y) {
    c = Cast <to = 1> (timestep) u = Unsqueeze (c, one) s = Sin (u) y = Add (x, s)
}"""


@pytest.mark.parametrize(("step", "status"), [(500, Status.REVERTED), (17, Status.RAN)])
def test_a_pass_that_is_wrong_at_one_step_is_reverted_or_said(step: int, status: Status, context: PassContext) -> None:
    result = run(model_of(DENOISER, one=np.array([1])), context, ("has_index", {"value": "timestep", "index": step}))
    assert result.rows[0].status is status
    said = [gap for gap in gaps(result) if "its condition is never true (a pass has brought it in)" in gap]
    assert len(said) == (status is Status.RAN)


IMAGES = "g (float[1, 1, h, w] x) => (float[1, 1, a, b] y) { c = Conv (x, k) y = Relu (c) }"


@pytest.mark.parametrize(("size", "status"), [(7, Status.REVERTED), (13, Status.REVERTED), (11, Status.RAN)])
def test_a_pass_that_is_wrong_at_one_size_is_reverted_or_said(size: int, status: Status, context: PassContext) -> None:
    model = model_of(IMAGES, k=np.ones((1, 1, 2, 2), np.float32))
    result = run(model, context, ("at_size", {"axis": 2, "size": size}))
    assert result.rows[0].status is status
    assert any("brought it in" in gap for gap in gaps(result)) == (status is Status.RAN)


BODY = """g (float[2, 4] x, bool on) => (float[2, 4] y) {
    h = MatMul (x, w)
    y = If (on) <
        then_branch = t () => (float[2, 4] a) { a = Tanh (h) },
        else_branch = e () => (float[2, 4] b) { b = Neg (h) }>
}"""


def test_what_a_pass_brings_into_a_body_is_not_covered(own: str, context: PassContext) -> None:
    model = model_of(BODY, w=matrix(4, 4, 0))
    result = passes.optimize(model, recipe=["eliminate_identity", {f"{own}:clip_in_bodies": {}}], context=context)
    assert result.rows[1].changed and result.rows[1].status is Status.RAN
    assert "not measured: 2 nodes inside of If, Loop, Scan and functions (a pass has brought it in)" in gaps(result)


FRACTION = "r = Round (x) f = Sub (x, r) a = Abs (f) m = ReduceMax <keepdims = 0> (a)"
GATES = {
    "condition": (f"{FRACTION} b = Cast <to = 9> (m) y = Where (b, right, nought)", "Cast 'b'"),
    "product": (f"{FRACTION} s = Sign (m) y = Mul (right, s)", "Sign 's'"),
    "underflow": (f"{FRACTION} h = Mul (m, huge) e = Exp (h) y = Add (right, e)", "Exp 'e'"),
    "index": (f"{FRACTION} c = Ceil (m) i = Cast <to = 7> (c) q = Gather (table, i) y = Mul (right, q)", "Ceil 'c'"),
    "rows": (
        "m = ReduceMax <keepdims = 0> (x) c = Ceil (m) i = Cast <to = 7> (c) q = Gather (table, i) y = Mul (right, q)",
        "Gather 'q'",
    ),
}


@pytest.mark.parametrize(("nodes", "said"), GATES.values(), ids=GATES)
def test_a_gate_of_a_pass_that_no_draw_opens_is_not_covered(
    nodes: str, said: str, own: str, context: PassContext
) -> None:
    """Each pass is wrong where all inputs are integers, or beyond the numbers drawn, without a comparison."""
    model = model_of("g (float[2, 4] x) => (float[2, 4] y) { y = Tanh (x) }")
    result = passes.optimize(model, recipe=[{f"{own}:append": {"text": nodes}}], context=context)
    assert result.rows[0].status is Status.RAN
    assert any(gap.startswith(said) and gap.endswith("(a pass has brought it in)") for gap in gaps(result))


def test_gates_that_open_are_not_named(own: str, context: PassContext) -> None:
    model = model_of("g (float[2, 4] x) => (float[2, 4] y) { y = Tanh (x) }")
    text = "c = Ceil (x) s = Sign (c) o = Abs (s) e = Exp (x) i = Mul (e, nought) j = Mul (o, i) y = Add (right, j)"
    result = passes.optimize(model, recipe=[{f"{own}:append": {"text": text}}], context=context)
    assert result.rows[0].status is Status.RAN
    assert [gap for gap in gaps(result) if "brought it in" in gap] == [
        "Mul 'i': the same number in every draw (a pass has brought it in)"
    ]


SCALED = """g (float[2, 8, 4] x) => (float[2, 8, 4] y) {
    h = MatMul (x, w1) t = Tanh (h) p = MatMul (t, w2) s = Mul (p, scale) a = Add (x, s)
    i = MatMul (a, w3) u = Tanh (i) y = Add (a, u)
}"""


@pytest.mark.parametrize("weight", ["w1", "w2", "w3", "scale"])
def test_a_block_after_a_scale_of_1e_5_is_compared_by_its_own_value(
    weight: str, own: str, context: PassContext
) -> None:
    weights = {f"w{place}": matrix(4, 4, place) for place in (1, 2, 3)}
    model = model_of(SCALED, **weights, scale=np.full(4, 1e-5, np.float32))
    result = passes.optimize(model, recipe=["default", {f"{own}:zero": {"name": weight}}], context=context)
    assert result.rows[-1].status is Status.REVERTED and result.power.weak == ("p",)


NO_RESIDUAL = """g (float[2, 8, 4] x) => (float[2, 8, 4] y) {
    b = MatMul (x, w3) h = MatMul (x, w1) t = Tanh (h) p = MatMul (t, w2) s = Mul (p, scale) RESULT
}"""


@pytest.mark.parametrize(
    "result", ["y = Add (b, s)", "y = Sub (b, s)", "g = Add (one, s) y = Mul (b, g)", "m = Add (s, b) y = Relu (m)"]
)
def test_a_tiny_term_that_is_no_residual_is_compared_by_its_own_value(
    result: str, own: str, context: PassContext
) -> None:
    weights = {f"w{place}": matrix(4, 4, place) for place in (1, 2, 3)}
    weights |= {"scale": np.full(4, 1e-5, np.float32), "one": np.array([1], np.float32)}
    model = model_of(NO_RESIDUAL.replace("RESULT", result), **weights)
    for weight in ("w1", "w2", "scale"):
        run = passes.optimize(model, recipe=[{f"{own}:zero": {"name": weight}}], context=context)
        assert run.rows[-1].status is Status.REVERTED and run.power.weak == ("p",)


def test_scores_are_not_weak_next_to_a_mask(context: PassContext) -> None:
    text = """g (float[2, 8, 8] x, float[2, 8, 8] mask) => (float[2, 8, 8] y) {
        t = Tanh (x) m = Neg (mask) s = Add (t, m) r = Identity (s) y = Softmax (r)
    }"""
    mask = np.triu(np.full((2, 8, 8), 1e30, np.float32), 1)
    feeds = [{"x": matrix(16, 8, 0).reshape(2, 8, 8), "mask": mask}]
    assert passes.optimize(model_of(text), ["eliminate_identity"], feeds=feeds, context=context).power.weak == ()


def test_a_block_with_a_tiny_weight_is_compared_by_its_own_value(own: str, context: PassContext) -> None:
    weights = {"w1": matrix(4, 4, 1), "w2": matrix(4, 4, 2) * np.float32(2e-5), "w3": matrix(4, 4, 3)}
    text = SCALED.replace("s = Mul (p, scale) a = Add (x, s)", "a = Add (x, p)")
    for weight in ("w1", "w2"):
        recipe = ["default", {f"{own}:zero": {"name": weight}}]
        assert passes.optimize(model_of(text, **weights), recipe=recipe, context=context).rows[-1].status is (
            Status.REVERTED
        )


def test_one_step_of_a_quantizer_is_allowed_and_more_is_not() -> None:
    numbers = np.array([0, 100, -127], np.int8)
    assert compare(numbers, numbers + np.int8(1), computed_in="8-bit steps").ok
    assert not compare(numbers, numbers + np.int8(3), computed_in="8-bit steps").ok
    assert not compare(numbers, numbers + np.int8(1)).ok, "integers that no quantizer made are equal or wrong"
    floats = np.linspace(-1, 1, 255, dtype=np.float32)
    assert compare(floats, floats + np.float32(1 / 127), computed_in="8-bit steps").ok
    assert not compare(floats, floats + np.float32(2 / 127), computed_in="8-bit steps").ok


@pytest.mark.parametrize(("dtype", "opset"), [("bfloat16", 20), ("float", 27)])
def test_onnx_evaluates_what_onnxruntime_has_no_kernel_for(dtype: str, opset: int, context: PassContext) -> None:
    text = f"""<ir_version: 10, opset_import: ["": {opset}]>
    g ({dtype}[N, 4] x) => ({dtype}[N, 4] y) {{ c = Identity (x) a = Tanh (c) y = Neg (a) }}"""
    result = passes.optimize(onnx.parser.parse_model(text), recipe=["eliminate_identity"], context=context)
    assert result.rows[0].changed and result.rows[0].status is Status.RAN


LENGTHS = """
g (float[4, 2, 3] x, int64[2] lengths) => (float[1, 2, 5] y) {
    falling, places = TopK (lengths, two)
    steps = Cast <to = 6> (falling)
    s, y = GRU <hidden_size = 5> (x, w, r, , steps)
}
"""


def test_no_sequence_of_a_recurrent_operator_has_the_length_zero() -> None:
    """onnxruntime does not write what it computes of no step: those rows would be what lies in memory."""
    weights = {"w": matrix(15, 3, 0)[None], "r": matrix(15, 5, 1)[None], "two": np.array([2])}
    plan = plan_draws(detached(model_of(LENGTHS, **weights)))
    draws = [Draw(seed, {}, frozenset({trait})) for seed in range(8) for trait in Trait]
    assert {int(length) for draw in draws for length in plan.feeds(draw)["lengths"]} == {1, 2}
