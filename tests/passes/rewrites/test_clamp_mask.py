"""Clamping of masks: before and after as pictures, and softmax rows by onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnxruntime
import pytest

import passes
from passes import PassRun, PolicyError
from passes.context import PassContext
from passes.recipe.recipe import steps_of
from passes.rewrites.clamp_mask import ClampMask
from passes.weights.detached import attach
from tests.support.onnx_models import detached, model_of
from tests.support.onnx_text import body

Clamp = Callable[..., onnx.ModelProto]


@pytest.fixture
def clamped(context: PassContext) -> Clamp:
    def clamp(model: onnx.ModelProto, **options: float) -> onnx.ModelProto:
        return attach(ClampMask(**options).apply(detached(model), context).model)

    return clamp


def numbers_of(model: onnx.ModelProto) -> dict[str, list[float]]:
    tensors = model.graph.initializer
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}
    return {name: array.reshape(-1).tolist() for name, array in arrays.items() if array.dtype.kind == "f"}


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    [output] = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, dict(feeds))
    return np.asarray(output)


HEAD = "g (float[2, 4, 4] scores, bool[2, 1, 4] kept) => (float[2, 4, 4] y)"
LOWEST = -3.4028234663852886e38

PICTURES = {
    "a choice of 0 and the constant becomes one of scores and bound": (
        "zero = Constant <value_float = 0.0> () big = Constant <value_float = -3.4028235e38> () "
        "mask = Where (kept, zero, big) sum = Add (scores, mask) y = Softmax <axis = -1> (sum)",
        ["sum = Where (kept, scores, big)", "y = Softmax (sum)"],
        {"big": [-30.0]},
    ),
    "the other way round": (
        "zero = Constant <value_float = 0.0> () big = Constant <value_float = -3.4028235e38> () "
        "mask = Where (kept, big, zero) sum = Add (mask, scores) y = Softmax <axis = -1> (sum)",
        ["sum = Where (kept, big, scores)", "y = Softmax (sum)"],
        {"big": [-30.0]},
    ),
    "scores are chosen already": (
        "big = Constant <value_float = -inf> () x = Where (kept, scores, big) y = Softmax <axis = -1> (x)",
        ["x = Where (kept, scores, big)", "y = Softmax (x)"],
        {"big": [-30.0]},
    ),
    "one less the mask, times a number": (
        "one = Constant <value_float = 1.0> () big = Constant <value_float = -10000.0> () m = Cast <to = 1> (kept) "
        "n = Sub (one, m) mask = Mul (n, big) sum = Add (scores, mask) y = Softmax <axis = -1> (sum)",
        [
            *("one = Constant ()", "m = Cast (kept)", "n = Sub (one, m)", "mask = Mul (n, big)"),
            *("sum = Add (scores, mask)", "y = Softmax (sum)"),
        ],
        {"big": [-30.0]},
    ),
    "a number that is subtracted, and scaled on the way": (
        "big = Constant <value_float = 1e9> () half = Constant <value_float = 0.5> () m = Cast <to = 1> (kept) "
        "mask = Mul (m, big) less = Sub (scores, mask) x = Mul (less, half) y = Softmax <axis = -1> (x)",
        [
            *("half = Constant ()", "m = Cast (kept)", "mask = Mul (m, big)", "less = Sub (scores, mask)"),
            *("x = Mul (less, half)", "y = Softmax (x)"),
        ],
        {"big": [60.0]},
    ),
    "a filled shape": (
        "shape = Shape (scores) big = ConstantOfShape <value = float[1] {-65504}> (shape) "
        "mask = Trilu <upper = 1> (big, k) sum = Add (scores, mask) y = Softmax <axis = -1> (sum)",
        [
            *("shape = Shape (scores)", "big = Expand (big_value, shape)", "mask = Trilu (big, k)"),
            *("sum = Add (scores, mask)", "y = Softmax (sum)"),
        ],
        {"big_value": [-30.0]},
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_before_and_after(name: str, clamped: Clamp) -> None:
    text, expected, numbers = PICTURES[name]
    model = model_of(f"{HEAD} {{ {text} }}", **({"k": np.array(1)} if "Trilu" in text else {}))
    after = clamped(model, bound=-30)
    onnx.checker.check_model(after, full_check=True)
    assert body(after) == expected
    assert numbers_of(after) == numbers
    assert body(clamped(after, bound=-30)) == expected


STAYS = {
    "the mask is read by others too": "c = Constant <value_float = -1e9> () m = Where (kept, scores, c) "
    "s = Softmax <axis = -1> (m) y = Add (s, m)",
    "no softmax": "c = Constant <value_float = -1e9> () m = Where (kept, scores, c) y = Identity (m)",
    "a limit, which no value has": "c = Constant <value_float = -1e9> () m = Max (scores, c) "
    "y = Softmax <axis = -1> (m)",
    "not far below zero": "c = Constant <value_float = -100.0> () m = Where (kept, scores, c) "
    "y = Softmax <axis = -1> (m)",
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name: str, context: PassContext) -> None:
    model = detached(model_of(f"{HEAD} {{ {STAYS[name]} }}"))
    result = ClampMask(bound=-30).apply(model, context)
    assert (result.model, result.changed) == (model, False)


def test_a_mask_that_is_an_input_is_named(context: PassContext) -> None:
    head = "g (float[2, 4, 8] q, float[2, 8, 4] k, float[2, 1, 4] mask, float[2, 4, 4] other) => (float[2, 4, 4] y)"
    text = "s = MatMul (q, k) m = Unsqueeze (mask, last) w = Squeeze (m, last) x = Add (s, w) z = Softmax (x) "
    model = model_of(f"{head} {{ {text} y = Add (z, other) }}", last=np.array([3]))
    result = ClampMask(bound=-30).apply(detached(model), context)
    assert result.why == (
        "no stored constant masks a Softmax; the input 'mask' is added before it: where the caller makes a mask, give "
        "it a finite bound, such as -30"
    )


def test_a_constant_that_others_read_keeps_its_value_beside_the_new_one(clamped: Clamp) -> None:
    model = model_of(
        f"{HEAD} {{ m = Where (kept, scores, c) s = Softmax <axis = -1> (m) y = Max (s, c) }}",
        c=np.array(LOWEST, np.float32),
    )
    after = clamped(model, bound=-30)
    assert body(after) == ["m = Where (kept, scores, c_clamped)", "s = Softmax (m)", "y = Max (s, c)"]
    assert numbers_of(after) == {"c": [LOWEST], "c_clamped": [-30.0]}


def test_a_causal_matrix_that_is_detached_is_clamped_where_it_masks(clamped: Clamp) -> None:
    causal = np.triu(np.full((32, 32), -np.inf, np.float32), 1)
    model = model_of(
        "g (float[2, 32, 32] scores) => (float[2, 32, 32] y) { x = Add (scores, causal) y = Softmax <axis = -1> (x) }",
        causal=causal,
    )
    after = clamped(model, bound=-30)
    [tensor] = after.graph.initializer
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), np.triu(np.full((32, 32), -30.0), 1))


def feeds_of(seed: int, scale: float, *, whole: bool = False) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    kept = generator.random((2, 1, 4)) < 0.5
    kept[:, :, generator.integers(4)] = not whole
    if whole:
        kept[0] = False
    scores = generator.uniform(-scale, scale, (2, 4, 4)).astype(np.float32)
    return {"scores": scores, "kept": kept}


def clamp_in_run(text: str, context: PassContext, scale: float, **weights: np.ndarray) -> PassRun:
    draws = [feeds_of(seed, scale) for seed in range(20)]
    return passes.optimize(model_of(text, **weights), ["clamp-mask"], feeds=draws, context=context)


@pytest.mark.parametrize("scale", [1.0, 5.0, 40.0])
@pytest.mark.parametrize("form", ["one less the mask, times a number", "scores are chosen already"])
def test_rows_with_an_unmasked_element_agree_over_the_observed_range(
    form: str, scale: float, context: PassContext
) -> None:
    text = f"{HEAD} {{ {PICTURES[form][0]} }}"
    result = clamp_in_run(text, context, scale)
    [row] = result.rows
    assert (row.status.value, row.changed) == ("ran", True)
    bound = min(min(numbers) for numbers in numbers_of(attach(result.model)).values())
    assert -9000 < bound <= -26  # what rounding needs, also of scores that are all 0
    assert bound > -26 - 2 * scale - 10
    for seed in range(100, 150):
        feeds = feeds_of(seed, scale / 2)  # within the range: half of it, so that no pair is further apart
        before, after = run(model_of(text), feeds), run(attach(result.model), feeds)
        np.testing.assert_allclose(after, before, rtol=3e-3 if "times" in form else 1e-6, atol=1e-9)


CHOSEN = {
    "by the condition": (
        PICTURES["a choice of 0 and the constant becomes one of scores and bound"][0],
        ["sum = Where (kept, scores, big)"],
        {"big": [-30.0]},
    ),
    "by a sliced condition": (
        "zero = Constant <value_float = 0.0> () big = Constant <value_float = -3.4028235e38> () "
        "mask = Where (kept, zero, big) wide = Expand (mask, shape) sum = Add (scores, wide) y = Softmax (sum)",
        [
            *("zero = Constant ()", "mask = Where (kept, zero, big)", "wide = Expand (mask, shape)"),
            *("wide_hidden = Less (wide, wide_zero)", "sum = Where (wide_hidden, wide, scores)"),
        ],
        {"big": [-30.0], "wide_zero": [0.0]},
    ),
    "by a product, which two softmaxes read": (
        "one = Constant <value_float = 1.0> () big = Constant <value_float = -3.4028235e38> () "
        "m = Cast <to = 1> (kept) n = Sub (one, m) mask = Mul (n, big) sum = Add (scores, mask) p = Softmax (sum) "
        "next = Add (mask, p) y = Softmax (next)",
        [
            *("one = Constant ()", "m = Cast (kept)", "n = Sub (one, m)", "mask = Mul (n, big)"),
            *("mask_hidden = Less (mask, mask_zero)", "sum = Where (mask_hidden, mask, scores)"),
            *("p = Softmax (sum)", "next = Where (mask_hidden, mask, p)"),
        ],
        {"big": [-30.0], "mask_zero": [0.0]},
    ),
    "by a causal mask and a product": (
        "one = Constant <value_float = 1.0> () big = Constant <value_float = -1e9> () m = Cast <to = 1> (kept) "
        "n = Sub (one, m) pad = Mul (n, big) mask = Add (causal, pad) sum = Add (mask, scores) y = Softmax (sum)",
        [
            *("one = Constant ()", "m = Cast (kept)", "n = Sub (one, m)", "pad = Mul (n, big)"),
            *("mask = Add (causal, pad)", "mask_hidden = Less (mask, mask_zero)"),
            "sum = Where (mask_hidden, mask, scores)",
        ],
        {"big": [-30.0], "mask_zero": [0.0], "causal": np.triu(np.full((4, 4), -30.0), 1)},
    ),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_row_that_is_masked_whole_keeps_its_equal_weights_where_scores_are_chosen(
    name: str, clamped: Clamp, context: PassContext
) -> None:
    text, expected, numbers = CHOSEN[name]
    weights = {"shape": np.array([2, 4, 4])} if "shape" in text else {}
    if "causal" in text:
        weights["causal"] = np.triu(np.full((4, 4), -1e9, np.float32), 1)
    source = model_of(f"{HEAD} {{ {text} }}", 20, **weights)
    after = clamped(source, bound=-30)
    assert body(after)[:-1] == expected
    assert {key: values for key, values in numbers_of(after).items() if key in numbers} == {
        key: np.ravel(values).tolist() for key, values in numbers.items()
    }
    assert body(clamped(after, bound=-30)) == body(after)
    feeds = feeds_of(0, 5.0, whole=True)
    np.testing.assert_allclose(run(after, feeds), run(source, feeds), rtol=1e-6, atol=1e-11)
    assert len(np.unique(np.round(run(after, feeds)[0, -1], 6))) == 1
    feeds = feeds_of(1, 5.0)
    np.testing.assert_allclose(run(after, feeds), run(source, feeds), rtol=1e-6, atol=1e-11)


def test_a_mask_that_is_no_choice_everywhere_is_added_as_it_was(clamped: Clamp) -> None:
    text = CHOSEN["by a product, which two softmaxes read"][0].replace("next = Add (mask, p)", "next = Sub (mask, p)")
    assert "Where" not in "".join(body(clamped(model_of(f"{HEAD} {{ {text} }}"), bound=-30)))


LIMITED = f"""{HEAD} {{
    zero = Constant <value_float = 0.0> () big = Constant <value_float = -3.4028235e38> ()
    mask = Where (kept, zero, big) wide = Max (mask, floor) sum = Add (scores, wide) y = Softmax <axis = -1> (sum)
}}"""


def test_it_is_said_where_a_row_that_is_masked_whole_changes(context: PassContext) -> None:
    floor = np.array(-3e38, np.float32)
    draws = [feeds_of(seed, 2.0) for seed in range(3)]
    [row] = passes.optimize(model_of(LIMITED, floor=floor), ["clamp-mask"], feeds=draws, context=context).rows
    assert row.reason == "masks with -30; a row that is masked as a whole gets other weights, which no draw shows"
    draws.append(feeds_of(3, 2.0, whole=True))
    [row] = passes.optimize(model_of(LIMITED, floor=floor), ["clamp-mask"], feeds=draws, context=context).rows
    assert row.status.value == "reverted"
    assert row.reason.startswith("differs: y")
    assert row.reason.endswith("a row that is masked as a whole gets other weights, 4 rows of the draws")


def test_without_a_draw_the_bound_has_to_be_given(context: PassContext) -> None:
    text = f"{HEAD} {{ {PICTURES['scores are chosen already'][0]} }}"
    [row] = passes.optimize(model_of(text), ["clamp-mask"], proof="structure", context=context).rows
    assert (row.changed, row.reason[:7]) == (False, "no draw")
    [row] = passes.optimize(model_of(text), [{"clamp-mask": {"bound": -50}}], proof="structure", context=context).rows
    assert (row.changed, row.reason[:14]) == (True, "masks with -50")


def test_before_opset_13_softmax_flattens(context: PassContext) -> None:
    """Each row has an unmasked element only if the axes after it are taken together."""
    source = model_of(
        "g (float[2, 2, 2] x, bool[2, 2, 2] kept) => (float[2, 2, 2] y) { big = Constant <value_float = -1e9> () "
        "one = Constant <value_float = 1.0> () m = Cast <to = 1> (kept) n = Sub (one, m) mask = Mul (n, big) "
        "sum = Add (x, mask) y = Softmax <axis = 1> (sum) }"
    )
    source.opset_import[0].version = 12
    kept = np.array([[[False, False], [True, False]]] * 2)
    feeds = [{"x": np.random.default_rng(seed).random((2, 2, 2), np.float32), "kept": kept} for seed in range(5)]
    [row] = passes.optimize(source, ["clamp-mask"], feeds=feeds, context=context).rows
    assert (row.status.value, row.changed, row.reason) == ("ran", True, "masks with -30")


@pytest.mark.parametrize("bound", [0, 3.5, float("-inf"), float("nan"), "low", True])
def test_a_bound_that_is_none_is_refused(bound: object, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=r"clamp-mask.*bound is"):
        steps_of([{"clamp-mask": {"bound": bound}}])[0].check(context)  # type: ignore[union-attr]
