"""SmoothQuant: where the factors go as pictures, that they are onnxsim's, and what stays and why."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnxsim.quark_smoothquant import smooth_quant

import passes
from passes import PassRow, PolicyError
from passes.context import PassContext
from passes.weights.detached import DetachedModel
from tests.support.onnx_models import detached, matrix, model_of
from tests.support.onnx_text import arrays_of, lines_of, picture

WIDTH = 16
OUTLIERS = [3, 11]


def feeds() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((2, 5, WIDTH)).astype(np.float32)} for _ in range(3)]


def scale_with_outliers() -> np.ndarray:
    """The scale of a norm as trained models have it: a few channels are far larger."""
    scale = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)
    scale[OUTLIERS] *= 40
    return scale


def smooth(model: onnx.ModelProto, context: PassContext, **options: object) -> tuple[DetachedModel, PassRow]:
    run = passes.optimize(model, [{"smooth-quant": options}], feeds=feeds(), context=context)
    [row] = run.rows
    return run.model, row


GATED = """g (float[2, 5, 16] x) => (float[2, 5, 8] y) {
    n = LayerNormalization <axis = -1> (x, scale, shift)
    a = MatMul (n, up)
    b = MatMul (n, gate)
    y = Mul (a, b)
}"""


def gated() -> onnx.ModelProto:
    shift = np.linspace(-1, 1, WIDTH, dtype=np.float32)
    return model_of(GATED, scale=scale_with_outliers(), shift=shift, up=matrix(WIDTH, 8, 0), gate=matrix(WIDTH, 8, 1))


def test_a_norm_takes_one_factor_for_all_products_after_it(context: PassContext) -> None:
    model = gated()
    after, row = smooth(model, context)
    assert (row.status.value, row.changed, row.reason) == ("ran", True, "smoothed 2 products")
    assert picture(after) == picture(detached(model)), "no node is added, and all names stay"
    old, new = arrays_of(detached(model)), arrays_of(after)
    factor = new["scale"] / old["scale"]
    np.testing.assert_allclose(new["shift"], old["shift"] * factor, rtol=1e-6)
    for name in ("up", "gate"):
        np.testing.assert_allclose(new[name] * factor[:, None], old[name], rtol=1e-6)
    others = [at for at in range(WIDTH) if at not in OUTLIERS]
    assert factor[OUTLIERS].max() < 0.4 * factor[others].min()


def test_the_factor_is_onnxsims_for_all_columns_together(context: PassContext) -> None:
    model = gated()
    together = """g (float[2, 5, 16] x) => (float[2, 5, 16] y) {
        n = LayerNormalization <axis = -1> (x, scale, shift)
        y = MatMul (n, w)
    }"""
    old = arrays_of(detached(model))
    both = {"scale": old["scale"], "shift": old["shift"], "w": np.concatenate([old["up"], old["gate"]], axis=1)}
    library = smooth_quant(model_of(together, **both), feeds(), alpha=0.7)
    (expected,) = (onnx.numpy_helper.to_array(one) for one in library.graph.initializer if one.name not in both)
    after, _ = smooth(model, context, alpha=0.7)
    np.testing.assert_allclose(arrays_of(after)["scale"] / old["scale"], expected, rtol=1e-5)


CHAINS = {
    "an RMS norm in parts": (
        """g (float[2, 5, 16] x) => (float[2, 5, 8] y) {
            xx = Mul (x, x)
            mean = ReduceMean <keepdims = 1> (xx, last)
            root = Sqrt (mean)
            unit = Div (x, root)
            n = Mul (scale, unit)
            y = MatMul (n, w)
        }""",
        ["scale", "w"],
    ),
    "a scale and a bias in parts": (
        """g (float[2, 5, 16] x) => (float[2, 5, 8] y) {
            unit = Tanh (x)
            m = Mul (unit, scale)
            n = Add (m, shift)
            y = MatMul (n, w)
        }""",
        ["scale", "shift", "w"],
    ),
}


@pytest.mark.parametrize("form", CHAINS)
def test_norms_in_several_operators_take_it_too(form: str, context: PassContext) -> None:
    text, expected = CHAINS[form]
    vectors = {"scale": scale_with_outliers(), "shift": np.linspace(-1, 1, WIDTH, dtype=np.float32)}
    used = {name: vectors[name] for name in vectors if name in expected}
    last = {"last": np.array([-1])} if "last" in text else {}
    model = model_of(text, w=matrix(WIDTH, 8, 0), **used, **last)
    after, row = smooth(model, context)
    assert row.reason == "smoothed 1 product"
    assert picture(after) == picture(detached(model))
    old, new = arrays_of(detached(model)), arrays_of(after)
    assert sorted(name for name in new if not np.array_equal(old[name], new[name])) == sorted(expected)


LEFT = {
    "another reader of the norm": """g (float[2, 5, 16] x) => (float[2, 5, 16] y) {
        n = LayerNormalization <axis = -1> (x, scale)
        a = MatMul (n, w)
        y = Add (a, n)
    }""",
    "no norm": """g (float[2, 5, 16] x) => (float[2, 5, 16] y) {
        s = Mul (x, scale)
        n = Tanh (s)
        y = MatMul (n, w)
    }""",
    "a bias on a sum that others read": """g (float[2, 5, 16] x) => (float[2, 5, 16] y) {
        m = Mul (x, scale)
        n = Add (m, scale)
        a = MatMul (n, w)
        y = Add (a, m)
    }""",
}


@pytest.mark.parametrize("form", LEFT)
def test_what_no_norm_is_in_front_of_stays_or_gets_a_node(form: str, context: PassContext) -> None:
    model = model_of(LEFT[form], scale=scale_with_outliers(), w=matrix(WIDTH, WIDTH, 0))
    same, row = smooth(model, context)
    why = "left 1 product without a norm that feeds no other node; add_nodes: true puts a Mul before it"
    assert (row.changed, row.reason) == (False, why)
    assert picture(same) == picture(detached(model))
    after, row = smooth(model, context, add_nodes=True)
    assert row.reason == "smoothed 1 product"
    added = [line for line in picture(after) if line not in picture(detached(model))]
    assert added[0] == "n.smoothed = Mul (n, n.smooth)"
    assert added[1].endswith(" = MatMul (n.smoothed, w)")


def test_a_weight_that_others_read_stays_for_them(context: PassContext) -> None:
    text = """g (float[2, 5, 16] x) => (float[2, 5, 16] y) {
        n = LayerNormalization <axis = -1> (x, scale)
        a = MatMul (n, w)
        b = Tanh (a)
        y = MatMul (b, w)
    }"""
    model = model_of(text, scale=scale_with_outliers(), w=matrix(WIDTH, WIDTH, 0))
    after, _ = smooth(model, context)
    assert picture(after) == lines_of("""
        n = LayerNormalization <axis = -1> (x, scale)
        a = MatMul (n, w_folded)
        b = Tanh (a)
        y = MatMul (b, w)""")


def test_a_channel_that_no_draw_shows_stays_as_it_is(context: PassContext) -> None:
    """onnxsim makes the weights of such a channel zero, which another input would show."""
    text = """g (float[2, 5, 16] x) => (float[2, 5, 8] y) {
        n = Mul (x, scale)
        y = MatMul (n, w)
    }"""
    model = model_of(text, scale=scale_with_outliers(), w=matrix(WIDTH, 8, 0))
    draws = feeds()
    for one in draws:
        one["x"][..., 5] = 0
    run = passes.optimize(model, ["smooth-quant"], feeds=draws, context=context)
    old, new = arrays_of(detached(model)), arrays_of(run.model)
    np.testing.assert_array_equal(new["w"][5], old["w"][5])
    assert new["scale"][5] == old["scale"][5]
    assert run.rows[0].changed


def test_gemms_are_named(context: PassContext) -> None:
    text = "g (float[5, 16] x) => (float[5, 8] y) { y = Gemm (x, w) }"
    draws = [{"x": feeds()[0]["x"][0]}]
    run = passes.optimize(model_of(text, w=matrix(WIDTH, 8, 0)), ["smooth-quant"], feeds=draws, context=context)
    assert (run.rows[0].changed, run.rows[0].reason) == (False, "onnxsim smooths no Gemm (1 here): the source has them")
    text = "g (float[5, 16] x) => (float[5, 8] y) { m = MatMul (x, w) y = Add (m, b) }"
    model = model_of(text, w=matrix(WIDTH, 8, 0), b=matrix(1, 8, 1)[0])
    run = passes.optimize(model, ["fuse_matmul_add_bias_into_gemm", "smooth-quant"], feeds=draws, context=context)
    why = "put smooth-quant before fuse_matmul_add_bias_into_gemm, or skip that"
    assert run.rows[1].reason.endswith(f"onnxsim smooths no Gemm (1 here): {why}")


def test_without_draws_nothing_is_smoothed(context: PassContext) -> None:
    run = passes.optimize(gated(), ["smooth-quant"], proof="structure", context=context)
    assert run.rows[0].reason == "no draw shows the range of the activations, so nothing is smoothed"


@pytest.mark.parametrize(("alpha", "message"), [(1.5, "expected a number from 0 to 1"), ("x", "expected a number")])
def test_mistakes(alpha: object, message: str, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=message):
        smooth(gated(), context, alpha=alpha)
